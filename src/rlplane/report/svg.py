"""Plots as SVG: a line over time, and bars of a histogram. Text in them is escaped."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

_WIDTH, _HEIGHT = 440, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 10, 12, 26


def line_plot(
    title: str,
    points: Sequence[tuple[float, float]],
    format_y: Callable[[float], str],
    format_x: Callable[[float], str],
) -> str:
    """A line through ``(x, y)`` from zero up, with the area below it filled."""
    first, last = points[0][0], points[-1][0]
    top = max(y for _, y in points) or 1.0
    coordinates = [(_x(x, first, last), _y(y, top)) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in coordinates)
    floor = _y(0, top)
    area = f"{coordinates[0][0]:.1f},{floor:.1f} {line} {coordinates[-1][0]:.1f},{floor:.1f}"
    body = f'<polygon class="area" points="{area}"/><polyline class="line" points="{line}"/>'
    return _frame(title, body, top, format_y, (format_x(first), format_x(last)))


def bar_plot(
    title: str,
    edges: Sequence[float],
    counts: Sequence[int],
    format_x: Callable[[float], str],
    marks: Sequence[tuple[str, float]] = (),
) -> str:
    """Bars of equal width, one per bucket (the edges are log-spaced), with marks such as percentiles."""
    top = float(max(counts, default=0) or 1)
    width = (_WIDTH - _LEFT - _RIGHT) / max(1, len(counts))
    bars = []
    for index, count in enumerate(counts):
        y = _y(count, top)
        label = f"{format_x(edges[index])} – {format_x(edges[index + 1])}: {count:,}"
        bars.append(
            f'<rect class="bar" x="{_LEFT + index * width:.1f}" y="{y:.1f}" '
            f'width="{max(0.5, width - 1):.1f}" '
            f'height="{max(0.0, _y(0, top) - y):.1f}"><title>{html.escape(label)}</title></rect>'
        )
    for name, value in marks:
        x = _LEFT + width * _position(edges, value)
        bars.append(
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_y(0, top):.1f}"/>'
            f'<text class="tick" x="{x + 2:.1f}" y="{_TOP + 8}">{html.escape(name)}</text>'
        )
    return _frame(title, "".join(bars), top, lambda y: f"{y:,.0f}", (format_x(edges[0]), format_x(edges[-1])))


def _position(edges: Sequence[float], value: float) -> float:
    """Where a value is among the buckets, in buckets from the left."""
    for index in range(len(edges) - 1):
        if value <= edges[index + 1]:
            span = edges[index + 1] - edges[index]
            return index + ((value - edges[index]) / span if span > 0 else 0.5)
    return len(edges) - 1.0


def _frame(title: str, body: str, top: float, format_y: Callable[[float], str], ends: tuple[str, str]) -> str:
    floor = _y(0, top)
    right = _WIDTH - _RIGHT
    grid = "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{_y(y, top):.1f}" y2="{_y(y, top):.1f}"/>'
        f'<text class="tick" text-anchor="end" x="{_LEFT - 5}" y="{_y(y, top) + 3:.1f}">'
        f"{html.escape(format_y(y))}</text>"
        for y in (0.0, top / 2, top)
    )
    ticks = (
        f'<text class="tick" x="{_LEFT}" y="{floor + 15}">{html.escape(ends[0])}</text>'
        f'<text class="tick" text-anchor="end" x="{right}" y="{floor + 15}">{html.escape(ends[1])}</text>'
    )
    return (
        f'<figure><figcaption>{html.escape(title)}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'role="img" aria-label="{html.escape(title, quote=True)}">{grid}{body}{ticks}</svg></figure>'
    )


def _x(value: float, first: float, last: float) -> float:
    share = (value - first) / (last - first) if last > first else 0.5
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)
