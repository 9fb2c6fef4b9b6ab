"""``rlplane top``: the application. A timer looks at the feed; drawing costs what is seen, not all of it."""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar

from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Footer, Input, TabbedContent, TabPane

from rlplane.metrics.snapshot import MetricsSnapshot
from rlplane.tui.header import Figures, RunHeader
from rlplane.tui.live_table import LiveTable
from rlplane.tui.panes import (
    SPARK_WIDTH,
    log_table,
    op_rows,
    op_table,
    partition_table,
    sample_table,
    worker_rows,
    worker_table,
)
from rlplane.tui.screens import KeysScreen, PartitionScreen, ReportScreen, RunsScreen
from rlplane.viewing.feed import RunFeed
from rlplane.viewing.history import History

_REFRESH_S = 0.25
_TABS = ("partitions", "workers", "samples", "log")
_OPS_SEEN = 8
_FILTERED = ("#partitions", "#workers", "#samples")


class TopApp(App[None]):
    """Shows what a feed brings. The caller owns the feed and closes it."""

    TITLE = "rlplane top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #ops { height: 3; max-height: 9; margin: 1 0 0 0; }
    TabbedContent { height: 1fr; margin: 1 0 0 0; }
    .-low Figures { display: none; }
    .-low TabbedContent, .-low #ops { margin: 0; }
    TabPane { padding: 0; }
    #filter { display: none; height: 3; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p,space", "pause", "Pause"),
        # First of all, so that what is typed right after it already goes to the field.
        Binding("slash", "filter", "Filter", key_display="/", priority=True),
        Binding("f", "report", "Report"),
        Binding("h", "runs", "Runs"),
        Binding("question_mark", "keys", "Keys", key_display="?"),
        *(Binding(str(at + 1), f"tab('{name}')", name, show=False) for at, name in enumerate(_TABS)),
    ]

    def __init__(self, feed: RunFeed) -> None:
        super().__init__()
        self.feed = feed
        self.snapshot: MetricsSnapshot | None = None
        self.paused = False
        self._version = 0
        self._history = History()
        self._recent: dict[str, deque[float]] = {}
        self._reported: tuple[str, int] | None = None

    def compose(self) -> ComposeResult:
        yield RunHeader()
        yield Figures()
        yield op_table()
        with TabbedContent(initial="tab-partitions"):
            for name, title, table in (
                ("partitions", "1 Partitions", partition_table()),
                ("workers", "2 Workers", worker_table()),
                ("samples", "3 Oldest samples", sample_table()),
                ("log", "4 Log", log_table()),
            ):
                with TabPane(title, id=f"tab-{name}"), Vertical():
                    yield table
        yield Input(placeholder="show only rows with this text; Esc clears", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#partitions", LiveTable).focus()
        self.set_interval(_REFRESH_S, self._refresh_from_feed)
        self._refresh_from_feed()

    def on_resize(self, event: events.Resize) -> None:
        # On a low terminal the tables are worth more than the figures above them.
        for main in self.screen_stack[:1]:
            main.set_class(event.size.height < 26, "-low")

    # What comes in.

    def _refresh_from_feed(self) -> None:
        # The timer may fire once more while the screen is being taken down, and after that.
        main = next(iter(self.screen_stack), None)
        if main is None or not main.query(RunHeader):
            return
        version = self.feed.version
        if version != self._version and not self.paused:
            self._version = version
            snapshot = self.feed.latest
            if snapshot is not None:
                self._show_snapshot(snapshot)
        main.query_one(RunHeader).show(self.snapshot, self.feed.status(), paused=self.paused)

    def _show_snapshot(self, snapshot: MetricsSnapshot) -> None:
        before = self.snapshot
        if before is None or (before.run_id, before.started_ns) != (snapshot.run_id, snapshot.started_ns):
            self._recent.clear()
        self.snapshot = snapshot
        if self._history.add(snapshot) is not None:
            # One point per second, so that the line is the last minute and not the last ticks.
            for stat in snapshot.counters("ops"):
                self._recent.setdefault(stat.labels.get("op", ""), deque(maxlen=SPARK_WIDTH))
            for op, rates in self._recent.items():
                rates.append(snapshot.rate("ops", op=op))
        self._draw()
        run = (snapshot.run_id, snapshot.started_ns)
        if snapshot.state.is_final and self._reported != run:
            self._reported = run
            self.push_screen(ReportScreen(snapshot))

    def _draw(self) -> None:
        snapshot = self.snapshot
        if snapshot is None:
            return
        main = self.screen_stack[0]
        main.query_one(Figures).show(snapshot, self._history)
        for table, rows in (
            ("#ops", op_rows(snapshot, self._recent)),
            ("#partitions", snapshot.partitions),
            ("#workers", worker_rows(snapshot)),
            ("#samples", snapshot.oldest),
            ("#log", snapshot.log),
        ):
            shown: LiveTable[Any] = main.query_one(table, LiveTable)
            shown.set_rows(rows)
        ops = main.query_one("#ops", LiveTable)
        ops.styles.height = 1 + min(_OPS_SEEN, max(1, len(ops.rows)))
        if isinstance(self.screen, PartitionScreen) and self.screen.is_mounted:
            self.screen.show(snapshot)

    # What people do.

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "filter":  # In the field itself it is a character like any other.
            return len(self.screen_stack) == 1 and not isinstance(self.focused, Input)
        return True

    def action_pause(self) -> None:
        self.paused = not self.paused
        self._refresh_from_feed()

    def action_tab(self, name: str) -> None:
        self.query_one(TabbedContent).active = f"tab-{name}"
        self.query_one(f"#{name}", LiveTable).focus()

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.display = True
        self.screen.set_focus(field)

    def action_report(self) -> None:
        if self.snapshot is not None:
            self.push_screen(ReportScreen(self.snapshot))

    def action_runs(self) -> None:
        self.push_screen(RunsScreen(self.snapshot))

    def action_keys(self) -> None:
        self.push_screen(KeysScreen())

    def on_input_changed(self, event: Input.Changed) -> None:
        for name in _FILTERED:
            self.query_one(name, LiveTable).set_filter(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._leave_filter(keep=bool(event.value))

    def on_key(self, event: events.Key) -> None:
        field = self.screen_stack[0].query_one("#filter", Input)
        if event.key == "escape" and len(self.screen_stack) == 1 and field.display:
            event.stop()
            field.value = ""
            self._leave_filter(keep=False)

    def _leave_filter(self, *, keep: bool) -> None:
        field = self.query_one("#filter", Input)
        field.display = keep
        active = self.query_one(TabbedContent).active.removeprefix("tab-")
        self.query_one(f"#{active}", LiveTable).focus()

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        name = (event.pane.id or "").removeprefix("tab-")
        if name in _TABS and not self.query_one("#filter", Input).has_focus:
            self.query_one(f"#{name}", LiveTable).focus()

    def on_live_table_chosen(self, event: LiveTable.Chosen) -> None:
        if event.table.id == "partitions" and self.snapshot is not None:
            self.look_into(event.row.partition)

    def look_into(self, partition: str) -> None:
        """Open one partition."""

        def draw() -> None:
            if self.snapshot is not None and isinstance(self.screen, PartitionScreen):
                self.screen.show(self.snapshot)

        self.push_screen(PartitionScreen(partition))
        self.call_after_refresh(draw)
