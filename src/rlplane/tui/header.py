"""The top of the screen: which run, how it is, how old the picture is, and the figures of now."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text
from textual.widgets import Static

from rlplane.metrics.snapshot import MetricsSnapshot
from rlplane.tui.sparks import spark
from rlplane.viewing.feed import FeedStatus
from rlplane.viewing.health import findings, health
from rlplane.viewing.history import History
from rlplane.viewing.units import format_bytes, format_count, format_duration, format_share, printable

_STATE_STYLES = {
    "INITIALIZE": "black on bright_blue",
    "LIVE": "black on bright_cyan",
    "DRAINING": "black on bright_blue",
    "COMPLETE": "black on bright_green",
    "INTERRUPTED": "white on red",
}
_HEALTH_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


class RunHeader(Static):
    """Two lines: the run, and the worst that is to be said about it."""

    DEFAULT_CSS = """
    RunHeader { height: 2; padding: 0 1; background: $panel; }
    """

    def show(self, snapshot: MetricsSnapshot | None, status: FeedStatus, *, paused: bool) -> None:
        """Draw both lines; they are all that changes when no snapshot comes."""
        first = Text(no_wrap=True, overflow="ellipsis")
        if snapshot is None:
            first.append(" NO RUN ", "black on white")
            first.append(f"  {status.text}")
            self.update(Text("\n").join([first, Text("or start one to look at: rlplane demo", style="dim")]))
            return
        first.append(f" {snapshot.state.value} ", _STATE_STYLES[snapshot.state.value])
        first.append(f"  {printable(snapshot.run_id)}", "bold")
        first.append(f"  up {format_duration(snapshot.elapsed_s)}")
        first.append(f"  on {printable(snapshot.host) or 'this machine'}", "dim")
        alive = sum(worker.state == "alive" for worker in snapshot.workers)
        first.append(f"  {alive}/{len(snapshot.workers)} workers")
        if paused:
            first.append("  PAUSED ", "black on yellow")
        self.update(Text("\n").join([first, _second_line(snapshot, status)]))


def _second_line(snapshot: MetricsSnapshot, status: FeedStatus) -> Text:
    if status.state == "stale":
        return Text(f"OLD DATA: {status.text}", "white on red", no_wrap=True, overflow="ellipsis")
    found = findings(snapshot)
    level = health(found)
    line = Text(no_wrap=True, overflow="ellipsis")
    if not found:
        return line.append("healthy", _HEALTH_STYLES["ok"])
    line.append(printable(found[0].text), _HEALTH_STYLES[level])
    if len(found) > 1:
        line.append(
            printable(f"  (and {len(found) - 1} more: {'; '.join(one.text for one in found[1:])})"), "dim"
        )
    return line


class Figures(Static):
    """Four figures with their last minutes; a fifth when training steps are marked."""

    DEFAULT_CSS = """
    Figures { height: 4; padding: 0 1; margin: 1 0 0 0; }
    """

    def show(self, snapshot: MetricsSnapshot, history: History) -> None:
        """Draw them for a width that is known only now."""
        points = history.points[-240:]
        gauges = {gauge.name: gauge for gauge in snapshot.gauges() if not gauge.labels}
        held, samples = gauges.get("bytes_held"), gauges.get("samples_held")
        stale = points[-1].stale_mean if points else None
        width = max(12, (self.size.width - 8) // 4 - 1)
        cells: list[tuple[str, str, str, list[float | None], str]] = [
            (
                "operations",
                f"{format_count(snapshot.rate('ops'))}/s",
                f"{format_bytes(snapshot.rate('op_bytes'))}/s",
                [point.ops for point in points],
                "cyan",
            ),
            (
                "samples",
                f"{format_count(snapshot.rate('samples_written'))}/s written",
                f"{format_count(snapshot.rate('samples_cleared'))}/s cleared",
                [point.written for point in points],
                "blue",
            ),
            (
                "held",
                format_bytes(held.value if held else None),
                f"{format_count(samples.value if samples else None)} samples",
                [point.bytes_held for point in points],
                "magenta",
            ),
            (
                "staleness",
                "–" if stale is None else f"{stale:.1f} versions",
                f"weights {format_count(gauges['weight_version'].value)}"
                if "weight_version" in gauges
                else "",
                [point.stale_mean for point in points],
                "yellow",
            ),
        ]
        totals = snapshot.step_totals
        if totals.count:
            marked = [step for step in snapshot.steps if step.seconds]
            waiting = f"waiting {format_share(totals.share('waiting_s'))}"
            cells.append(
                (
                    f"step {marked[-1].step}" if marked else "steps",
                    f"{format_share(totals.share())} in the plane",
                    f"{waiting}, {format_count(totals.tokens_per_s)} tokens/s",
                    [step.plane_s / step.seconds for step in marked],
                    "green",
                )
            )
        grid = Table.grid(expand=True, padding=(0, 1))
        for _ in cells:
            grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        grid.add_row(*(Text(title, "dim") for title, *_ in cells))
        grid.add_row(*(Text(now, "bold") for _, now, *_ in cells))
        grid.add_row(*(Text(more, "dim") for _, _, more, *_ in cells))
        grid.add_row(*(Text(spark(values, width), colour) for *_, values, colour in cells))
        self.update(grid)
