"""A result as text: times with their spread, ratios to the limit and to each peer, and the targets."""

from __future__ import annotations

from collections.abc import Sequence

from rlplane_benchmarks.claim_orders import PLAIN
from rlplane_benchmarks.participants import AS_TRANSFER_QUEUE, COPY, COPY_1, RLPLANE, ZMQ
from rlplane_benchmarks.results import CLUSTER_SCHEMA, BenchResult, Machine, Ratio, Series, ratio_of

__all__ = ["format_result", "format_seconds"]

_DATA_OPS = ("put", "get", "get+touch", "get drop", "scattered", "scattered+touch", "clear", "held")
_LIMITS = (COPY, COPY_1)
_UNMEASURED = "–"

_LEGEND = (
    "Medians, ± the distance between the quartiles as a share of the median. get is the call; +touch adds a"
    " read of every byte that it returned; drop is the time to free it. ÷ compares times: above 1 it"
    " took longer. A ratio with ? means nothing: its quartiles leave it open by more than a factor of 2."
)


def format_result(result: BenchResult) -> str:
    """The whole result: the machine, every part, the checks of the reads, the targets and the notes."""
    blocks = [_head(result)]
    blocks += [_data(result, name, title) for name, title in result.workloads.items()]
    blocks += [
        _loop_lag(result),
        _listing(result),
        _wake(result),
        _claims(result),
        _orders(result),
        _clients(result),
        _control(result),
    ]
    blocks += [_checks(result), _targets(result)]
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
    if result.schema == CLUSTER_SCHEMA:
        kind = f"cluster {kind} on {result.backend}"
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
    ops = [op for op in _DATA_OPS if any(s.workload == workload and s.op == op for s in result.series)]
    rows: list[list[str]] = []
    for name in result.participants:
        found = {op: result.find(workload, name, op) for op in ops}
        if not any(found.values()):
            continue
        # A limit has nothing to clear and nothing to drop.
        shown = [op for op in ops if not (name in _LIMITS and op in ("clear", "get drop"))]
        rows.append([name, *(_time(found[op]) if op in shown else _UNMEASURED for op in ops)])
        other = COPY if name == RLPLANE else RLPLANE if name not in _LIMITS else None
        ratios = [_against(result, workload, found[op], other, op) for op in ops]
        if any(ratios):
            rows.append([f"  ÷ {other}", *ratios])
    return _grid(title, ["", *ops], rows) if rows else ""


def _against(result: BenchResult, workload: str, series: Series | None, other: str | None, op: str) -> str:
    if other is None or (other == COPY and op in ("clear", "get drop")):
        return ""
    return _quotient(series, result.find(workload, other, op))


def _wake(result: BenchResult) -> str:
    trip = result.find("ping", ZMQ, "round trip")
    rows = []
    for series in result.series:
        if series.part in ("ping", "wake"):
            row = [f"{series.participant}, {series.op}", _time(series), format_seconds(series.p99)]
            if trip is not None:
                row += [f"{series.median / trip.median:.1f}", f"{series.p99 / trip.median:.1f}"]
            rows.append(row)
    title, head = "From a put to the return of a claim that waited for it", ["", "p50", "p99"]
    if trip is not None:
        title, head = f"{title}, and bare round trips", [*head, "p50 in round trips", "p99 in round trips"]
    return _grid(title, head, rows) if rows else ""


def _loop_lag(result: BenchResult) -> str:
    title = "By how much a task wakes too late on an event loop where an asyncio client waits and puts"
    found = [series for series in result.series if series.part == "loop"]
    rows = [
        [
            f"{series.participant}, {series.op}",
            *map(format_seconds, (series.median, series.p99, max(series.values))),
        ]
        for series in found
    ]
    return _grid(title, ["", "p50", "p99", "largest"], rows) if rows else ""


def _listing(result: BenchResult) -> str:
    title = "Listing the keys of a partition, with their tags"
    return _by_level(result, "list", title, "{:,} keys", base=AS_TRANSFER_QUEUE)


def _claims(result: BenchResult) -> str:
    return _by_level(result, "claims", "A claim, by the number of samples that are resident", "{:,} resident")


def _orders(result: BenchResult) -> str:
    found = {series.workload: series for series in result.series if series.part == "orders"}
    rows = [[name, _time(series), _quotient(series, found.get(PLAIN))] for name, series in found.items()]
    title = "A claim by order and flow policy: CPU time of the control state alone"
    return _grid(title, ["", found[PLAIN].op, f"÷ {PLAIN}"], rows) if rows else ""


def _clients(result: BenchResult) -> str:
    title = "Clients at once: cycles of put, claim, get and clear per second; more is better"
    return _by_level(result, "clients", title, "clients: {}")


def _control(result: BenchResult) -> str:
    title = "CPU time of the control service for one of these cycles"
    return _by_level(result, "control", title, "clients: {}")


def _by_level(result: BenchResult, part: str, title: str, column: str, base: str = RLPLANE) -> str:
    series = [found for found in result.series if found.part == part]
    levels = sorted({int(found.workload) for found in series})
    names = [name for name in result.participants if any(found.participant == name for found in series)]
    by_key = {(found.participant, int(found.workload)): found for found in series}
    rows = []
    for name in names:
        rows.append([name, *(_time(by_key.get((name, level))) for level in levels)])
        if name != base:
            # More is better if these are cycles per second, and worse if they are times.
            rows.append(
                [
                    f"  ÷ {base}",
                    *(_quotient(by_key.get((name, n)), by_key.get((base, n))) for n in levels),
                ]
            )
    return _grid(title, ["", *(column.format(level) for level in levels)], rows) if rows else ""


def _checks(result: BenchResult) -> str:
    lines = []
    for check in result.checks:
        if check.wrong:
            lines.append(f"{check.participant} RETURNED WRONG BYTES: {'; '.join(check.wrong)}")
        if check.failure:
            lines.append(f"{check.participant} did not finish")
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
    if series.unit == "share":
        return f"{series.median:.1%}"
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
