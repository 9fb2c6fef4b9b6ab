"""The report: a pure function of a snapshot, found in the right order, rendered safely."""

from __future__ import annotations

import html.parser
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rlplane.errors import NotFoundError
from rlplane.metrics.events import EventBatch, OpRecord, SampleEvent, WorkerGoodbye, pack_ops
from rlplane.metrics.run_state import RunState
from rlplane.metrics.snapshot import (
    LogLine,
    MetricsSnapshot,
    MetricsSnapshotCodec,
    PartitionStat,
    SessionState,
)
from rlplane.metrics.subscriber import MetricsSnapshotSubscriber
from rlplane.report import Report, find_report, render_html, render_text
from rlplane.transport import ZmqMessagePublisher

HOSTILE = "<script>alert('x')</script>"


def snapshot(
    state: SessionState = SessionState.COMPLETE,
    run_id: str = "run",
    pending: int = 0,
    partition: str = "rollouts",
    goodbye: bool = True,
) -> MetricsSnapshot:
    run_state = RunState(run_id)
    for seq in range(1, 5):
        records = [OpRecord("put", partition, 4, 1000, 1000 * (seq + n), 0) for n in range(3)]
        records.append(OpRecord("get", partition, 1, 10, 5000, 0, "error", 0, None, "KeyError", partition))
        ids = [f"{partition}-{seq}"]
        events = [
            SampleEvent(
                kind="written", partition_id=partition, sample_ids=ids, time_ns=seq, weight_versions=[seq]
            ),
            SampleEvent(
                kind="claimed", partition_id=partition, sample_ids=ids, time_ns=seq + 9, task="train"
            ),
        ]
        run_state.add_batch(
            EventBatch(
                worker="w0", pid=1, host="h", seq=seq, sent_ns=0, ops=pack_ops(records)[0], events=[*events]
            )
        )
        run_state.snapshot(SessionState.LIVE)
    last = [WorkerGoodbye(0)] if goodbye else []
    run_state.add_batch(EventBatch(worker="w0", pid=1, host="h", seq=5, sent_ns=0, events=[*last]))
    return run_state.snapshot(state, exact=state.is_final, n_pending_tasks=pending)


def test_it_is_complete_iff_the_run_completed_and_nothing_was_pending() -> None:
    complete = Report.from_snapshot(snapshot())
    assert complete.complete
    assert complete.exact
    for state, pending, warning in (
        (SessionState.COMPLETE, 2, "timed out with 2 tasks pending"),
        (SessionState.INTERRUPTED, 0, "was interrupted"),
        (SessionState.LIVE, 0, "had not ended (LIVE)"),
        (SessionState.DRAINING, 0, "had not ended (DRAINING)"),
    ):
        report = Report.from_snapshot(snapshot(state, pending=pending))
        assert not report.complete
        assert any(warning in text for text in report.warnings)
        assert "WARNING" in render_text(report)


def test_it_is_not_complete_without_the_last_batch_of_a_worker() -> None:
    report = Report.from_snapshot(snapshot(goodbye=False))
    assert not report.complete
    assert any("last events of 1 workers never came (w0)" in text for text in report.warnings)
    assert "(incomplete)" in render_text(report)


def test_it_is_a_pure_function_of_the_snapshot() -> None:
    source = snapshot()
    before = msgspec.json.encode(source)
    assert Report.from_snapshot(source) == Report.from_snapshot(source)
    assert msgspec.json.encode(source) == before


def test_it_has_the_figures_by_op_and_partition() -> None:
    report = Report.from_snapshot(snapshot())
    put = next(op for op in report.ops if op.op == "put")
    get = next(op for op in report.ops if op.op == "get")
    assert (put.count, put.keys, put.bytes, get.failures) == (12, 48, 12_000, 4)
    assert put.latency is not None
    assert put.latency.exact
    assert [(flow.op, flow.partition, flow.count) for flow in report.flows] == [
        ("get", "rollouts", 4),
        ("put", "rollouts", 12),
    ]
    assert {series.name for series in report.series} == {"written_to_claimed", "staleness"}
    assert report.n_never_cleared == 4
    assert "4 samples were never cleared." in report.warnings


def test_its_figures_know_no_clock() -> None:
    assert Report.from_snapshot(snapshot()).figures() == Report.from_snapshot(snapshot()).figures()


def test_text_shows_every_section() -> None:
    text = render_text(Report.from_snapshot(snapshot()))
    for expected in (
        "COMPLETE",
        "Operations",
        "rollouts",
        "p99.9",
        "staleness",
        "Workers",
        "never cleared",
        "KeyError",
    ):
        assert expected in text
    assert max(map(len, text.splitlines())) < 160


def test_json_carries_its_schema_version() -> None:
    report = Report.from_snapshot(snapshot())
    data = json.loads(report.to_json())
    assert (data["schema_version"], data["run_id"]) == (1, "run")
    assert msgspec.json.decode(report.to_json(), type=Report) == report


class Page(html.parser.HTMLParser):
    """Counts tags, and collects what a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [
            str(value) for name, value in attrs if name in ("src", "href") or name.startswith("on")
        ]


def test_the_page_is_self_contained_and_has_plots() -> None:
    page = Page()
    page.feed(render_html(Report.from_snapshot(snapshot())))
    assert page.fetched == []
    assert "script" not in page.tags
    assert page.tags.count("svg") >= 5
    assert page.tags.count("table") >= 5


def test_what_comes_from_the_run_is_escaped() -> None:
    page = Page()
    text = render_html(Report.from_snapshot(snapshot(run_id=HOSTILE, partition=HOSTILE)))
    page.feed(text)
    assert "script" not in page.tags
    assert HOSTILE not in text
    assert "&lt;script&gt;" in text


def test_an_empty_run_has_a_report_too() -> None:
    report = Report.from_snapshot(RunState("empty").snapshot(SessionState.COMPLETE, exact=True))
    assert report.complete
    assert "empty" in render_text(report)
    assert "<svg" not in render_html(report)


# Where it is found.


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[ZmqMessagePublisher[MetricsSnapshot]]:
    with ZmqMessagePublisher(MetricsSnapshotCodec(), f"ipc://{tmp_path}/s", sndhwm=0) as made:
        yield made


@pytest.fixture
def subscriber(publisher: ZmqMessagePublisher[MetricsSnapshot]) -> Iterator[MetricsSnapshotSubscriber]:
    with MetricsSnapshotSubscriber(publisher.address, conflate=False) as made:
        assert publisher.wait_for_subscribers(1, 20.0)
        yield made


def write(path: Path, content: MetricsSnapshot) -> Path:
    path.write_bytes(msgspec.json.encode(content))
    return path


def test_the_published_final_snapshot_comes_first(
    publisher: ZmqMessagePublisher[MetricsSnapshot], subscriber: MetricsSnapshotSubscriber, tmp_path: Path
) -> None:
    publisher.publish(snapshot())
    stored = write(tmp_path / "final.json", snapshot())
    report = find_report("run", subscriber=subscriber, final_path=stored, timeout=20.0)
    assert (report.source, report.complete) == ("published", True)


def test_else_it_is_the_file(
    publisher: ZmqMessagePublisher[MetricsSnapshot], subscriber: MetricsSnapshotSubscriber, tmp_path: Path
) -> None:
    publisher.publish(snapshot(SessionState.LIVE))
    assert subscriber.wait_for_snapshot(20.0) is not None
    stored = write(tmp_path / "final.json", snapshot())
    report = find_report("run", subscriber=subscriber, final_path=stored, timeout=0.05)
    assert (report.source, report.complete) == ("file", True)


def test_else_it_is_the_latest_live_one_and_says_so(
    publisher: ZmqMessagePublisher[MetricsSnapshot], subscriber: MetricsSnapshotSubscriber, tmp_path: Path
) -> None:
    publisher.publish(snapshot(SessionState.LIVE))
    assert subscriber.wait_for_snapshot(20.0) is not None
    leftover = write(tmp_path / "final.json", snapshot(run_id="yesterday"))
    report = find_report("run", subscriber=subscriber, final_path=leftover, timeout=0.05)
    assert (report.source, report.complete) == ("live", False)
    assert report.run_id == "run"


def test_a_file_of_another_run_is_never_this_ones(tmp_path: Path) -> None:
    leftover = write(tmp_path / "final.json", snapshot(run_id="yesterday"))
    with pytest.raises(NotFoundError, match="of run 'yesterday'"):
        find_report("today", final_path=leftover)
    assert find_report(final_path=leftover).run_id == "yesterday"


def test_nothing_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no snapshot of run 'run'"):
        find_report("run", final_path=tmp_path / "none.json")


def test_a_partition_that_nobody_tracks_shows_dashes() -> None:
    snapshot = MetricsSnapshot(
        run_id="r",
        state=SessionState.LIVE,
        seq=1,
        time_ns=0,
        monotonic_ns=0,
        partitions=[
            PartitionStat("reported", samples=3, bytes=12, reported=True, tracked=False),
            PartitionStat("unknown", tracked=False),
        ],
    )
    rows = [line.split() for line in render_text(Report.from_snapshot(snapshot)).splitlines()]
    assert ["reported", "3", "0", "12", "B", "0", "B", "–", "–", "–", "–"] in rows
    assert ["unknown", *["–"] * 8] in rows


def test_the_report_has_no_more_than_a_screenful_of_log() -> None:
    lines = [LogLine(number, "error", f"message {number:03}") for number in range(100)]
    report = Report(run_id="r", state=SessionState.COMPLETE, complete=True, exact=True, log=lines)
    for text in (render_text(report), render_html(report)):
        assert text.count("message ") == 20 and "message 099" in text
