"""``rlplane top``, driven by Textual's pilot, on runs that are only pictured."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.simulated_run import SimulatedRun
from textual.pilot import Pilot
from textual.widgets import Static, TabbedContent

from rlplane.metrics.snapshot import MetricsSnapshot, SessionState
from rlplane.tui.app import TopApp
from rlplane.tui.header import RunHeader
from rlplane.tui.live_table import LiveTable
from rlplane.tui.screens import KeysScreen, PartitionScreen, ReportScreen
from rlplane.tui.sparks import bar, spark
from rlplane.viewing.feed import FeedStatus

SIZE = (140, 40)


class HandFeed:
    """A feed that the test fills by hand; the real one has tests of its own."""

    def __init__(self) -> None:
        self.latest: MetricsSnapshot | None = None
        self.version = 0
        self.now = FeedStatus("searching", "no run found on this machine yet")

    def status(self) -> FeedStatus:
        return self.now

    def give(self, snapshot: MetricsSnapshot) -> None:
        self.latest = snapshot
        self.version += 1
        state = "ended" if snapshot.state.is_final else "live"
        self.now = FeedStatus(state, state, "ipc:///x", 0.1)  # type: ignore[arg-type]


@pytest.fixture
def feed() -> HandFeed:
    return HandFeed()


async def until(pilot: Pilot[Any], condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in 20 s"
        await pilot.pause(0.05)
    await pilot.pause()


def table(app: TopApp, name: str) -> LiveTable[Any]:
    return app.screen.query_one(f"#{name}", LiveTable)


def text_of(widget: Static) -> str:
    return str(widget.render())


def shown(app: TopApp) -> str:
    return "\n".join(
        "".join(segment.text for segment in line) for line in app.screen._compositor.render_strips()
    )


async def test_without_a_run_it_says_that_it_looks_for_one(feed: HandFeed) -> None:
    app = TopApp(feed)  # type: ignore[arg-type]
    async with app.run_test(size=SIZE):
        assert "no run found on this machine yet" in text_of(app.query_one(RunHeader))


async def test_a_snapshot_fills_header_operations_partitions_and_workers(feed: HandFeed) -> None:
    run = SimulatedRun(slow_task="logprob", workers=6)
    app = TopApp(feed)  # type: ignore[arg-type]
    async with app.run_test(size=SIZE) as pilot:
        for _ in range(5):
            feed.give(run.step())
            await until(pilot, lambda: app.snapshot is feed.latest, "drawing")
        head = text_of(app.query_one(RunHeader))
        assert "LIVE" in head and "simulated-run" in head and "6/6 workers" in head and "healthy" in head
        screen = shown(app)
        for word in ("put", "claim_meta", "rollouts", "logprob", "p99", "versions", "written"):
            assert word in screen
        await pilot.press("2")
        await pilot.pause()
        assert "rollout-0" in shown(app) and "node-0" in shown(app)
        await pilot.press("3")
        await pilot.pause()
        assert feed.latest is not None
        assert feed.latest.oldest[0].sample_id in shown(app)


async def test_failures_stand_in_the_log_and_in_the_health(feed: HandFeed) -> None:
    run = SimulatedRun()
    run.fail("ClaimTimeoutError: nothing was ready")
    app = TopApp(feed)  # type: ignore[arg-type]
    async with app.run_test(size=SIZE) as pilot:
        feed.give(run.step())
        await until(pilot, lambda: app.snapshot is not None, "drawing")
        assert "1 operation failed" in text_of(app.query_one(RunHeader))
        await pilot.press("4")
        await pilot.pause()
        assert "ClaimTimeoutError: nothing was ready" in shown(app)


async def test_old_data_is_called_old(feed: HandFeed) -> None:
    app = TopApp(feed)  # type: ignore[arg-type]
    async with app.run_test(size=SIZE) as pilot:
        feed.give(SimulatedRun().step())
        feed.now = FeedStatus("stale", "no news for 12 s", "ipc:///x", 12.0)
        await until(
            pilot, lambda: "OLD DATA: no news for 12 s" in text_of(app.query_one(RunHeader)), "the warning"
        )


async def test_a_pause_freezes_the_figures_until_it_ends(feed: HandFeed) -> None:
    run = SimulatedRun()
    app = TopApp(feed)  # type: ignore[arg-type]
    async with app.run_test(size=SIZE) as pilot:
        feed.give(run.step())
        await until(pilot, lambda: app.snapshot is not None, "drawing")
        frozen = app.snapshot
        await pilot.press("p")
        feed.give(run.step())
        await until(pilot, lambda: "PAUSED" in text_of(app.query_one(RunHeader)), "the pause")
        assert app.snapshot is frozen
        await pilot.press("space")
        await until(pilot, lambda: app.snapshot is feed.latest, "going on")


async def test_keys_sort_by_every_column_and_reverse(feed: HandFeed) -> None:
    app = TopApp(feed)  # type: ignore[arg-type]
    async with app.run_test(size=SIZE) as pilot:
        feed.give(SimulatedRun(workers=12).step())
        await pilot.press("2")
        workers = table(app, "workers")
        await until(pilot, lambda: len(workers.rows) == 12, "drawing")
        rates = [row.stat.rate for row in workers.rows]
        assert rates == sorted(rates, reverse=True)
        await pilot.press("r")
        assert [row.stat.rate for row in workers.rows] == sorted(rates)
        seen = set()
        for _ in workers.columns:
            await pilot.press("s")
            assert workers.sorted_by is not None
            column = workers.columns[workers.sorted_by]
            values = [column.value(row) for row in workers.rows]
            assert values == sorted(values, reverse=workers.descending)
            seen.add(column.title)
        assert len(seen) == len(workers.columns)


async def test_a_filter_narrows_partitions_and_workers_and_escape_clears_it(feed: HandFeed) -> None:
    run = SimulatedRun([f"part-{number}" for number in range(20)], workers=8)
    app = TopApp(feed)  # type: ignore[arg-type]
    async with app.run_test(size=SIZE) as pilot:
        feed.give(run.step())
        partitions, workers = table(app, "partitions"), table(app, "workers")
        await until(pilot, lambda: len(partitions.rows) == 20, "drawing")
        await pilot.press("slash", *"part-1")
        await pilot.pause()
        assert {row.partition for row in partitions.rows} == {"part-1", *(f"part-1{n}" for n in range(10))}
        assert workers.rows == []
        feed.give(run.step())
        await until(pilot, lambda: app.snapshot is feed.latest, "drawing")
        assert len(partitions.rows) == 11
        await pilot.press("escape")
        await pilot.pause()
        assert len(partitions.rows) == 20 and len(workers.rows) == 8
        assert partitions.has_focus


async def test_enter_looks_into_a_partition_and_escape_comes_back(feed: HandFeed) -> None:
    run = SimulatedRun(slow_task="logprob")
    app = TopApp(feed)  # type: ignore[arg-type]
    async with app.run_test(size=SIZE) as pilot:
        for _ in range(20):
            feed.give(run.step())
        await until(pilot, lambda: len(table(app, "partitions").rows) == 2, "drawing")
        chosen = table(app, "partitions").rows[0].partition
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, PartitionScreen), "opening")
        await until(pilot, lambda: "logprob holds everything up" in shown(app), "the flow")
        assert chosen in shown(app)
        assert [row[0].task for row in table(app, "tasks").rows] == ["reward", "logprob", "train"]
        before = table(app, "tasks").rows[0][0].claimed
        feed.give(run.step())
        await until(pilot, lambda: table(app, "tasks").rows[0][0].claimed > before, "a live partition")
        await pilot.press("escape")
        await until(pilot, lambda: len(app.screen_stack) == 1, "coming back")


async def test_the_end_of_the_run_shows_its_report_once(feed: HandFeed) -> None:
    run = SimulatedRun()
    app = TopApp(feed)  # type: ignore[arg-type]
    async with app.run_test(size=SIZE) as pilot:
        feed.give(run.step())
        await until(pilot, lambda: app.snapshot is not None, "drawing")
        feed.give(run.step(state=SessionState.COMPLETE))
        await until(pilot, lambda: isinstance(app.screen, ReportScreen), "the report")
        assert "Run simulated-run: COMPLETE" in shown(app)
        await pilot.press("escape")
        await until(pilot, lambda: len(app.screen_stack) == 1, "coming back")
        assert app.snapshot is not None
        feed.give(app.snapshot)
        await pilot.pause(0.4)
        assert len(app.screen_stack) == 1


async def test_a_run_that_follows_replaces_the_one_that_ended(feed: HandFeed) -> None:
    app = TopApp(feed)  # type: ignore[arg-type]
    async with app.run_test(size=SIZE) as pilot:
        feed.give(SimulatedRun(run_id="one").step(state=SessionState.INTERRUPTED))
        await until(pilot, lambda: isinstance(app.screen, ReportScreen), "the report")
        await pilot.press("escape")
        feed.give(SimulatedRun(run_id="two").step())
        await until(pilot, lambda: "two" in text_of(app.screen_stack[0].query_one(RunHeader)), "the next run")


async def test_the_cursor_stays_on_its_row_while_the_order_changes(feed: HandFeed) -> None:
    app = TopApp(feed)  # type: ignore[arg-type]
    async with app.run_test(size=SIZE) as pilot:
        feed.give(SimulatedRun(workers=30).step())
        await pilot.press("2")
        workers = table(app, "workers")
        await until(pilot, lambda: len(workers.rows) == 30, "drawing")
        await pilot.press(*["down"] * 7)
        chosen = workers.rows[workers.cursor].stat.worker
        await pilot.press("r")
        assert workers.rows[workers.cursor].stat.worker == chosen
        await pilot.press("end")
        assert workers.cursor == 29
        await pilot.pause()
        assert workers.rows[29].stat.worker in shown(app)


async def test_500_workers_and_200_partitions_draw_only_what_is_seen(
    feed: HandFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SimulatedRun([f"partition-{number}" for number in range(200)], workers=500)
    app = TopApp(feed)  # type: ignore[arg-type]
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("2")
        drawn = 0
        workers = table(app, "workers")
        line = workers._line

        def counting(*arguments: Any) -> Any:
            nonlocal drawn
            drawn += 1
            return line(*arguments)

        monkeypatch.setattr(workers, "_line", counting)
        feed.give(run.step())
        await until(pilot, lambda: len(workers.rows) == 500, "drawing")
        assert len(table(app, "partitions").rows) == 200
        drawn = 0
        feed.give(run.step())
        await until(pilot, lambda: app.snapshot is feed.latest, "drawing again")
        assert 0 < drawn <= 4 * SIZE[1]
        await pilot.press("pagedown", "pagedown")
        assert workers.cursor > 20


async def test_names_cannot_move_the_cursor_or_paint_the_screen(feed: HandFeed) -> None:
    evil = "\x1b[31m[bold]evil[/]\r\n"
    app = TopApp(feed)  # type: ignore[arg-type]
    async with app.run_test(size=SIZE) as pilot:
        feed.give(SimulatedRun([evil], run_id=evil).step())
        await until(pilot, lambda: app.snapshot is not None, "drawing")
        screen = shown(app)
        assert "[bold]evil[/]" in screen
        assert "\x1b" not in screen and "\r" not in screen
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, PartitionScreen), "opening")
        assert "\x1b" not in shown(app)


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (200, 60)])
async def test_it_fits_terminals_of_any_size(feed: HandFeed, size: tuple[int, int]) -> None:
    app = TopApp(feed)  # type: ignore[arg-type]
    async with app.run_test(size=size) as pilot:
        feed.give(SimulatedRun().step())
        await until(pilot, lambda: app.snapshot is not None, "drawing")
        assert "LIVE" in shown(app)
        assert table(app, "partitions").size.height >= 1
        await pilot.resize_terminal(100, 30)
        await pilot.pause()
        assert "rollouts" in shown(app)


async def test_the_keys_are_explained_and_q_quits(feed: HandFeed) -> None:
    app = TopApp(feed)  # type: ignore[arg-type]
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, KeysScreen), "the keys")
        assert "look into a partition" in shown(app)
        await pilot.press("escape", "4")
        await pilot.pause()
        assert app.query_one(TabbedContent).active == "tab-log"
        await pilot.press("q")
        await pilot.pause()
    assert app.return_code == 0


def test_sparks_and_bars_are_as_wide_as_asked() -> None:
    assert spark([0, 1, 2, 3], 6) == "  ▁▃▆█"
    assert spark([None, 5.0], 2) == " █"
    assert spark([], 3) == "   "
    assert bar(0.5, 4) == "██  " and bar(None, 3) == "   " and bar(7.0, 3) == "███"


async def test_a_timer_that_fires_after_the_end_finds_nothing_to_draw(feed: HandFeed) -> None:
    app = TopApp(feed)  # type: ignore[arg-type]
    async with app.run_test(size=SIZE):
        pass
    assert not app.screen_stack
    feed.give(SimulatedRun(workers=2).step())
    app._refresh_from_feed()
    assert app.snapshot is None


async def test_finished_runs_stand_beside_the_live_one(
    feed: HandFeed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "runs" / "yesterday"
    directory.mkdir(parents=True)
    final = SimulatedRun(run_id="yesterday", workers=2).step(10.0, SessionState.COMPLETE)
    (directory / "final_snapshot.json").write_bytes(msgspec.json.encode(final))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlplane.viewing.runs.list_finished", list)  # other tests have runs too
    app = TopApp(feed)  # type: ignore[arg-type]
    async with app.run_test(size=SIZE) as pilot:
        feed.give(SimulatedRun().step())
        await until(pilot, lambda: app.snapshot is feed.latest, "drawing")
        await pilot.press("h")
        await until(pilot, lambda: "yesterday" in shown(app), "the finished run")
        assert "simulated-run" in shown(app) and "COMPLETE" in shown(app) and "LIVE" in shown(app)
