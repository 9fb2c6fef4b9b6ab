"""What a flow policy has done, in every view, from a real plane to the words."""

from __future__ import annotations

import pytest

import rlplane
from rlplane.metrics.events import EventBatch, FlowStat, PartitionStatus
from rlplane.metrics.run_state import RunState
from rlplane.metrics.snapshot import MetricsSnapshot, SessionState
from rlplane.report import Report, render_text
from rlplane.sinks.prometheus import render
from rlplane.tui.screens import _policy_text
from rlplane.viewing.feed import FeedStatus
from rlplane.web.view import make_view


@pytest.fixture(scope="module")
def snapshot() -> MetricsSnapshot:
    """Of a run whose policy has evicted one sample of two, because it became too old."""
    with rlplane.build_data_plane_client(rlplane.load_config("local")) as client:
        policy = {"kind": "windowed", "max_staleness": 1, "training_task": "train"}
        client.register_partition("p", ["x"], 10, ["train"], flow=policy)
        client.put_samples(["old", "new"], "p", None, [{"weight_version": 0}, {"weight_version": 3}])
        client.advance_version("p", 3)
        client.register_partition("plain", ["x"], 10, ["train"])
        events = [
            PartitionStatus.from_client(dict(client.partition_status(name)), 1) for name in ("p", "plain")
        ]
    state = RunState("run")
    state.add_batch(EventBatch(worker="w", pid=1, host="h", seq=1, sent_ns=0, events=list(events)))
    try:
        return state.snapshot(SessionState.LIVE)
    finally:
        state.close()


def test_a_policy_is_reported_and_a_partition_without_one_has_none(snapshot: MetricsSnapshot) -> None:
    flows = {part.partition: part.flow for part in snapshot.partitions}
    assert flows == {"p": FlowStat("windowed", 3, 1, 0, 0, {"stale": 1}, {}), "plain": None}


def test_prometheus_counts_evictions_by_reason(snapshot: MetricsSnapshot) -> None:
    text = render(lambda: snapshot)[0].decode()
    assert 'rlplane_flow_weight_version{partition="p"} 3.0' in text
    assert 'rlplane_flow_max_staleness_versions{partition="p"} 1.0' in text
    assert 'rlplane_flow_evicted_samples_total{partition="p",reason="stale"} 1.0' in text


def test_the_report_has_a_line_for_each_policy(snapshot: MetricsSnapshot) -> None:
    rows = [line.split() for line in render_text(Report.from_snapshot(snapshot)).splitlines()]
    assert ["p", "windowed", "3", "1", "0", "0", "1", "stale", "–"] in rows


def test_the_page_gets_the_policy(snapshot: MetricsSnapshot) -> None:
    parts = {
        part["partition"]: part["flow"] for part in make_view(snapshot, FeedStatus("live", ""))["partitions"]
    }
    assert parts["plain"] is None and parts["p"]["evicted"] == {"stale": 1}


def test_top_says_it_in_a_sentence() -> None:
    flow = FlowStat("ready_first", 7, 2, 640, 24, {"stale": 16}, {"cancelled": 2})
    assert _policy_text(flow) == (
        "ready_first: weight version 7, at most 2 old; 640 admitted, 24 wait for admission;"
        " evicted: 16 stale; groups closed short: 2 cancelled"
    )
