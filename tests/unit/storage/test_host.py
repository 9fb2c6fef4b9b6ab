"""The service's half of shared memory: files behind the arena, and who may use a spare place."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplane.errors import CapacityError
from rlplane.storage.shm import directory as directory_module
from rlplane.storage.shm import host as host_module
from rlplane.storage.shm.arena import PAGE
from rlplane.storage.shm.client import ShmStorage
from rlplane.storage.shm.directory import PlaneDirectory
from rlplane.storage.shm.host import ShmHost


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmHost]:
    monkeypatch.setattr(directory_module, "SHM", tmp_path)
    host = ShmHost(PlaneDirectory.create(), 16 * PAGE, 4 * PAGE)
    host.join(0)
    yield host
    host.close()
    assert not host.directory.path.exists()


def segments(host: ShmHost) -> list[str]:
    return sorted(path.name for path in host.directory.path.glob("segment-*"))


def test_shared_memory_that_cannot_be_made_is_a_capacity_error(
    host: ShmHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", full)
        with pytest.raises(CapacityError, match=r"the control service cannot make shared memory: .*No space"):
            host.reserve(PAGE, 0)
    assert host.used == 0 and segments(host) == [], "it leaves no file behind"
    assert host.reserve(PAGE, 0) is not None


def test_segments_that_are_idle_for_a_while_go_back_to_the_machine(
    host: ShmHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    first, second = host.reserve(4 * PAGE, 0), host.reserve(4 * PAGE, 0)
    assert first is not None and second is not None and len(segments(host)) == 2
    host.free(first)
    host.tidy(now + host_module._IDLE_SEGMENT_S)
    assert len(segments(host)) == 2
    host.tidy(now + host_module._IDLE_SEGMENT_S + 0.1)
    assert segments(host) == [f"segment-{second.at[0]}"]


def test_a_spare_is_the_clients_or_the_services_and_never_both(host: ShmHost) -> None:
    client = ShmStorage(host.directory, 0)
    first, second = host.reserve(PAGE, 0), host.reserve(PAGE, 0)
    assert first is not None and second is not None
    assert not client.take_spare(first) and not host.revoke_spare(0), "none is on offer"
    host.offer_spare(0, first)
    assert client.take_spare(first)
    assert not host.revoke_spare(0) and not client.take_spare(first)
    host.offer_spare(0, first)
    assert host.revoke_spare(0)
    assert not client.take_spare(first)
    host.offer_spare(0, second)
    assert not client.take_spare(first), "another one is on offer now"
    assert client.take_spare(second)
    client.close()


def test_a_client_that_leaves_takes_its_lock_along_and_the_next_one_finds_no_spare(host: ShmHost) -> None:
    place = host.reserve(PAGE, 0)
    assert place is not None
    host.offer_spare(0, place)
    host.leave(0)
    assert not Path(host.directory.client_file(0)).exists() and not host.revoke_spare(0)
    host.join(0)
    client = ShmStorage(host.directory, 0)
    assert not client.take_spare(place)
    client.close()
