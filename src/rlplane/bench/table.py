"""A result as text: times with their spread, ratios to the limit and to each peer, and the targets."""

from __future__ import annotations

from collections.abc import Sequence

from rlplane.bench.contestants import COPY, COPY_1, RLPLANE, ZMQ
from rlplane.bench.results import BenchResult, Machine, Ratio, Series, ratio_of

__all__ = ["format_result", "format_seconds"]

_DATA_OPS = ("put", "get", "get+touch", "get drop", "scattered", "scattered+touch", "clear")
_LIMITS = (COPY, COPY_1)
_UNMEASURED = "–"

_LEGEND = (
    "Medians, ± the distance between the quartiles as a share of the median. get is the call; +touch adds a"
    " read of every byte that it returned; drop is what letting go of it costs. ÷ compares times: above 1 it"
    " took longer. A ratio with ? means nothing: its quartiles leave it open by more than a factor of 2."
)


def format_result(result: BenchResult) -> str:
    """Everything that a person wants to know, in the order in which they ask."""
    blocks = [_head(result)]
    blocks += [_data(result, name, title) for name, title in result.workloads.items()]
    blocks += [_wake(result), _claims(result), _clients(result), _checks(result), _targets(result)]
    blocks += [f"Note: {note}" for note in result.notes]
    return "\n\n".join(block for block in blocks if block) + "\n"


def format_seconds(seconds: float) -> str:
    """Three digits, in the unit that fits."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _head(result: BenchResult) -> str:
    kind = "quick bench" if result.quick else "bench"
    if result.scale != 1:
        kind += f" at scale {result.scale:g}"
    return f"rlplane {kind}, {result.elapsed_s:.0f} s\n{_machine(result.machine)}\n\n{_LEGEND}"


def _machine(machine: Machine) -> str:
    return (
        f"{machine.cpu or 'unknown CPU'}, {machine.cores} cores, {machine.memory_bytes / 2**30:.1f} GiB;"
        f" Linux {machine.kernel}, Python {machine.python}, torch {machine.torch} with"
        f" {machine.torch_threads} thread{'s' * (machine.torch_threads != 1)};"
        f" load {machine.load_before:.1f} before, {machine.load_after:.1f} after"
    )


def _data(result: BenchResult, workload: str, title: str) -> str:
    rows: list[list[str]] = []
    for name in result.contestants:
        found = {op: result.find(workload, name, op) for op in _DATA_OPS}
        if not any(found.values()):
            continue
        # The limit forgets nothing, so its clear is no work and no measure.
        shown = [op for op in _DATA_OPS if not (name in _LIMITS and op in ("clear", "get drop"))]
        rows.append([name, *(_time(found[op]) if op in shown else _UNMEASURED for op in _DATA_OPS)])
        other = COPY if name == RLPLANE else RLPLANE if name not in _LIMITS else None
        if other is not None:
            rows.append(
                [f"  ÷ {other}", *(_against(result, workload, found[op], other, op) for op in _DATA_OPS)]
            )
    return _grid(title, ["", *_DATA_OPS], rows) if rows else ""


def _against(result: BenchResult, workload: str, series: Series | None, other: str, op: str) -> str:
    if other == COPY and op in ("clear", "get drop"):
        return ""
    return _quotient(series, result.find(workload, other, op))


def _wake(result: BenchResult) -> str:
    trip = result.find("ping", ZMQ, "round trip")
    rows = []
    for series in result.series:
        if series.part in ("ping", "wake"):
            row = [f"{series.contestant}, {series.op}", _time(series), format_seconds(series.p99)]
            in_trips = "" if trip is None else f"{series.median / trip.median:.1f}"
            tail = "" if trip is None else f"{series.p99 / trip.median:.1f}"
            rows.append([*row, in_trips, tail])
    title = "From a put to the return of a claim that waited for it, and bare round trips"
    return _grid(title, ["", "p50", "p99", "p50 in round trips", "p99 in round trips"], rows) if rows else ""


def _claims(result: BenchResult) -> str:
    return _by_level(result, "claims", "A claim with so many samples resident", " resident")


def _clients(result: BenchResult) -> str:
    title = "So many clients at once: cycles of put, claim, get and clear per second, more is better"
    return _by_level(result, "clients", title, " clients")


def _by_level(result: BenchResult, part: str, title: str, unit: str) -> str:
    series = [found for found in result.series if found.part == part]
    levels = sorted({int(found.workload) for found in series})
    names = [name for name in result.contestants if any(found.contestant == name for found in series)]
    by_key = {(found.contestant, int(found.workload)): found for found in series}
    rows = []
    for name in names:
        rows.append([name, *(_time(by_key.get((name, level))) for level in levels)])
        if name != RLPLANE:
            # More is better here where it is cycles, and worse where it is time; the title says which.
            rows.append(
                [
                    f"  ÷ {RLPLANE}",
                    *(_quotient(by_key.get((name, n)), by_key.get((RLPLANE, n))) for n in levels),
                ]
            )
    return _grid(title, ["", *(f"{level:,}{unit}" for level in levels)], rows) if rows else ""


def _checks(result: BenchResult) -> str:
    lines = []
    for check in result.checks:
        if check.wrong:
            lines.append(f"{check.contestant} RETURNED WRONG BYTES: {'; '.join(check.wrong)}")
        if check.failure:
            lines.append(f"{check.contestant} did not finish")
    reads = sum(check.reads for check in result.checks)
    if result.right:
        lines.insert(0, f"All {reads:,} reads were compared with what was written, byte by byte: right.")
    return "\n".join(lines)


def _targets(result: BenchResult) -> str:
    rows = []
    for target in result.targets:
        measured = _UNMEASURED if target.measured is None else f"{target.measured.value:.3g}"
        rows.append([target.what, target.target, measured, target.verdict, target.note])
    return _grid("Targets", ["", "target", "measured", "verdict", ""], rows, left=(0, 3, 4))


def _time(series: Series | None) -> str:
    if series is None:
        return _UNMEASURED
    value = format_seconds(series.median) if series.unit == "s" else f"{series.median:,.0f}/s"
    return f"{value} ±{series.spread:.0%}"


def _quotient(series: Series | None, other: Series | None) -> str:
    if series is None or other is None:
        return ""
    return _ratio(ratio_of(series, other))


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.2f}{'?' if ratio.meaningless else ''}"


def _grid(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [title]
    for row in (head, *rows):
        cells = [
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
