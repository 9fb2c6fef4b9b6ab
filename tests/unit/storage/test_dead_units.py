"""A storage unit that is dead takes no new rows, and what was lost with it is not handed out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict
from tests.unit.storage.chunk_stores import ChunkClient, ChunkPlane, MemoryChunks
from torch import Tensor

from rlplane.errors import CapacityError, ClaimTimeoutError, InvalidRequestError, SamplesLostError
from rlplane.service import protocol as wire
from rlplane.service.in_process import LocalService
from rlplane.storage import chunks as chunks_module
from rlplane.storage import keyed
from rlplane.storage.chunks import Chunk, ChunksLostError
from rlplane.storage.keyed import KeyedHost, unit_of
from rlplane.storage.places import Loss, UnitsDiedError

UNITS = 3
LIMIT = 3 << 20


class Units(MemoryChunks):
    """Three units. What is in a dead one is gone, and it takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.dead: set[int] = set()
        self.homes: dict[int, int] = {}

    def kill(self, unit: int) -> None:
        self.dead.add(unit)
        for key in [key for key, home in self.homes.items() if home == unit]:
            self.values.pop(key, None)

    def put(self, chunks: Sequence[Chunk], buffer: Tensor, deadline: float) -> None:
        homes = {chunk.key: unit_of(chunk.key, UNITS, chunk.dead) for chunk in chunks}
        for unit in self.dead & set(homes.values()):
            raise UnitsDiedError(f"unit {unit} has died", Loss((unit,), UNITS))
        self.homes.update(homes)
        super().put(chunks, buffer, deadline)

    def get(self, chunks: Sequence[Chunk], buffer: Tensor) -> None:
        for chunk in chunks:
            unit = unit_of(chunk.key, UNITS, chunk.dead)
            assert self.homes[chunk.key] == unit, "a chunk is looked for where it was not put"
            if unit in self.dead:
                raise ChunksLostError("it has died", frozenset([chunk.key]), Loss((unit,), UNITS))
        super().get(chunks, buffer)


class UnitPlane(ChunkPlane):
    def __init__(self, capacity: int = 10**6) -> None:
        self.store: Units = Units()
        self.host = KeyedHost(LIMIT, self._discard, UNITS)
        self.service = LocalService(capacity, self.host)


@pytest.fixture
def plane() -> UnitPlane:
    return UnitPlane()


@pytest.fixture
def client(plane: UnitPlane) -> Iterator[ChunkClient]:
    with plane.client() as made:
        made.register_partition("p", ["x", "y"], 100, ["t"])
        yield made


def put(client: ChunkClient, ids: list[str], field: str = "x", start: int = 0) -> None:
    for number, sample_id in enumerate(ids):
        column = TensorDict({field: torch.tensor([float(start + number)])}, batch_size=[1])
        client.put_samples([sample_id], "p", column, [{"prompt": sample_id}])


def ids(count: int, prefix: str = "s") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def test_a_dead_unit_takes_no_new_rows_and_the_others_do(plane: UnitPlane, client: ChunkClient) -> None:
    put(client, ids(9))
    plane.store.kill(0)
    before = {key for key, home in plane.store.homes.items() if home == 0}
    put(client, ids(12, "n"), start=100)
    assert {key for key, home in plane.store.homes.items() if home == 0} == before
    assert client.get_samples(ids(12, "n"), "p", ["x"])["x"].tolist() == [100.0 + n for n in range(12)]
    status = client.service_status()
    assert status["dead_units"] == [0] and status["lost_samples"] == 3
    plane.store.kill(2)
    put(client, ids(3, "m"))
    assert client.service_status()["dead_units"] == [0, 2]
    plane.store.kill(1)
    with pytest.raises(CapacityError, match="all 3 storage units have died"):
        put(client, ["last"])


def test_what_was_lost_is_not_claimed_but_told_and_can_be_written_again(
    plane: UnitPlane, client: ChunkClient
) -> None:
    put(client, ids(9))
    plane.store.kill(1)
    lost = [i for i in ids(9) if plane.store.homes[_key_of(plane, client, i)] == 1]
    kept = [i for i in ids(9) if i not in lost]
    assert len(lost) == 3
    with pytest.raises(SamplesLostError, match=f"lost with it are 1 of the 1 samples asked for: {lost[0]!r}"):
        client.get_samples(lost[:1], "p", ["x"])
    # Whoever has a meta of it learns what became of it, not only that it is not there.
    with pytest.raises(SamplesLostError, match="lost with it are 3 of the 9 samples"):
        client.get_samples(ids(9), "p", ["x"])
    assert client.claim_meta("p", "t", ["x"], 9, blocking=False).sample_ids == kept
    told = client.evicted_meta("p")
    assert told.sample_ids == lost and told.tags == [{"prompt": i, "evicted": "lost"} for i in lost]
    assert client.partition_status("p")["flow"]["evicted"] == {"lost": 3}
    put(client, lost, start=50)
    assert client.claim_meta("p", "t", ["x"], 3).sample_ids == lost
    assert client.get_samples(lost, "p", ["x"])["x"].tolist() == [50.0, 51.0, 52.0]


def test_a_partition_may_keep_what_was_lost_and_its_fields_can_be_written_again(
    plane: UnitPlane, client: ChunkClient
) -> None:
    client.register_partition("p", ["x", "y"], 100, ["t", "tags", "y"], flow={"on_lost": "keep"})
    put(client, ids(9))
    put(client, ids(9), "y")
    plane.store.kill(1)
    lost = [i for i in ids(9) if plane.store.homes[_key_of(plane, client, i)] == 1]
    put(client, ids(3, "n"))  # somebody notices
    assert client.list_sample_ids("p") == [*ids(9), *ids(3, "n")]
    with pytest.raises(SamplesLostError, match=f"3 of the 9 samples asked for: {lost[0]!r}"):
        client.get_samples(ids(9), "p", ["x"])
    status = client.partition_status("p")["fields"]
    assert status["x"]["produced"] == 9 and status["x"]["lost"] == 3
    claimed = client.claim_meta("p", "t", ["x"], 12, blocking=False).sample_ids
    assert claimed == [i for i in ids(9) if i not in lost] + ids(3, "n")
    assert client.claim_meta("p", "tags", [], 12).sample_ids == [*ids(9), *ids(3, "n")]
    assert client.evicted_meta("p").size == 0
    put(client, lost, start=70)
    assert client.claim_meta("p", "t", ["x"], 3).sample_ids == lost
    assert client.get_samples(lost, "p", ["x"])["x"].tolist() == [70.0, 71.0, 72.0]
    assert "lost" not in client.partition_status("p")["fields"]["x"]


def test_the_bytes_of_what_was_lost_are_given_back_and_the_dead_unit_is_no_room(
    plane: UnitPlane, client: ChunkClient
) -> None:
    put(client, ids(30))
    plane.store.kill(2)
    put(client, ids(3, "n"))  # one of them would have gone there
    client.clear_samples(client.list_sample_ids("p"), "p")
    status = client.service_status()
    assert status["storage"]["used"] == status["reserved"] + LIMIT // UNITS


def test_a_write_that_was_stored_before_the_unit_died_and_committed_after_is_made_again(
    plane: UnitPlane, client: ChunkClient
) -> None:
    link = client._link()
    exchange = link.connection.exchange
    killed: list[int] = []

    def kill_before_the_commit(request: Any, **how: Any) -> Any:
        if isinstance(request, wire.Commit) and not killed:
            killed.append(plane.store.homes[request.place or 0])
            plane.store.kill(killed[0])
            exchange(wire.Lost(Loss((killed[0],), UNITS)))
        return exchange(request, **how)

    with mock.patch.object(link.connection, "exchange", kill_before_the_commit):
        put(client, ["a"], start=7)
    assert killed and client.get_samples(["a"], "p", ["x"])["x"].tolist() == [7.0]
    assert client.service_status()["lost_samples"] == 0


def test_a_group_that_lost_a_member_waits_for_it(plane: UnitPlane) -> None:
    with plane.client() as client:
        client.register_partition("p", ["x"], 6, ["t"], grpo_group_size=3)
        put(client, [f"a_g{n}" for n in range(3)] + [f"b_g{n}" for n in range(3)])
        first = plane.store.homes[_key_of(plane, client, "a_g0")]
        plane.store.kill(first)
        with pytest.raises(SamplesLostError):
            client.get_samples(["a_g0"], "p", ["x"])
        assert client.claim_meta("p", "t", ["x"], 6, blocking=False).size == 0
        put(client, client.evicted_meta("p").sample_ids)
        assert client.claim_meta("p", "t", ["x"], 6).size == 6


def test_a_claim_that_waits_goes_on_waiting_without_what_was_lost(
    plane: UnitPlane, client: ChunkClient
) -> None:
    put(client, ids(3))
    plane.store.kill(0)
    put(client, ids(3, "n"))
    with pytest.raises(ClaimTimeoutError, match="5 were ready"):
        client.claim_meta("p", "t", ["x"], 6, timeout_s=0.01)


def test_units_that_the_storage_does_not_have_cannot_die(plane: UnitPlane, client: ChunkClient) -> None:
    put(client, ids(3))
    for loss in (Loss((3,), UNITS), Loss((-1,), UNITS), Loss((0,), 2)):
        with pytest.raises(InvalidRequestError, match="the storage has 3 units"):
            client._link().request(wire.Lost(loss), wire.Done)
    assert client.list_sample_ids("p") == ids(3)


KINDS = ["dense", "ragged", "object", "tree", "turns"]


@settings(max_examples=60, deadline=None)
@given(st.integers(8, 300), st.lists(st.integers(0, 30), min_size=1, max_size=8), st.booleans(), st.data())
def test_lost_is_exactly_what_cannot_be_read_any_more(
    size: int, lengths: list[int], keep: bool, data: st.DataObject
) -> None:
    plane = ChunkPlane()
    names = ids(len(lengths))
    with (
        mock.patch.object(keyed, "CHUNK_BYTES", size),
        mock.patch.object(chunks_module, "CHUNK_BYTES", size),
        plane.client() as client,
    ):
        client.register_partition("p", KINDS, 0, ["t"], flow={"on_lost": "keep" if keep else "clear"})
        ragged = [torch.arange(2 * n).reshape(n, 2) for n in lengths]
        columns = {
            "dense": torch.arange(len(lengths) * 5).reshape(-1, 5),
            "ragged": torch.nested.as_nested_tensor(ragged, layout=torch.jagged),
            "object": NonTensorStack(*["o" * n for n in lengths]),
            "tree": NonTensorStack(*[{"a": np.arange(600 * (n % 2)), "n": n} for n in lengths]),
        }
        client.put_samples(names, "p", TensorDict(columns, batch_size=[len(lengths)]))
        for turn in range(2):
            turns = TensorDict({"turns": columns["ragged"]}, batch_size=[len(lengths)])
            client.append_samples(names, "p", turns, finish=turn == 1)
        gone = data.draw(st.sets(st.sampled_from(sorted(plane.store.values)), max_size=4))
        for key in gone:
            del plane.store.values[key]
        unreadable = {
            (sample_id, field)
            for sample_id in names
            for field in KINDS
            if not _can_read(client, sample_id, field)
        }
        client._link().request(wire.Lost(Loss(chunks=tuple(gone))), wire.Done)
        lost = {sample_id for sample_id, _ in unreadable}
        assert client.service_status()["lost_samples"] == len(lost)
        if not keep:
            assert client.list_sample_ids("p") == [i for i in names if i not in lost]
            assert client.evicted_meta("p").sample_ids == [i for i in names if i in lost]
            return
        for field in KINDS:
            readable = [i for i in names if (i, field) not in unreadable]
            assert client.peek_meta("p", fields=[field]).sample_ids == readable


def test_a_row_without_bytes_is_not_lost_with_all_chunks_of_its_place() -> None:
    plane = ChunkPlane()
    with (
        mock.patch.object(keyed, "CHUNK_BYTES", 16),
        mock.patch.object(chunks_module, "CHUNK_BYTES", 16),
        plane.client() as client,
    ):
        client.register_partition("p", ["dense", "ragged"], 0, ["t"], flow={"on_lost": "keep"})
        empty = torch.nested.as_nested_tensor([torch.zeros(0, 2)], layout=torch.jagged)
        columns = TensorDict({"dense": torch.zeros(1, 12), "ragged": empty}, batch_size=[1])
        client.put_samples(["a"], "p", columns)
        assert len(plane.store.values) > 1 and _can_read(client, "a", "ragged")
        gone = tuple(plane.store.values)
        plane.store.values.clear()
        assert _can_read(client, "a", "ragged") and not _can_read(client, "a", "dense")
        client._link().request(wire.Lost(Loss(chunks=gone)), wire.Done)
        assert client.peek_meta("p", fields=["ragged"]).sample_ids == ["a"]
        assert client.peek_meta("p", fields=["dense"]).sample_ids == []


def _can_read(client: ChunkClient, sample_id: str, field: str) -> bool:
    link = client._link()
    located = link.request(wire.Locate("p", [sample_id], [field]), wire.Located)
    try:
        link.storage.open(located, mock.Mock())
    except Exception:
        return False
    finally:
        link.connection.release(located.lease)
    return True


def _key_of(plane: UnitPlane, client: ChunkClient, sample_id: str) -> int:
    link = client._link()
    located = link.request(wire.Locate("p", [sample_id], ["x"]), wire.Located)
    link.connection.release(located.lease)
    return located.places[0].number
