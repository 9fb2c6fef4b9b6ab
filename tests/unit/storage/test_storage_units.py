"""Bytes in and out of TransferQueue's storage units, when one of them answers wrongly, late or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from rlplane.errors import PlaneConnectionError
from rlplane.storage.chunks import Chunk, ChunksLostError
from rlplane.storage.places import Loss, UnitsDiedError
from rlplane.storage.transfer_queue import units as module
from rlplane.storage.transfer_queue.units import StorageUnits

pytest.importorskip("transfer_queue")
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

FOREVER = float("inf")
SIZE = 10


class Unit(threading.Thread):
    """A unit on a real socket. ``answer`` may replace what it says; None is silence, bytes are sent as is."""

    def __init__(self, rank: int, context: zmq.Context[Any]) -> None:
        super().__init__(daemon=True)
        self.rank = rank
        self.values: dict[int, Any] = {}
        self.answer: Callable[[str, dict[str, Any]], Any] = lambda kind, body: (kind, body)
        self.unanswered: list[bytes] = []
        self.clients: list[bytes] = []
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.ended = threading.Event()
        self.start()

    def to_addr(self, name: str) -> str:
        assert name == "put_get_socket"
        return f"tcp://127.0.0.1:{self.port}"

    def run(self) -> None:
        while not self.ended.is_set():
            if self.socket.poll(20):
                client, *frames = self.socket.recv_multipart(copy=False)
                self.clients.append(client.bytes)
                self._reply(client.bytes, ZMQMessage.deserialize(frames))
        self.socket.close()

    def end(self) -> None:
        self.ended.set()
        self.join(10)

    def _reply(self, client: bytes, message: Any) -> None:
        # A request that was not answered is answered with the next one, before it.
        for late in self.unanswered:
            self._send(late, "GET_DATA_RESPONSE", {"data": {"rlplane": [np.full(SIZE, 255, np.uint8)]}})
        self.unanswered.clear()
        said = self.answer(*self._serve(message.request_type.name, message.body))
        if said is None:
            self.unanswered.append(client)
        elif isinstance(said, bytes):
            self.socket.send_multipart([client, said])
        else:
            self._send(client, *said)

    def _serve(self, kind: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        keys = body["global_indexes"]
        if kind == "PUT_DATA":
            values = [np.array(value) for value in body["data"]["rlplane"]]
            self.values.update(zip(keys, values, strict=True))
            return "PUT_DATA_RESPONSE", {}
        if kind == "GET_DATA":
            return "GET_DATA_RESPONSE", {"data": {"rlplane": [self.values[key] for key in keys]}}
        for key in keys:
            self.values.pop(key, None)
        return "CLEAR_DATA_RESPONSE", {}

    def _send(self, client: bytes, kind: str, body: dict[str, Any]) -> None:
        message = ZMQMessage.create(ZMQRequestType[kind], "unit", body)
        self.socket.send_multipart([client, *message.serialize()])


class Plane:
    """Two units, and the client of both."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.units = [Unit(rank, self.context) for rank in range(2)]
        self.asked: list[int] = []
        self.dead: set[int] = set()
        self.store = StorageUnits(dict(enumerate(self.units)), self._check, 0.3)

    def _check(self, rank: int) -> None:
        self.asked.append(rank)
        if rank in self.dead:
            raise UnitsDiedError(f"storage unit {rank} has died")

    def get(self, keys: list[int]) -> list[list[int]]:
        buffer = torch.zeros(SIZE * len(keys), dtype=torch.uint8)
        self.store.get([Chunk(key, SIZE * row, SIZE) for row, key in enumerate(keys)], buffer)
        return buffer.reshape(len(keys), SIZE).tolist()


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    monkeypatch.setattr(module, "_SILENT_MS", 30)
    made = Plane()
    chunks = [Chunk(key, SIZE * key, SIZE) for key in range(6)]
    made.store.put(chunks, torch.arange(6 * SIZE, dtype=torch.uint8), FOREVER)
    yield made
    for unit in made.units:
        unit.end()
    made.store.close()
    made.context.term()


def rows(*keys: int) -> list[list[int]]:
    return [list(range(SIZE * key, SIZE * key + SIZE)) for key in keys]


def test_chunks_are_divided_among_the_units_and_come_back(plane: Plane) -> None:
    assert [sorted(unit.values) for unit in plane.units] == [[0, 2, 4], [1, 3, 5]]
    assert plane.get([5, 0, 3]) == rows(5, 0, 3)
    plane.store.drop([Chunk(key, 0, SIZE) for key in (0, 1, 2, 99)])
    assert [sorted(unit.values) for unit in plane.units] == [[4], [3, 5]]


def test_a_thread_has_one_socket_to_each_unit_and_no_other_thread_uses_it(plane: Plane) -> None:
    plane.get([0])
    other = threading.Thread(target=plane.get, args=([0],))
    other.start()
    other.join(10)
    clients = plane.units[0].clients
    assert clients[0] == clients[1] != clients[2]


def test_an_error_of_a_unit_says_what_is_lost(plane: Plane) -> None:
    plane.units[1].answer = lambda kind, body: ("GET_ERROR", {"message": "the disk is on fire"})
    with pytest.raises(ChunksLostError, match="storage unit 1 failed: the disk is on fire") as lost:
        plane.get([0, 1, 2, 3])
    assert lost.value.keys == {1, 3}
    plane.units[1].answer = lambda kind, body: (kind, body)
    assert plane.get([0, 1, 2, 3]) == rows(0, 1, 2, 3)


@pytest.mark.parametrize("call", ["put", "drop"])
def test_an_error_of_a_unit_is_the_callers(plane: Plane, call: str) -> None:
    plane.units[0].answer = lambda kind, body: ("PUT_ERROR", {"message": "no"})
    calls = {
        "put": lambda: plane.store.put([Chunk(8, 0, SIZE)], torch.zeros(SIZE, dtype=torch.uint8), FOREVER),
        "drop": lambda: plane.store.drop([Chunk(8, 0, SIZE)]),
    }
    with pytest.raises(PlaneConnectionError, match="storage unit 0 failed: no"):
        calls[call]()


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_a_value_of_another_size_is_lost(plane: Plane, size: int) -> None:
    plane.units[0].values[2] = np.zeros(size, np.uint8)
    with pytest.raises(ChunksLostError, match=f"returned {size} bytes where 10 were stored") as lost:
        plane.get([0, 1, 2])
    assert lost.value.keys == {2}
    assert plane.get([0, 1]) == rows(0, 1)


@pytest.mark.parametrize(
    "body",
    [{}, {"data": {}}, {"data": {"rlplane": []}}, {"data": {"rlplane": [None]}}, {"data": {"rlplane": 7}}],
    ids=["nothing", "no field", "too few", "no bytes", "no list"],
)
def test_an_answer_without_the_values_is_lost(plane: Plane, body: dict[str, Any]) -> None:
    plane.units[0].answer = lambda kind, _: (kind, body)
    with pytest.raises(ChunksLostError, match="storage unit 0") as lost:
        plane.get([0, 1])
    assert lost.value.keys == {0}


@pytest.mark.parametrize("garbage", [b"", b"garbage", b"\x81\xa1a\x01"])
def test_an_answer_that_is_no_message_is_an_error(plane: Plane, garbage: bytes) -> None:
    plane.units[0].answer = lambda kind, body: garbage
    with pytest.raises(PlaneConnectionError, match="storage unit 0"):
        plane.get([0])
    plane.units[0].answer = lambda kind, body: (kind, body)
    assert plane.get([0]) == rows(0)


def test_a_silent_unit_is_an_error_in_time(plane: Plane) -> None:
    plane.units[0].answer = lambda kind, body: None
    with pytest.raises(PlaneConnectionError, match=r"storage unit 0 did not answer within 0.3 s"):
        plane.get([0])
    assert set(plane.asked) == {0}, "Ray was asked about the silent one"


def test_a_silent_unit_that_has_died_takes_its_chunks_with_it(plane: Plane) -> None:
    plane.units[0].answer = lambda kind, body: None
    plane.dead.add(0)
    with pytest.raises(ChunksLostError, match="storage unit 0 has died") as lost:
        plane.get([0, 1, 2])
    assert lost.value.keys == {0, 2}
    assert plane.get([1]) == rows(1)


def test_what_a_dead_unit_would_have_had_goes_to_the_others_and_is_found_there(plane: Plane) -> None:
    plane.units[0].answer = lambda kind, body: None
    plane.dead.add(0)
    buffer = torch.arange(2 * SIZE, dtype=torch.uint8)
    with pytest.raises(UnitsDiedError, match="storage unit 0 has died") as died:
        plane.store.put([Chunk(8, 0, SIZE), Chunk(9, SIZE, SIZE)], buffer, FOREVER)
    assert died.value.loss == Loss((0,), 2)
    plane.asked.clear()
    with pytest.raises(UnitsDiedError):
        plane.store.put([Chunk(10, 0, SIZE)], buffer, FOREVER)
    assert plane.asked == [], "it is known to be dead"

    chunks = [Chunk(12, 0, SIZE, (0,)), Chunk(13, SIZE, SIZE, (0,))]
    plane.store.put(chunks, buffer, FOREVER)
    got = torch.zeros(2 * SIZE, dtype=torch.uint8)
    plane.store.get(chunks, got)
    assert torch.equal(got, buffer) and {12, 13} <= plane.units[1].values.keys()
    with pytest.raises(ChunksLostError) as lost:
        plane.get([0, 1])
    assert lost.value.keys == {0} and lost.value.loss == Loss((0,), 2)
    plane.store.drop([*chunks, Chunk(0, 0, SIZE), Chunk(1, 0, SIZE)])
    assert not {1, 12, 13} & plane.units[1].values.keys()


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(plane: Plane) -> None:
    plane.units[0].answer = lambda kind, body: None
    with pytest.raises(PlaneConnectionError):
        plane.get([2])
    plane.units[0].answer = lambda kind, body: (kind, body)
    assert plane.get([0]) == rows(0)
    clients = plane.units[0].clients
    assert clients[-1] != clients[-2], "the socket whose answer was not read was used again"


def test_an_answer_that_was_not_read_because_another_unit_failed_is_not_read_later(plane: Plane) -> None:
    plane.units[0].answer = lambda kind, body: ("GET_ERROR", {"message": "no"})
    with pytest.raises(ChunksLostError):
        plane.get([0, 1])
    assert plane.get([3]) == rows(3)
    clients = plane.units[1].clients
    assert clients[-1] != clients[-2], "the socket whose answer was not read was used again"


def test_a_closed_store_says_so(plane: Plane) -> None:
    plane.store.close()
    with pytest.raises(PlaneConnectionError, match="cannot be reached"):
        plane.get([0])
