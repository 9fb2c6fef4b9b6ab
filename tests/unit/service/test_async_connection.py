"""The asyncio connection by itself: whatever moment a cancellation comes at, what was granted is given back
exactly once."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rlplane.errors import ClientClosedError, DataPlaneError, PlaneConnectionError
from rlplane.service import protocol as wire
from rlplane.service.async_connection import AsyncConnection
from rlplane.storage.places import Place

CLAIM = wire.ClaimRequest("p", "t", ["x"], 2, True, 60.0)
CLAIMED = wire.Claimed(["a", "b"], [{}, {}])
PLACE = Place(7, 64)


class Service:
    """Both neighbours of a connection: its channel, whose answers the test gives, and its client."""

    closed = False
    life = 0

    def __init__(self, *, ack_timeout_s: float = 30.0, comes_back: bool = False) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.read_sent: list[list[int]] = []
        self.released: list[int] = []
        self.read: list[int] = []
        self.is_open = True
        self.may_come_back = threading.Event()
        self._numbers = itertools.count(1)
        self.connection = AsyncConnection(self, self, ack_timeout_s, self.reopen if comes_back else None)

    def reopen(self) -> Service:
        assert self.may_come_back.wait(20)
        self.life += 1
        self.sent.clear()
        self.is_open = True
        return self

    def start(self, on_answer: Callable[[int, bytes], None], on_end: Callable[[], None]) -> None:
        self._on_answer, self.end = on_answer, on_end

    def send(self, number: int, body: bytes) -> None:
        envelope = wire.envelope_decoder.decode(body)
        self.sent.append((number, envelope.request))
        self.read_sent.append(envelope.read)

    def close(self) -> None:
        self.is_open = False

    def forget(self) -> None:
        self.is_open = False

    def next_number(self) -> int:
        return next(self._numbers)

    def release(self, lease: int) -> None:
        self.released.append(lease)

    def gone(self) -> DataPlaneError:
        return PlaneConnectionError("the service has died")

    def take_read(self) -> list[int]:
        read, self.read = self.read, []
        return read

    def note_read(self, number: int) -> None:
        self.read.append(number)

    def has_lease(self, answer: wire.Answer, life: int) -> bool:
        return True

    def answer(self, answer: wire.Answer, number: int | None = None) -> None:
        """Answer a request, the latest one if no number is given."""
        self._on_answer(self.sent[-1][0] if number is None else number, wire.encode(answer))

    @property
    def undone(self) -> list[Any]:
        return [request for _, request in self.sent if not isinstance(request, type(CLAIM))]

    async def start_claim(self) -> asyncio.Task[wire.Answer]:
        task = asyncio.create_task(self.connection.exchange(CLAIM, waits_s=60.0))
        await asyncio.sleep(0)
        return task


async def cancelled(task: asyncio.Task[Any]) -> None:
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)  # what is withdrawn goes out with the next turn of the loop


async def test_answers_find_their_callers_in_any_order():
    service = Service()
    tasks = [await service.start_claim() for _ in range(3)]
    for number, _ in reversed(service.sent):
        service.answer(wire.Claimed([str(number)], [{}]), number)
    assert [await task for task in tasks] == [wire.Claimed([number], [{}]) for number in "123"]
    assert service.undone == []


async def test_a_call_that_is_cancelled_while_it_waits_is_withdrawn():
    service = Service()
    task = await service.start_claim()
    task.cancel()
    await cancelled(task)
    assert service.undone == [wire.Withdraw([1])]
    service.answer(wire.Done())
    await service.connection.close()
    assert service.undone == [wire.Withdraw([1])] and not service.is_open


async def test_calls_that_are_cancelled_together_are_withdrawn_together():
    service = Service()
    tasks = [await service.start_claim() for _ in range(100)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    assert service.undone == [wire.Withdraw(list(range(1, 101)))]


@pytest.mark.parametrize("moment", ["answer first", "cancel first", "withdrawn"])
async def test_a_claim_that_is_answered_as_it_is_cancelled_is_taken_back_once(moment):
    service = Service()
    task = await service.start_claim()
    if moment == "answer first":
        service.answer(CLAIMED)
        task.cancel()
    elif moment == "cancel first":
        task.cancel()
        service.answer(CLAIMED)
    await asyncio.sleep(0)
    if moment == "withdrawn":
        task.cancel()
        await cancelled(task)
        service.answer(CLAIMED, 1)
        service.answer(wire.Done(), 2)
    await cancelled(task)
    assert [undo for undo in service.undone if isinstance(undo, wire.Unclaim)] == [
        wire.Unclaim("p", "t", ["a", "b"])
    ]


async def test_every_kind_of_grant_is_given_back():
    service = Service()
    for answer in (
        wire.Reserved(PLACE),
        wire.Located(3, [], {}, []),
        wire.Frozen(4),
        wire.Done(None, PLACE),
        wire.Claimed([], []),
        wire.Failure("KeyError", "nothing was given"),
    ):
        task = await service.start_claim()
        service.answer(answer)
        task.cancel()
        await cancelled(task)
    assert service.undone == [wire.Unreserve(7), wire.Unreserve(7)]
    assert service.released == [3, 4]


async def test_closing_ends_the_calls_and_waits_until_their_grants_are_given_back():
    service = Service()
    first, second = await service.start_claim(), await service.start_claim()
    closing = asyncio.create_task(service.connection.close())
    for task in (first, second):
        with pytest.raises(ClientClosedError, match="while the call was waiting"):
            await task
    await asyncio.sleep(0)
    assert service.undone == [wire.Withdraw([1, 2])]
    service.answer(CLAIMED, 2)
    service.answer(wire.Done(), 3)
    await asyncio.sleep(0)
    assert service.undone[1:] == [wire.Unclaim("p", "t", ["a", "b"])] and not closing.done()
    service.answer(wire.Done(), 4)
    await closing
    with pytest.raises(ClientClosedError):
        await service.connection.exchange(CLAIM)


async def test_the_death_of_the_service_ends_every_call_with_an_error_of_its_own():
    service = Service()
    tasks = [await service.start_claim() for _ in range(3)]
    service.end()
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in errors] == [PlaneConnectionError] * 3
    assert len(set(map(id, errors))) == 3
    with pytest.raises(PlaneConnectionError, match="has died"):
        await service.connection.exchange(CLAIM)
    await service.connection.close()


async def test_a_service_that_does_not_answer_is_an_error_and_its_late_answer_is_undone():
    service = Service(ack_timeout_s=0.01)
    with pytest.raises(PlaneConnectionError, match=r"has not answered for 0\.0 s"):
        await service.connection.exchange(CLAIM)
    await asyncio.sleep(0)
    service.answer(CLAIMED, 1)
    assert service.undone == [wire.Withdraw([1]), wire.Unclaim("p", "t", ["a", "b"])]


async def test_a_claim_whose_partition_has_gone_meanwhile_need_not_be_taken_back():
    service = Service()
    task = await service.start_claim()
    service.answer(CLAIMED)
    task.cancel()
    await cancelled(task)
    service.answer(wire.Failure("UnknownPartitionError", "partition 'p' is not registered"))
    await asyncio.wait_for(service.connection.close(), 5.0)
    assert service.undone == [wire.Unclaim("p", "t", ["a", "b"])]


async def until_sent_again(service: Service, count: int) -> None:
    async with asyncio.timeout(20):
        while service.life == 0 or len(service.sent) < count:
            await asyncio.sleep(0.001)


async def test_a_service_that_comes_back_gets_again_what_it_has_not_answered():
    service = Service(comes_back=True)
    tasks = [await service.start_claim() for _ in range(3)]
    service.answer(CLAIMED, 1)
    tasks[1].cancel()
    await cancelled(tasks[1])
    service.end()
    meanwhile = await service.start_claim()
    service.may_come_back.set()
    await until_sent_again(service, 4)
    # The one that was cancelled may have been done: its answer has to come here, where it is undone.
    assert service.sent == [(2, CLAIM), (3, CLAIM), (4, wire.Withdraw([2])), (5, CLAIM)]
    for number, answer in ((2, CLAIMED), (3, wire.Claimed(["c"], [{}])), (4, wire.Done()), (5, CLAIMED)):
        service.answer(answer, number)
    assert [await task for task in (tasks[0], tasks[2], meanwhile)] == [
        CLAIMED,
        wire.Claimed(["c"], [{}]),
        CLAIMED,
    ]
    assert service.sent[4:] == [(6, wire.Unclaim("p", "t", ["a", "b"]))]
    service.answer(wire.Done(), 6)
    await asyncio.wait_for(service.connection.close(), 5.0)


async def test_a_service_that_comes_back_is_found_although_no_thread_of_the_loop_is_free():
    """They may all be waiting for what this client is about to bring."""
    loop, is_brought = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    waiting = loop.run_in_executor(None, is_brought.wait, 60)
    service = Service(comes_back=True)
    task = await service.start_claim()
    service.may_come_back.set()
    service.end()
    try:
        await until_sent_again(service, 1)
        service.answer(CLAIMED, 1)
        assert await task == CLAIMED
    finally:
        is_brought.set()
    assert await waiting


async def test_a_client_that_closes_while_the_service_is_away_does_not_wait_for_it():
    service = Service(comes_back=True)
    task = await service.start_claim()
    service.end()
    await asyncio.wait_for(service.connection.close(), 5.0)
    with pytest.raises(ClientClosedError):
        await task
    service.may_come_back.set()
    async with asyncio.timeout(20):
        while service.life == 0 or service.is_open:
            await asyncio.sleep(0.001)
    assert service.sent == []


async def test_what_is_sent_says_which_answers_were_read():
    service = Service()
    tasks = [await service.start_claim() for _ in range(2)]
    service.answer(CLAIMED, 2)
    assert await tasks[1] == CLAIMED
    await service.start_claim()
    assert service.read_sent == [[], [], [2]]
