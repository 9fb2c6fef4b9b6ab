"""The screens beside the main one: one partition, the report at the end, the keys."""

from __future__ import annotations

import contextlib
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, Static

from rlplane.errors import ConfigError
from rlplane.metrics.events import FlowStat
from rlplane.metrics.snapshot import MetricsSnapshot
from rlplane.report import Report, render_text
from rlplane.tui.panes import sample_table, task_table
from rlplane.tui.sparks import bar
from rlplane.viewing.feed import read_run
from rlplane.viewing.flow import PRODUCERS, FlowPicture, partition_flow
from rlplane.viewing.runs import figures_of, finished_runs
from rlplane.viewing.units import (
    format_bytes,
    format_count,
    format_duration,
    format_ns,
    format_percent,
    format_reasons,
    printable,
)

_RUNS_SHOWN = 6

_BACK: list[BindingType] = [Binding("escape,q,backspace", "dismiss", "Back")]


class PartitionScreen(Screen[None]):
    """One partition: its flow, its tasks, its oldest samples. The application keeps it up to date."""

    CSS = """
    #flow { height: auto; padding: 1 2; background: $panel; }
    #tasks { height: 1fr; margin: 1 0 0 0; }
    #samples { height: 1fr; margin: 1 0 0 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = _BACK

    def __init__(self, partition: str) -> None:
        super().__init__()
        self.partition = partition

    def compose(self) -> ComposeResult:
        yield Static(id="flow")
        yield task_table()
        yield sample_table()
        yield Footer()

    def show(self, snapshot: MetricsSnapshot) -> None:
        """Draw a snapshot."""
        picture = partition_flow(snapshot, self.partition)
        flow = self.query_one("#flow", Static)
        if picture is None:
            flow.update(Text(f"{printable(self.partition)} is not in the run any more"))
            return
        flow.update(_describe(picture, snapshot))
        part = next(part for part in snapshot.partitions if part.partition == self.partition)
        rates = {task.task: task.rate for task in picture.tasks}

        def percentile(series: str, task: str, name: str) -> float | None:
            found = next(snapshot.series(series, partition=self.partition, task=task), None)
            return None if found is None else found.percentiles.get(name)

        rows = [
            (
                task,
                rates.get(task.task, 0.0),
                percentile("written_to_claimed", task.task, "p50"),
                percentile("written_to_claimed", task.task, "p99"),
                percentile("staleness", task.task, "p90"),
            )
            for task in part.tasks
        ]
        self.query_one("#tasks").set_rows(rows)  # type: ignore[attr-defined]
        own = [sample for sample in snapshot.oldest if sample.partition == self.partition]
        self.query_one("#samples").set_rows(own)  # type: ignore[attr-defined]


def _describe(picture: FlowPicture, snapshot: MetricsSnapshot) -> Text:
    cleared = next(snapshot.series("written_to_cleared", partition=picture.partition), None)
    text = Text()
    text.append(printable(picture.partition), "bold")
    text.append(f"   {format_count(picture.samples)} samples, {format_bytes(picture.bytes)}")
    if picture.fill is not None:
        text.append(f"   {bar(picture.fill, 20)} {format_percent(picture.fill)} full")
    text.append("\n\n")
    _stage(text, "producers", picture.holdup == PRODUCERS)
    text.append(f" ─{format_count(picture.write_rate)}/s→ ")
    text.append(f"[{format_count(picture.samples)}]", "bold")
    text.append(" → ")
    for before, task in zip([None, *picture.tasks], picture.tasks, strict=False):
        if before is not None:
            text.append(" → " if task.stage > before.stage else " · ")
        _stage(text, task.task, picture.holdup == task.task)
        text.append(f" {format_count(task.rate)}/s")
    text.append(f" ─{format_count(picture.clear_rate)}/s→ cleared")
    if picture.holdup is not None:
        what = "the producers hold" if picture.holdup == PRODUCERS else f"{printable(picture.holdup)} holds"
        text.append(f"\n{what} everything up", "bold yellow")
    part = next(part for part in snapshot.partitions if part.partition == picture.partition)
    if part.flow is not None:
        text.append(f"\n{_policy_text(part.flow)}", "cyan")
    if cleared is not None and cleared.count:
        text.append(f"\nfrom write to clear: p50 {format_ns(cleared.percentiles.get('p50'))}", "dim")
        text.append(f", p99 {format_ns(cleared.percentiles.get('p99'))}", "dim")
    return text


def _policy_text(flow: FlowStat) -> str:
    bound = "" if flow.max_staleness is None else f", at most {flow.max_staleness} old"
    parts = [f"{printable(flow.policy) or 'no policy'}: weight version {flow.version}{bound}"]
    if flow.admitted or flow.waiting:
        parts.append(
            f"{format_count(flow.admitted)} admitted, {format_count(flow.waiting)} wait for admission"
        )
    for what, counts in (("evicted", flow.evicted), ("groups closed short", flow.closed_short)):
        if counts:
            parts.append(f"{what}: {printable(format_reasons(counts))}")
    return "; ".join(parts)


def _stage(text: Text, name: str, holds: bool) -> None:
    text.append(printable(name), "black on yellow" if holds else "bold cyan")


class ReportScreen(Screen[None]):
    """The report of a run that has ended."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace", "dismiss", "Back"),
        Binding("q", "app.quit", "Quit"),
    ]
    CSS = """
    #report-head { height: 1; background: $success; color: $text; padding: 0 1; }
    #report { padding: 1 2; width: auto; }
    """

    def __init__(self, snapshot: MetricsSnapshot) -> None:
        super().__init__()
        self.snapshot = snapshot

    def compose(self) -> ComposeResult:
        lasted = format_duration(self.snapshot.elapsed_s)
        yield Static(Text(f"The run has ended after {lasted}: {self.snapshot.state.value}"), id="report-head")
        with VerticalScroll():
            lines = render_text(Report.from_snapshot(self.snapshot)).splitlines()
            yield Static(Text("\n".join(map(printable, lines))), id="report")
        yield Footer()


class RunsScreen(Screen[None]):
    """The finished runs of this machine beside the one that is shown: a column each."""

    BINDINGS: ClassVar[list[BindingType]] = _BACK
    CSS = """
    #runs-head { height: 1; background: $panel; padding: 0 1; }
    #runs { padding: 1 2; width: auto; }
    """

    def __init__(self, snapshot: MetricsSnapshot | None) -> None:
        super().__init__()
        self.snapshot = snapshot

    def compose(self) -> ComposeResult:
        yield Static(
            Text("Finished runs of this machine; rlplane report RUN_DIR has all of one"), id="runs-head"
        )
        with VerticalScroll():
            yield Static(self._table(), id="runs")
        yield Footer()

    def _table(self) -> Table:
        columns = [] if self.snapshot is None else [(self.snapshot.run_id, figures_of(self.snapshot))]
        for run in finished_runs()[:_RUNS_SHOWN]:
            with contextlib.suppress(ConfigError):
                columns.append((run.run_id, figures_of(read_run(run.directory))))
        table = Table(box=None, padding=(0, 2))
        table.add_column("")
        for name, _ in columns:
            table.add_column(printable(name), justify="right")
        for figure in dict.fromkeys(figure for _, figures in columns for figure in figures):
            cells = (printable(figures.get(figure, "–")) for _, figures in columns)
            table.add_row(printable(figure), *cells)
        return table


class KeysScreen(ModalScreen[None]):
    """What the keys do."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark", "dismiss", "Back")]
    CSS = """
    KeysScreen { align: center middle; }
    #keys { width: 62; height: auto; padding: 1 2; background: $panel; border: round $primary; }
    """
    KEYS = (
        ("1 2 3 4", "partitions, workers, oldest samples, log"),
        ("tab", "next table"),
        ("↑ ↓ PgUp PgDn", "move the cursor; ← → on a narrow terminal"),
        ("enter", "look into a partition"),
        ("s  S  r", "sort by the next or previous column, reverse"),
        ("/", "filter partitions, workers and samples by a text"),
        ("p or space", "pause and go on"),
        ("f", "the report, as it would be now"),
        ("h", "finished runs beside this one"),
        ("esc", "back; in the filter: clear it"),
        ("q", "quit"),
    )

    def compose(self) -> ComposeResult:
        text = Text("Keys\n\n", "bold")
        for keys, what in self.KEYS:
            text.append(f"{keys:<16}", "cyan").append(f"{what}\n")
        yield Static(text, id="keys")
