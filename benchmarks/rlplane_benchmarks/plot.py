"""A result as a picture: bars of time on a logarithmic scale, one panel per batch. SVG, written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from rlplane_benchmarks.participants import COPY, COPY_1, RLPLANE
from rlplane_benchmarks.results import BenchResult, Series
from rlplane_benchmarks.table import format_seconds

__all__ = ["svg_plot"]

_OPS = ("put", "get+touch", "scattered+touch", "clear")
_COLOURS = ("#2563eb", "#9ca3af", "#d1d5db", "#f59e0b", "#fbbf24", "#dc2626", "#059669", "#7c3aed")
_LIMITS = (COPY, COPY_1)
_WIDTH, _LEFT, _RIGHT = 960, 150, 110
_BAR, _GAP, _HEAD = 13, 10, 34


def svg_plot(result: BenchResult) -> str:
    """The times of put, get and clear (medians; the thin line spans the quartiles)."""
    names = [name for name in result.participants if any(s.participant == name for s in _shown(result))]
    # rlplane comes first, so that it has the same colour in every plot.
    names.sort(key=lambda name: name != RLPLANE)
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(names)}
    body, at = list(_legend(colours)), 70
    for workload, title in result.workloads.items():
        panel, height = _panel(result, workload, title, colours, at)
        body += panel
        at += height
    machine = f"{result.machine.cpu}, {result.machine.cores} cores, torch {result.machine.torch}"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{at + 10}"'
        f' viewBox="0 0 {_WIDTH} {at + 10}" font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape('rlplane bench')}</title>",
        f'<rect width="{_WIDTH}" height="{at + 10}" fill="white"/>',
        _text(16, 26, "rlplane bench: shorter is faster, scale is logarithmic", size=16, bold=True),
        _text(16, 44, machine, colour="#6b7280"),
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def _shown(result: BenchResult) -> list[Series]:
    return [series for series in result.series if series.part in ("data", "images")]


def _legend(colours: dict[str, str]) -> Iterator[str]:
    x = 16.0
    for name, colour in colours.items():
        yield f'<rect x="{x:.0f}" y="54" width="10" height="10" fill="{colour}"/>'
        yield _text(x + 14, 63, name)
        x += 30 + 7 * len(name)


def _panel(
    result: BenchResult, workload: str, title: str, colours: dict[str, str], top: int
) -> tuple[list[str], int]:
    found = [
        (op, [series for name in colours if (series := result.find(workload, name, op)) is not None])
        for op in _OPS
    ]
    # A limit clears nothing; its bar would only stretch the scale.
    found = [(op, [s for s in group if op != "clear" or s.participant not in _LIMITS]) for op, group in found]
    found = [(op, group) for op, group in found if group]
    if not found:
        return [], 0
    every = [series for _, group in found for series in group]
    low = math.floor(math.log10(max(min(s.q1 for s in every), 1e-9)))
    high = max(math.ceil(math.log10(max(s.q3 for s in every))), low + 1)

    def x(seconds: float) -> float:
        share = (math.log10(max(seconds, 10.0**low)) - low) / (high - low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    out = [_text(16, top + 22, title, size=14, bold=True)]
    y = top + _HEAD
    bars: list[str] = []
    for op, group in found:
        bars.append(_text(_LEFT - 8, y + _BAR * len(group) / 2 + 4, op, anchor="end"))
        for series in group:
            bars += _bar(series, x, y, colours[series.participant])
            y += _BAR
        y += _GAP
    out += _grid_lines(range(low, high + 1), x, top + _HEAD, y)
    return [*out, *bars], y + 18 - top


def _bar(series: Series, x: Callable[[float], float], y: float, colour: str) -> list[str]:
    middle = y + _BAR / 2
    return [
        f'<rect x="{_LEFT}" y="{y + 1:.1f}" width="{max(x(series.median) - _LEFT, 1):.1f}"'
        f' height="{_BAR - 2}" fill="{colour}"/>',
        f'<line x1="{x(series.q1):.1f}" x2="{x(series.q3):.1f}" y1="{middle:.1f}" y2="{middle:.1f}"'
        ' stroke="#111827" stroke-width="1.5"/>',
        _text(x(series.q3) + 5, y + _BAR - 3, format_seconds(series.median), size=10, colour="#374151"),
    ]


def _grid_lines(
    powers: Sequence[int], x: Callable[[float], float], top: float, bottom: float
) -> Iterator[str]:
    for power in powers:
        at = x(10.0**power)
        yield (
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}" stroke="#e5e7eb"/>'
            + _text(at, bottom + 10, format_seconds(10.0**power), size=10, anchor="middle", colour="#6b7280")
        )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    bold: bool = False,
    anchor: str = "start",
    colour: str = "#111827",
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>'
        f"{escape(text)}</text>"
    )
