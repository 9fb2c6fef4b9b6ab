"""A viewer's side: latest, final, and what belongs to another run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplane.metrics.snapshot import MetricsSnapshot, MetricsSnapshotCodec, SessionState
from rlplane.metrics.subscriber import MetricsSnapshotSubscriber
from rlplane.transport import ZmqMessagePublisher

Publisher = ZmqMessagePublisher[MetricsSnapshot]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/snapshots"


@pytest.fixture
def publisher(address: str) -> Iterator[Publisher]:
    with ZmqMessagePublisher(MetricsSnapshotCodec(), address, sndhwm=0) as made:
        yield made


def snapshot(
    seq: int, state: SessionState = SessionState.LIVE, run: str = "run", started: int = 0
) -> MetricsSnapshot:
    return MetricsSnapshot(run_id=run, state=state, seq=seq, time_ns=0, monotonic_ns=0, started_ns=started)


def test_the_latest_snapshot_and_then_the_final_one(address: str, publisher: Publisher) -> None:
    with MetricsSnapshotSubscriber(address) as subscriber:
        assert subscriber.latest is None
        assert subscriber.age_s is None
        assert publisher.wait_for_subscribers(1, 20.0)
        publisher.publish(snapshot(1))
        assert subscriber.wait_for_snapshot(20.0) == snapshot(1)
        assert subscriber.complete is None
        assert subscriber.wait_for_complete(0.01) is None
        publisher.publish(snapshot(2, SessionState.COMPLETE))
        assert subscriber.wait_for_complete(20.0) == subscriber.complete == subscriber.latest
        assert subscriber.age_s is not None


def test_without_conflation_every_snapshot_is_seen_once(address: str, publisher: Publisher) -> None:
    seen: list[int] = []
    with MetricsSnapshotSubscriber(
        address, conflate=False, on_snapshot=lambda s: seen.append(s.seq)
    ) as subscriber:
        assert publisher.wait_for_subscribers(1, 20.0)
        for seq in (1, 2, 2, 3, 1, 4):
            publisher.publish(snapshot(seq))
        publisher.publish(snapshot(5, SessionState.INTERRUPTED))
        assert subscriber.wait_for_complete(20.0) is not None
    assert seen == [1, 2, 3, 4, 5]


def test_snapshots_of_another_run_are_ignored_when_a_run_is_named(address: str, publisher: Publisher) -> None:
    with MetricsSnapshotSubscriber(address, run_id="mine", conflate=False) as subscriber:
        assert publisher.wait_for_subscribers(1, 20.0)
        publisher.publish(snapshot(9, SessionState.COMPLETE, run="other"))
        publisher.publish(snapshot(1, run="mine"))
        assert subscriber.wait_for_snapshot(20.0) == snapshot(1, run="mine")
        assert subscriber.complete is None


def test_an_aggregator_that_starts_again_is_followed(address: str, publisher: Publisher) -> None:
    with MetricsSnapshotSubscriber(address, conflate=False) as subscriber:
        assert publisher.wait_for_subscribers(1, 20.0)
        publisher.publish(snapshot(50, SessionState.COMPLETE, started=1))
        assert subscriber.wait_for_complete(20.0) is not None
        publisher.publish(snapshot(1, started=2))
        publisher.publish(snapshot(2, started=2))
        while subscriber.latest is None or subscriber.latest.seq != 2:
            assert subscriber.wait_for_snapshot(20.0, after_seq=0) is not None
        assert subscriber.complete is None


def test_a_callback_that_fails_stops_nothing(address: str, publisher: Publisher) -> None:
    def fail(_: MetricsSnapshot) -> None:
        raise RuntimeError("a viewer's bug")

    with MetricsSnapshotSubscriber(address, on_snapshot=fail) as subscriber:
        assert publisher.wait_for_subscribers(1, 20.0)
        publisher.publish(snapshot(1))
        assert subscriber.wait_for_snapshot(20.0) is not None
        publisher.publish(snapshot(2))
        assert subscriber.wait_for_snapshot(20.0, after_seq=1) is not None


def test_garbage_on_the_wire_stops_nothing(address: str, publisher: Publisher) -> None:
    with MetricsSnapshotSubscriber(address, conflate=False) as subscriber:
        assert publisher.wait_for_subscribers(1, 20.0)
        publisher._send_frame(MetricsSnapshotCodec.topic + b"garbage", None)
        publisher.publish(snapshot(1))
        assert subscriber.wait_for_snapshot(20.0) == snapshot(1)


def test_closing_twice_is_fine(address: str) -> None:
    subscriber = MetricsSnapshotSubscriber(address)
    subscriber.close()
    subscriber.close()
