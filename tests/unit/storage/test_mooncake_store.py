"""Bytes in and out of Mooncake, when it answers with its error codes, and when it does not answer."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlplane.errors import CapacityTimeoutError, DataPlaneError, PlaneConnectionError
from rlplane.storage.chunks import Chunk, ChunksLostError
from rlplane.storage.mooncake import store as module
from rlplane.storage.mooncake.sharing import share
from rlplane.storage.mooncake.store import MooncakeStore
from rlplane.storage.places import Loss, UnitsDiedError

NOT_FOUND, NO_ROOM, TRANSFER, UNREACHABLE_MASTER, OTHER = -704, -200, -800, -900, -1
FOREVER = float("inf")

# What an answer should be instead of success: (call, key) -> code, or None.
Fault = Callable[[str, int], int | None]


class FakeMooncake:
    """Mooncake's store as TransferQueue's client holds it: values by name, memory by address."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.fault: Fault = lambda call, key: None
        self.calls: list[tuple[str, list[int]]] = []
        self.registered: list[int] = []
        self.hang: threading.Event | None = None
        self.closed = False

    def register_buffer(self, address: int, size: int) -> int:
        self.registered.append(address)
        return 0

    def unregister_buffer(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def batch_upsert_from(
        self, names: list[str], addresses: list[int], sizes: list[int], config: Any
    ) -> list[int]:
        codes = self._begin("put", names)
        for name, address, size, code in zip(names, addresses, sizes, codes, strict=True):
            assert self._is_registered(address)
            if code == 0:
                self.values[name] = ctypes.string_at(address, size)
        return codes

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        codes = self._begin("get", names)
        for place, (name, address, size) in enumerate(zip(names, addresses, sizes, strict=True)):
            assert self._is_registered(address)
            if codes[place] == 0 and name not in self.values:
                codes[place] = NOT_FOUND
            if codes[place] == 0:
                ctypes.memmove(address, self.values[name], size)
                codes[place] = len(self.values[name])
        return codes

    def batch_remove(self, names: list[str], force: bool) -> list[int]:
        codes = self._begin("remove", names)
        return [
            code or (0 if self.values.pop(name, None) is not None else NOT_FOUND)
            for name, code in zip(names, codes, strict=True)
        ]

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [int(name in self.values) for name in names]

    def close(self) -> None:
        self.closed = True

    def _begin(self, call: str, names: list[str]) -> list[int]:
        keys = [int(name.removeprefix("rlplane/")) for name in names]
        self.calls.append((call, keys))
        if self.hang is not None:
            self.hang.wait(30)
        return [self.fault(call, key) or 0 for key in keys]

    def _is_registered(self, address: int) -> bool:
        return any(base <= address for base in self.registered)


def client_of(fake: FakeMooncake) -> Any:
    return SimpleNamespace(_store=fake, replica_config=object(), close=fake.close)


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeMooncake, MooncakeStore]]:
    monkeypatch.setattr(module, "_KEYS_PER_CALL", 4)
    fake = FakeMooncake()
    store = MooncakeStore(share("fake", lambda: client_of(fake)), lambda: None, 0.1, wait_for_close=True)
    yield fake, store
    if fake.hang is not None:
        fake.hang.set()
    assert fake.registered == [], "a buffer is still registered"
    store.close()
    assert fake.closed


def ten_chunks() -> tuple[list[Chunk], torch.Tensor]:
    buffer = torch.arange(100, dtype=torch.uint8)
    return [Chunk(key, 10 * key, 10) for key in range(10)], buffer


def fails_times(fake: FakeMooncake, times: int, **codes: int) -> None:
    """Have key 5 fail so many times, in the calls that are named."""
    left = dict.fromkeys(codes, times)

    def fault(call: str, key: int) -> int | None:
        if key == 5 and left.get(call, 0):
            left[call] -= 1
            return codes[call]
        return None

    fake.fault = fault


def test_chunks_come_back_and_no_call_has_too_many_keys(mooncake: Any) -> None:
    fake, store = mooncake
    chunks, buffer = ten_chunks()
    store.put(chunks, buffer, FOREVER)
    got = torch.zeros(100, dtype=torch.uint8)
    store.get(chunks, got)
    assert torch.equal(got, buffer)
    store.drop([*chunks, Chunk(77, 0, 10)])
    assert fake.values == {}
    sizes = [len(keys) for _, keys in fake.calls]
    assert sizes == [4, 4, 2, 4, 4, 2, 4, 4, 3]


def test_what_mooncake_does_not_have_any_more_is_lost_and_named(mooncake: Any) -> None:
    fake, store = mooncake
    chunks, buffer = ten_chunks()
    store.put(chunks, buffer, FOREVER)
    del fake.values["rlplane/5"], fake.values["rlplane/6"]
    with pytest.raises(ChunksLostError, match="does not have it any more") as lost:
        store.get(chunks, buffer)
    assert lost.value.keys == {5, 6}


def test_a_value_of_another_size_is_no_answer(mooncake: Any) -> None:
    fake, store = mooncake
    chunks, buffer = ten_chunks()
    store.put(chunks, buffer, FOREVER)
    fake.values["rlplane/5"] = b"short"
    with pytest.raises(PlaneConnectionError, match=r"failed 3 times with the codes \[5\]"):
        store.get(chunks, buffer)


def test_a_put_waits_for_room_and_sends_only_what_is_not_there_yet(mooncake: Any) -> None:
    fake, store = mooncake
    chunks, buffer = ten_chunks()
    fails_times(fake, 5, put=NO_ROOM)
    store.put(chunks, buffer, time.monotonic() + 30)
    assert len(fake.values) == 10
    assert [keys for call, keys in fake.calls if call == "put"] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
        *[[5]] * 5,
    ]


def test_a_put_that_finds_no_room_in_time_leaves_nothing(mooncake: Any) -> None:
    fake, store = mooncake
    chunks, buffer = ten_chunks()
    fake.fault = lambda call, key: NO_ROOM if call == "put" and key >= 5 else None
    with pytest.raises(CapacityTimeoutError, match="no room for 50 more bytes; nothing was written"):
        store.put(chunks, buffer, time.monotonic() + 0.1)
    assert fake.values == {}


@pytest.mark.parametrize("code", [TRANSFER, OTHER])
def test_a_failure_that_passes_is_tried_again(mooncake: Any, code: int) -> None:
    fake, store = mooncake
    chunks, buffer = ten_chunks()
    fails_times(fake, 2, put=code, get=code)
    store.put(chunks, buffer, FOREVER)
    got = torch.zeros(100, dtype=torch.uint8)
    store.get(chunks, got)
    assert torch.equal(got, buffer)


@pytest.mark.parametrize("code", [TRANSFER, OTHER])
def test_a_failure_that_stays_is_an_error_with_its_code(mooncake: Any, code: int) -> None:
    fake, store = mooncake
    chunks, buffer = ten_chunks()
    fails_times(fake, 3, put=code)
    with pytest.raises(PlaneConnectionError, match=rf"failed 3 times with the codes \[{code}\]"):
        store.put(chunks, buffer, FOREVER)
    assert fake.values == {}, "a put that failed leaves nothing"
    store.put(chunks, buffer, FOREVER)
    fails_times(fake, 3, get=code)
    with pytest.raises(PlaneConnectionError, match=rf"failed 3 times with the codes \[{code}\]"):
        store.get(chunks, buffer)


def test_a_failed_put_is_told_even_when_it_cannot_be_cleaned_up(mooncake: Any) -> None:
    fake, store = mooncake
    chunks, buffer = ten_chunks()
    fake.fault = lambda call, key: TRANSFER if key == 5 else None
    with pytest.raises(PlaneConnectionError, match=r"failed 3 times"):
        store.put(chunks, buffer, FOREVER)


def a_unit_has_died() -> None:
    raise UnitsDiedError("storage unit 1 has died")


def test_what_cannot_be_read_because_a_unit_died_is_lost_with_it(mooncake: Any) -> None:
    fake, store = mooncake
    chunks, buffer = ten_chunks()
    store.put(chunks, buffer, FOREVER)
    store._check_alive = a_unit_has_died
    fails_times(fake, 2, get=TRANSFER)
    store.get(chunks, buffer)  # it was another that has died
    fails_times(fake, 3, get=TRANSFER)
    with pytest.raises(ChunksLostError, match="storage unit 1 has died") as lost:
        store.get(chunks, buffer)
    assert lost.value.keys == {5} and lost.value.loss == Loss(chunks=(5,))


def test_a_put_goes_on_until_mooncake_has_noticed_that_a_unit_died(mooncake: Any) -> None:
    fake, store = mooncake
    chunks, buffer = ten_chunks()
    store._check_alive = a_unit_has_died
    fails_times(fake, 6, put=TRANSFER)
    store.put(chunks, buffer, time.monotonic() + 60)
    assert len(fake.values) == 10
    fails_times(fake, 10**6, put=TRANSFER)
    with pytest.raises(CapacityTimeoutError, match="nothing was written"):
        store.put(chunks, buffer, time.monotonic() + 0.2)


@pytest.mark.parametrize("code", [TRANSFER, UNREACHABLE_MASTER])
def test_what_fails_because_the_master_died_is_an_error(mooncake: Any, code: int) -> None:
    fake, store = mooncake
    chunks, buffer = ten_chunks()
    store.put(chunks, buffer, FOREVER)

    def dead() -> None:
        raise PlaneConnectionError("the master has died")

    store._check_alive = dead
    fails_times(fake, 1, get=code)
    with pytest.raises(PlaneConnectionError, match="the master has died"):
        store.get(chunks, buffer)


def test_keys_without_a_value_are_found_out(mooncake: Any) -> None:
    fake, store = mooncake
    chunks, buffer = ten_chunks()
    store.put(chunks, buffer, FOREVER)
    del fake.values["rlplane/5"]
    assert store.missing([*range(10), 77]) == [5, 77]


def test_what_cannot_be_removed_is_an_error_with_its_code(mooncake: Any) -> None:
    fake, store = mooncake
    fake.fault = lambda call, key: OTHER
    with pytest.raises(DataPlaneError, match="could not remove a value: code -1"):
        store.drop([Chunk(1, 0, 10)])


@pytest.mark.parametrize("call", ["put", "get", "drop"])
def test_a_mooncake_that_does_not_answer_is_an_error_in_time(
    mooncake: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    fake, store = mooncake
    chunks, buffer = ten_chunks()
    monkeypatch.setattr(module, "_ANSWER_S", 0.2)
    fake.hang = threading.Event()
    calls = {
        "put": lambda: store.put(chunks, buffer, FOREVER),
        "get": lambda: store.get(chunks, buffer),
        "drop": lambda: store.drop([Chunk(1, 0, 10)]),
    }
    outcome: list[BaseException] = []

    def run() -> None:
        try:
            calls[call]()
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for ever"
    assert isinstance(outcome[0], PlaneConnectionError) and "did not answer" in str(outcome[0])


def test_memory_that_a_late_answer_is_written_to_is_not_given_to_others(
    mooncake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, store = mooncake
    chunks, buffer = ten_chunks()
    store.put(chunks, buffer, FOREVER)
    monkeypatch.setattr(module, "_ANSWER_S", 0.2)
    fake.hang = threading.Event()
    freed = threading.Event()

    class Noticed(torch.Tensor):
        def __del__(self) -> None:
            freed.set()

    target = torch.zeros(100, dtype=torch.uint8).as_subclass(Noticed)
    with pytest.raises(PlaneConnectionError, match="did not answer"):
        store.get(chunks, target)
    del target
    assert not freed.is_set(), "Mooncake still writes there"
    fake.hang.set()
    assert freed.wait(10)


def test_who_waits_for_room_does_not_hold_up_others_of_its_process(mooncake: Any) -> None:
    fake, store = mooncake
    chunks, buffer = ten_chunks()
    store.put(chunks[:5], buffer, FOREVER)
    other = MooncakeStore(share("fake", lambda: pytest.fail("it is open")), lambda: None, 0.1)
    fake.fault = lambda call, key: NO_ROOM if call == "put" else None
    waiting = threading.Thread(target=lambda: store.put(chunks[5:], buffer, time.monotonic() + 60))
    waiting.start()
    read = torch.zeros_like(buffer)
    other.get(chunks[:5], read)
    other.drop(chunks[:5])
    assert read[:50].tolist() == buffer[:50].tolist()
    fake.fault = lambda call, key: None
    waiting.join(60)
    assert len(fake.values) == 5
    other.close()


def test_a_connection_is_shared_until_its_last_user_goes() -> None:
    fakes: list[FakeMooncake] = []

    def connect() -> Any:
        fakes.append(FakeMooncake())
        return client_of(fakes[-1])

    first, second = share("one", connect), share("one", connect)
    another = share("two", connect)
    assert first is second and first is not another and len(fakes) == 2
    first.close()
    assert [fake.closed for fake in fakes] == [False, False]
    assert share("one", connect) is second
    second.close()
    second.close()
    assert [fake.closed for fake in fakes] == [True, False]
    again = share("one", connect)
    assert again is not second and len(fakes) == 3
    again.close()
    another.close()
    with pytest.raises(OSError, match="no master"):
        share("three", lambda: (_ for _ in ()).throw(OSError("no master")))
    share("three", connect).close()


def test_a_forked_child_has_a_connection_of_its_own() -> None:
    parents = share("one", lambda: client_of(FakeMooncake()))
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            code = int(share("one", lambda: client_of(FakeMooncake())) is parents)
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    parents.close()
