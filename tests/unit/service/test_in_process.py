"""The service inside the process of its clients: threads that wait, time out, are interrupted or closed."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlplane.control import clearing, leaving, snapshots, state, unclaiming
from rlplane.control.rules import PartitionSpec
from rlplane.errors import ClientClosedError, InvalidRequestError, PlaneConnectionError
from rlplane.service import in_process, long_answers, stall
from rlplane.service import protocol as wire
from rlplane.service.async_connection import AsyncConnection
from rlplane.service.clients import PendingRequest
from rlplane.service.in_process import InProcessConnection, LocalService
from rlplane.storage.keyed import KeyedHost
from rlplane.storage.places import Layout

SPEC = PartitionSpec.checked("p", ["x"], 10**6, ["t"])
LIMIT = 1024


@pytest.fixture
def service() -> Iterator[LocalService]:
    service = LocalService(4, KeyedHost(LIMIT, lambda place: True))
    InProcessConnection(service).exchange(wire.Register(SPEC))
    yield service
    service.close()


def put(
    connection: InProcessConnection, *ids: str, nbytes: int = 64, timeout_s: float = 600.0
) -> wire.Answer:
    reserved = connection.exchange(wire.Reserve(nbytes, 0.0))
    assert isinstance(reserved, wire.Reserved), reserved
    layout = Layout("dense", "torch.uint8", (), len(ids), len(ids))
    number = reserved.place.number
    return connection.exchange(wire.Commit("p", 1, list(ids), ["x"], [layout], number, nbytes, timeout_s))


def claim(size: int = 1, *, blocking: bool = True, timeout_s: float = 600.0) -> wire.ClaimRequest:
    return wire.ClaimRequest("p", "t", ["x"], size, blocking, timeout_s)


def ids_of(answer: wire.Answer) -> list[str]:
    assert isinstance(answer, wire.Claimed), answer
    return answer.ids


def waiting(service: LocalService) -> int:
    """How many threads wait for an answer."""
    return len(service._waiting)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Call in a thread; what it returned or raised is in the list when the thread has ended."""
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread, outcome


def ended(call: tuple[threading.Thread, list[Any]]) -> Any:
    thread, outcome = call
    thread.join(20)
    assert not thread.is_alive(), "it still waits"
    return outcome[0]


def test_a_claim_waits_in_its_thread_and_is_answered_by_a_write_in_another(service: LocalService) -> None:
    reader, writer = InProcessConnection(service), InProcessConnection(service)
    call = in_thread(lambda: reader.exchange(claim(2)))
    wait_until(lambda: waiting(service) == 1)
    assert reader.exchange(wire.ListIds("p")) == wire.Done([])
    put(writer, "a")
    put(writer, "b")
    assert ids_of(ended(call)) == ["a", "b"]
    assert waiting(service) == 0


def test_many_threads_get_every_sample_once(service: LocalService) -> None:
    reader, writer = InProcessConnection(service), InProcessConnection(service)
    calls = [in_thread(lambda: [ids_of(reader.exchange(claim())) for _ in range(25)]) for _ in range(8)]

    def write(part: int) -> None:
        for number in range(100):
            answer = put(writer, f"{part}-{number}")  # it waits for room: capacity is 4
            assert isinstance(answer, wire.Done) and answer.value is None

    def clear() -> None:
        while any(thread.is_alive() for thread, _ in calls):
            listed = writer.exchange(wire.ListIds("p"))
            assert isinstance(listed, wire.Done)
            if listed.value and _consumed(writer):
                writer.exchange(wire.Clear("p", listed.value))

    writes = [in_thread(partial(write, part)) for part in range(2)]
    clearing = in_thread(clear)
    got = [sample_id for call in calls for (sample_id,) in ended(call)]
    assert sorted(got) == sorted(f"{part}-{number}" for part in range(2) for number in range(100))
    assert [ended(call) for call in [*writes, clearing]] == [None] * 3


def _consumed(connection: InProcessConnection) -> bool:
    answer = connection.exchange(wire.Consumed("p", ["t"]))
    assert isinstance(answer, wire.Done)
    return bool(answer.value)


# Time


def test_a_claim_that_times_out_is_told_how_many_were_ready(service: LocalService) -> None:
    connection = InProcessConnection(service)
    put(connection, "a")
    answer = connection.exchange(claim(2, timeout_s=0.05))
    assert isinstance(answer, wire.Failure)
    assert (answer.kind, answer.ready) == ("ClaimTimeoutError", 1)
    assert ids_of(connection.exchange(claim(blocking=False))) == ["a"]


def test_a_put_that_times_out_is_told_whether_samples_or_bytes_lack(service: LocalService) -> None:
    connection = InProcessConnection(service)
    put(connection, *"abcd")
    full = put(connection, "e", timeout_s=0.05)
    assert isinstance(full, wire.Failure) and full.kind == "CapacityTimeoutError"
    assert "storage_capacity 4" in full.message
    large = connection.exchange(wire.Reserve(LIMIT, 0.05))
    assert isinstance(large, wire.Failure) and large.kind == "CapacityTimeoutError"
    assert f"global_segment_size {LIMIT:,}" in large.message


def test_every_thread_is_answered_at_its_own_deadline(service: LocalService) -> None:
    connection = InProcessConnection(service)
    patient = in_thread(lambda: connection.exchange(claim(timeout_s=float("inf"))))
    wait_until(lambda: waiting(service) == 1)
    hasty = [in_thread(partial(connection.exchange, claim(2, timeout_s=s))) for s in (0.2, 0.1, 0.0)]
    for call in hasty:
        answer = ended(call)
        assert isinstance(answer, wire.Failure) and answer.kind == "ClaimTimeoutError"
    assert waiting(service) == 1
    put(connection, "a")
    assert ids_of(ended(patient)) == ["a"]


# Interrupts


class InterruptedAnswer(in_process._Answer):
    """An answer whose caller is interrupted while it waits, by Ctrl-C for example."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        wait = self.ready.wait

        def interrupted(timeout: float | None = None) -> bool:
            before()
            self.ready.wait = wait  # type: ignore[method-assign]
            raise KeyboardInterrupt

        self.ready.wait = interrupted  # type: ignore[method-assign]


def interrupt_next(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object] = lambda: None) -> None:
    """Interrupt the next request that waits, after ``before``."""
    answer = in_process._Answer

    def once() -> in_process._Answer:
        monkeypatch.setattr(in_process, "_Answer", answer)
        return InterruptedAnswer(before)

    monkeypatch.setattr(in_process, "_Answer", once)


def test_a_claim_that_is_interrupted_while_it_waits_takes_nothing(
    service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = InProcessConnection(service), InProcessConnection(service)
    interrupt_next(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        first.exchange(claim())
    assert waiting(service) == 0 and not service._service.state.waiting()
    put(second, "a")
    assert ids_of(second.exchange(claim(blocking=False))) == ["a"]


def test_a_claim_that_is_interrupted_just_when_it_is_answered_gives_back_what_it_got(
    service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = InProcessConnection(service), InProcessConnection(service)
    interrupt_next(monkeypatch, before=lambda: put(second, "a", "b"))
    with pytest.raises(KeyboardInterrupt):
        first.exchange(claim())
    assert ids_of(second.exchange(claim(2, blocking=False))) == ["a", "b"]


def test_a_put_that_is_interrupted_while_it_waits_is_never_written(
    service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = InProcessConnection(service)
    put(connection, *"abcd")
    reserved = connection.exchange(wire.Reserve(64, 0.0))
    assert isinstance(reserved, wire.Reserved)
    layout = Layout("dense", "torch.uint8", (), 1, 1)
    interrupt_next(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        connection.exchange(wire.Commit("p", 1, ["e"], ["x"], [layout], reserved.place.number, 64, 600.0))
    connection.exchange(wire.Clear("p", None))
    assert connection.exchange(wire.ListIds("p")) == wire.Done([])
    assert service._storage.used == 0


def test_a_reservation_that_is_interrupted_leaves_the_room_to_others(
    service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = InProcessConnection(service)
    put(connection, "a", nbytes=LIMIT)
    interrupt_next(monkeypatch, before=lambda: connection.exchange(wire.Clear("p", None)))
    with pytest.raises(KeyboardInterrupt):
        connection.exchange(wire.Reserve(LIMIT, 600.0))
    assert isinstance(connection.exchange(wire.Reserve(LIMIT, 0.0)), wire.Reserved)


# Closing


@pytest.mark.parametrize("what", ["claim", "put", "reservation"])
def test_closing_a_client_ends_its_calls_that_wait(service: LocalService, what: str) -> None:
    first, second = InProcessConnection(service), InProcessConnection(service)
    if what == "claim":
        call = in_thread(lambda: first.exchange(claim()))
    else:
        put(second, *"abcd", nbytes=LIMIT // 2)
        large = wire.Reserve(LIMIT, 600.0)
        call = in_thread(lambda: put(first, "e") if what == "put" else first.exchange(large))
    wait_until(lambda: waiting(service) == 1)
    first.close()
    assert isinstance(ended(call), ClientClosedError)
    first.close()
    with pytest.raises(ClientClosedError):
        first.exchange(wire.ListIds("p"))
    second.exchange(wire.Clear("p", None))
    assert isinstance(second.exchange(wire.Reserve(LIMIT, 0.0)), wire.Reserved), "it left nothing behind"
    assert second.exchange(wire.ListIds("p")) == wire.Done([])


@pytest.mark.parametrize("what", ["claim", "reservation"])
def test_the_end_of_the_plane_is_told_to_those_who_wait_and_to_those_who_come(
    service: LocalService, what: str
) -> None:
    connection = InProcessConnection(service)
    put(connection, "a", nbytes=LIMIT)
    request = claim(2) if what == "claim" else wire.Reserve(LIMIT, 600.0)
    call = in_thread(lambda: connection.exchange(request))
    wait_until(lambda: waiting(service) == 1)
    service.close()
    answer = ended(call)
    assert isinstance(answer, wire.Failure) and answer.kind == "PlaneConnectionError"
    with pytest.raises(PlaneConnectionError, match="closed by its bootstrap client"):
        connection.exchange(wire.ListIds("p"))
    connection.release(1)
    connection.close()


def test_a_request_that_comes_just_after_the_end_does_not_wait_for_ever(service: LocalService) -> None:
    connection = InProcessConnection(service)
    service.close()
    # The connection has looked whether the plane is open, and then it was closed.
    late = in_thread(
        lambda: service.exchange(PendingRequest(connection.client, 99, 99), wire.Envelope(claim()))
    )
    assert isinstance(ended(late), PlaneConnectionError)


def test_a_plane_can_be_closed_while_many_threads_ask(service: LocalService) -> None:
    connection = InProcessConnection(service)

    def ask() -> str:
        while True:
            try:
                connection.exchange(wire.ListIds("p"))
            except PlaneConnectionError:
                return "told"

    calls = [in_thread(ask) for _ in range(8)]
    time.sleep(0.05)
    service.close()
    assert [ended(call) for call in calls] == ["told"] * 8


# What is sent


def test_what_is_asked_and_answered_is_a_copy(service: LocalService) -> None:
    connection = InProcessConnection(service)
    tags: list[dict[str, Any]] = [{"v": [1]}]
    connection.exchange(wire.Commit("p", 1, ["a"], [], [], None, 0, 0.0, tags))
    put(connection, "a")
    tags[0]["v"].append(2)
    answer = connection.exchange(claim())
    assert isinstance(answer, wire.Claimed) and answer.tags == [{"v": [1]}]


def test_what_cannot_be_sent_to_a_service_in_another_process_is_refused_here_too(
    service: LocalService,
) -> None:
    connection = InProcessConnection(service)
    tags: list[dict[str, Any]] = [{"v": 2**70}]
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        connection.exchange(wire.Commit("p", 1, ["a"], [], [], None, 0, 0.0, tags))
    assert waiting(service) == 0


def test_a_lease_that_a_finalizer_gives_back_in_the_middle_of_a_request_is_released(
    service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = InProcessConnection(service)
    put(connection, "a", nbytes=LIMIT)
    located = connection.exchange(wire.Locate("p", ["a"], ["x"]))
    assert isinstance(located, wire.Located)
    connection.exchange(wire.Clear("p", None))
    handle = service._service.handle

    def collected(*args: Any) -> None:
        connection.release(located.lease)  # as if the collector ran here
        handle(*args)

    monkeypatch.setattr(service._service, "handle", collected)
    connection.exchange(wire.ListIds("p"))
    monkeypatch.undo()
    assert isinstance(connection.exchange(wire.Reserve(LIMIT, 0.0)), wire.Reserved)


class Between:
    """What others do between two slices of something long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module, name in ((long_answers, "_MANY"), (long_answers, "_AT_ONCE"), (snapshots, "_MANY")):
            monkeypatch.setattr(module, name, 1)
        monkeypatch.setattr(unclaiming, "_SAMPLES_AT_ONCE", 1)
        self.act: Callable[[], object] = lambda: None
        sleep = time.sleep

        def let_others(seconds: float) -> None:
            act, self.act = self.act, lambda: None  # what they do has slices too
            act()
            self.act = act
            sleep(0)

        monkeypatch.setattr(time, "sleep", let_others)


def test_others_are_served_while_a_long_answer_is_encoded(
    service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = InProcessConnection(service), InProcessConnection(service)
    put(mine, "a", "b", "c")
    between = Between(monkeypatch)
    counts: list[wire.Answer] = []

    def count_and_clear() -> None:
        counts.append(other.exchange(wire.Count("p")))
        other.exchange(wire.Clear("p", ["b", "c"]))

    between.act = count_and_clear
    assert ids_of(mine.exchange(claim(3))) == ["a", "b", "c"]  # as they were when it was made
    assert counts[0] == wire.Done(3) and counts[1] == wire.Done(1)


def test_what_a_client_held_that_closes_is_all_back_when_it_has_closed(
    service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "_SAMPLES_AT_ONCE", 1)
    mine, other = InProcessConnection(service), InProcessConnection(service)
    put(mine, "a", "b", "c")
    mine.exchange(claim(3))
    thread, outcome = in_thread(lambda: other.exchange(claim(3)))
    wait_until(lambda: waiting(service) == 1)
    mine.close()
    thread.join(20)
    assert ids_of(outcome[0]) == ["a", "b", "c"]


def test_a_long_claim_that_is_interrupted_while_it_is_encoded_is_given_back(
    service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = InProcessConnection(service), InProcessConnection(service)
    put(mine, "a", "b", "c")

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        Between(patch).act = interrupt
        with pytest.raises(KeyboardInterrupt):
            mine.exchange(claim(3))
    assert ids_of(other.exchange(claim(3))) == ["a", "b", "c"]


# On an event loop


class Loop:
    """A client on the running event loop, and how many turns others got on it."""

    def __init__(self, service: LocalService) -> None:
        self.owner = InProcessConnection(service)
        self.connection = AsyncConnection(
            self.owner, self.owner.open_channel(asyncio.get_running_loop()), ack_timeout_s=20.0
        )
        self.turns = 0
        self._ticking = asyncio.ensure_future(self._tick())

    async def _tick(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)

    async def turns_during(self, request: wire.Request) -> tuple[int, wire.Answer]:
        before = self.turns
        answer = await self.connection.exchange(request)
        return self.turns - before, answer

    async def close(self) -> None:
        self._ticking.cancel()
        await self.connection.close()


@pytest.fixture
def large() -> Iterator[LocalService]:
    """A plane with 40 samples, of which some are very many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_answers, "_MANY", 1)
        patch.setattr(long_answers, "_AT_ONCE", 2)
        patch.setattr(snapshots, "_MANY", 1)
        patch.setattr(clearing, "_SAMPLES_AT_ONCE", 2)
        service = LocalService(1000, KeyedHost(LIMIT, lambda place: True))
        connection = InProcessConnection(service)
        connection.exchange(wire.Register(SPEC))
        put(connection, *MANY)
        connection.exchange(wire.Commit("p", 1, MANY, [], [], None, 0, 0.0, [{"n": 1}] * len(MANY)))
        yield service
        service.close()


MANY = [f"s{number:02}" for number in range(40)]


def test_a_loop_has_turns_for_others_while_a_long_answer_is_copied_and_answers_keep_their_order(
    large: LocalService,
) -> None:
    async def run() -> None:
        loop = Loop(large)
        answered: list[int] = []

        async def ask(number: int, request: wire.Request) -> Any:
            answer: Any = await loop.connection.exchange(request)
            answered.append(number)
            return answer.value

        requests: list[wire.Request] = [
            wire.ListIds("p"),
            wire.Count("p"),
            wire.ListIds("p"),
            wire.Count("p"),
        ]
        before = loop.turns
        told = await asyncio.gather(*(ask(number, each) for number, each in enumerate(requests)))
        assert told == [MANY, 40, MANY, 40] and answered == [0, 1, 2, 3]
        assert loop.turns - before >= 2 * 20
        claimed = await loop.connection.exchange(claim(40))
        assert isinstance(claimed, wire.Claimed) and (claimed.ids, claimed.tags) == (MANY, [{"n": 1}] * 40)
        await loop.close()

    asyncio.run(run())


def test_a_long_answer_that_another_thread_completes_is_copied_by_the_loop(large: LocalService) -> None:
    async def run() -> None:
        loop, other = Loop(large), InProcessConnection(large)
        waiting = asyncio.ensure_future(loop.turns_during(claim(41)))
        await asyncio.sleep(0)
        await asyncio.get_running_loop().run_in_executor(None, lambda: put(other, "last"))
        turns, claimed = await waiting
        assert ids_of(claimed) == [*MANY, "last"] and turns >= 20
        await loop.close()

    asyncio.run(run())


def test_what_a_loop_has_begun_is_done_in_its_turns_and_to_the_end_when_it_has_no_more(
    large: LocalService,
) -> None:
    async def run() -> None:
        loop = Loop(large)
        turns, answer = await loop.turns_during(wire.Clear("p", MANY[:20]))
        assert answer == wire.Done(20) and turns >= 9
        cleared = asyncio.ensure_future(loop.connection.exchange(wire.Clear("p", MANY[20:])))
        await asyncio.sleep(0)
        assert large.has_work and 0 < large._service.state.live < 20
        cleared.cancel()
        await loop.close()
        assert large._service.state.live == 0 and not large.has_work

    asyncio.run(run())


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_request_that_is_cancelled_before_it_is_handled_takes_nothing(
    large: LocalService, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    monkeypatch.setattr(stall, "_SHORT_S", -1.0)  # every look is a long one
    request = claim(3)
    request.where = {"n": 1}

    async def run() -> None:
        loop, before = Loop(large), large._service.requests
        asked = asyncio.ensure_future(loop.connection.exchange(request))
        await asyncio.sleep(0)
        assert large._service.requests == before  # it is looked for
        if is_cancelled:
            asked.cancel()
        else:
            monkeypatch.undo()
            assert len(ids_of(await asked)) == 3
        assert await loop.connection.exchange(wire.Consumed("p", ["t"])) == wire.Done(False)
        await loop.close()
        assert large._service.state.partition("p").task("t").count == (0 if is_cancelled else 3)

    asyncio.run(run())


def test_ctrl_c_in_the_middle_of_a_request_leaves_the_state_whole() -> None:
    """It comes at one line of the control state after another, in the main thread, where it is raised."""
    service = LocalService(1000, KeyedHost(2**30, lambda place: True))
    connection = InProcessConnection(service)
    connection.exchange(wire.Register(PartitionSpec.checked("p", ["x"], 1000, ["t"])))
    own = str(Path(state.__file__).parent)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    written, left = 0, 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(own):
            return None
        if event == "line":
            left -= 1
            if not left:
                signal.raise_signal(signal.SIGINT)
        return trace

    try:
        for line in itertools.count(1):
            left = line
            sys.settrace(trace)
            try:
                connection.exchange(wire.Commit("p", 1, [f"s{line}"], [], [], None, 0, 1.0))
            except KeyboardInterrupt:
                pass
            else:
                written += 1
            finally:
                sys.settrace(None)
            if left > 0:
                break  # a put has no more lines than these
    finally:
        signal.signal(signal.SIGINT, handler)
    assert line > 20 and written >= 1
    listed: Any = connection.exchange(wire.ListIds("p"))
    claimed: Any = connection.exchange(wire.ClaimRequest("p", "t", [], 1000, False, 0.0))
    assert sorted(claimed.ids) == sorted(listed.value) and f"s{line}" in listed.value
    connection.exchange(wire.Clear("p", listed.value))
    assert service._service.state.live == 0
