"""The tick and the end: no live frame after the final one, and two ways that fail apart."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from rlplane.errors import ConfigError
from rlplane.metrics.publisher import MetricsPublisher, read_final_snapshot
from rlplane.metrics.snapshot import MetricsSnapshot, MetricsSnapshotCodec, SessionState
from rlplane.transport import MessagePublisher


class Wire(MessagePublisher[MetricsSnapshot]):
    """Keeps what is published; ``broken`` makes it fail."""

    def __init__(self) -> None:
        super().__init__(MetricsSnapshotCodec())
        self.frames: list[SessionState] = []
        self.broken = False

    def publish(self, item: MetricsSnapshot, *, deliver_within_s: float | None = None) -> bool:
        if self.broken:
            raise OSError("the wire is cut")
        self.frames.append(item.state)
        return True

    def _send_frame(self, frame: bytes, deliver_within_s: float | None) -> bool:
        raise AssertionError("not used")

    def close(self) -> None:
        pass


class Snapshots:
    """Makes snapshots with a growing number."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.state = SessionState.LIVE

    def __call__(self) -> MetricsSnapshot:
        return MetricsSnapshot(
            run_id="run", state=self.state, seq=next(self.numbers), time_ns=0, monotonic_ns=0
        )

    def final(self) -> MetricsSnapshot:
        self.state = SessionState.COMPLETE
        return self()


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def snapshots() -> Snapshots:
    return Snapshots()


async def ticks(wire: Wire, count: int) -> None:
    async with asyncio.timeout(20):
        while len(wire.frames) < count:
            await asyncio.sleep(0.001)


async def test_snapshots_are_published_until_the_final_one_and_never_after_it(
    wire: Wire, snapshots: Snapshots, tmp_path: Path
) -> None:
    publisher = MetricsPublisher(wire, snapshots, refresh_hz=1000, final_path=tmp_path / "final.json")
    publisher.start()
    await ticks(wire, 5)
    assert await publisher.publish_final(snapshots.final)
    count = len(wire.frames)
    publisher.start()
    await asyncio.sleep(0.02)
    assert len(wire.frames) == count
    assert wire.frames[-1] is SessionState.COMPLETE
    assert wire.frames.count(SessionState.COMPLETE) == 1
    assert read_final_snapshot(tmp_path / "final.json") == publisher.latest


async def test_the_tick_has_stopped_before_the_final_snapshot_is_made(
    wire: Wire, snapshots: Snapshots
) -> None:
    publisher = MetricsPublisher(wire, snapshots, refresh_hz=1000)
    publisher.start()
    await ticks(wire, 1)
    task = publisher._tick_task
    assert task is not None
    await publisher.publish_final(lambda: snapshots.final() if task.done() else pytest.fail("still ticking"))


async def test_finishing_twice_publishes_and_writes_once(
    wire: Wire, snapshots: Snapshots, tmp_path: Path
) -> None:
    publisher = MetricsPublisher(wire, snapshots, final_path=tmp_path / "final.json")
    results = await asyncio.gather(*(publisher.publish_final(snapshots.final) for _ in range(3)))
    assert results == [True] * 3
    assert wire.frames == [SessionState.COMPLETE]


async def test_a_cut_wire_does_not_stop_the_file(wire: Wire, snapshots: Snapshots, tmp_path: Path) -> None:
    wire.broken = True
    publisher = MetricsPublisher(wire, snapshots, final_path=tmp_path / "final.json")
    assert await publisher.publish_final(snapshots.final)
    assert (publisher.published, publisher.written) == (False, True)


async def test_a_disk_that_fails_does_not_stop_the_wire(
    wire: Wire, snapshots: Snapshots, tmp_path: Path
) -> None:
    publisher = MetricsPublisher(wire, snapshots, final_path=tmp_path / "missing" / "final.json")
    assert await publisher.publish_final(snapshots.final)
    assert (publisher.published, publisher.written) == (True, False)
    assert wire.frames == [SessionState.COMPLETE]


async def test_when_both_fail_it_says_so_and_does_not_raise(wire: Wire, snapshots: Snapshots) -> None:
    wire.broken = True
    assert await MetricsPublisher(wire, snapshots).publish_final(snapshots.final) is False


async def test_a_tick_that_fails_is_followed_by_the_next(wire: Wire, snapshots: Snapshots) -> None:
    publisher = MetricsPublisher(wire, snapshots, refresh_hz=1000)
    wire.broken = True
    publisher.start()
    async with asyncio.timeout(20):
        while publisher.n_failed_ticks < 3:
            await asyncio.sleep(0.001)
    wire.broken = False
    await ticks(wire, 2)
    await publisher.publish_final(snapshots.final)


def test_a_rate_that_makes_no_sense_is_refused(wire: Wire, snapshots: Snapshots) -> None:
    for rate in (0, -1, 1e9):
        with pytest.raises(ConfigError, match="refresh_hz"):
            MetricsPublisher(wire, snapshots, refresh_hz=rate)


def test_a_file_that_is_no_snapshot_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "final.json"
    path.write_text('{"run_id": 3}')
    with pytest.raises(ValueError, match=r"final\.json is not a snapshot"):
        read_final_snapshot(path)
