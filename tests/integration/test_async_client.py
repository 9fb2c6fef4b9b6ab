"""The asyncio client on the engines of one machine: waiting, cancelling, dying, other loops and processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import pickle
import random
import signal
import threading
import uuid
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import rlplane
from rlplane.adapters.async_client import AsyncPlaneClient
from rlplane.errors import ClientClosedError, InvalidRequestError, PlaneConnectionError
from rlplane.storage.layout import encode_columns

SMALL, LARGE = 16, 512 * 1024  # a large one is copied by a helper thread


def config(engine, **keys):
    if engine == "memory":
        return rlplane.load_config("local", {"controller_address": f"async-{uuid.uuid4().hex}", **keys})
    return rlplane.load_config("shm", keys)


def build(cfg, *, bootstrap=True) -> Any:
    """The client, with what it has beyond the contract."""
    return rlplane.build_async_data_plane_client(cfg, bootstrap=bootstrap)


def rows(count, width=SMALL):
    return TensorDict({"x": torch.ones(count, width, dtype=torch.uint8)}, batch_size=[count])


async def register(client, num_samples=10**6, tasks=("train",)):
    await client.register_partition("p", ["x"], num_samples, list(tasks))


@pytest.fixture(params=["memory", "shm"])
def engine(request):
    return request.param


@pytest.fixture
async def client(engine):
    async with build(config(engine)) as client:
        await register(client)
        yield client


async def until(condition, deadline_s=20.0):
    """Wait until the coroutine function says so."""
    async with asyncio.timeout(deadline_s):
        while not await condition():
            await asyncio.sleep(0.01)


async def waiting_claims(client):
    return (await client.partition_status("p"))["tasks"]["train"]["waiting"]


async def test_a_put_wakes_a_claim_that_waits(client):
    claim = asyncio.create_task(client.claim_meta("p", "train", ["x"], 2))
    await client.put_samples(["a"], "p", rows(1), [{"v": 1}])
    assert not claim.done()
    await client.put_samples(["b"], "p", rows(1), [{"v": 2}])
    meta = await claim
    assert meta.sample_ids == ["a", "b"] and meta.tags == [{"v": 1}, {"v": 2}]
    assert torch.equal((await client.get_data(meta))["x"], rows(2)["x"])


async def test_a_claim_that_times_out_claims_nothing(client):
    await client.put_samples(["a"], "p", rows(1))
    with pytest.raises(TimeoutError, match="1"):
        await client.claim_meta("p", "train", ["x"], 2, timeout_s=0.02)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await client.claim_meta("p", "train", ["x"], 2)
    await until(lambda: _is_zero(waiting_claims(client)))
    assert (await client.claim_meta("p", "train", ["x"], 1)).sample_ids == ["a"]


async def _is_zero(count):
    return await count == 0


async def test_ten_thousand_claims_wait_on_one_loop_without_a_thread(client):
    count = 10_000
    await client.partition_status("p")
    threads = threading.active_count()
    claims = [asyncio.create_task(client.claim_meta("p", "train", ["x"], 1)) for _ in range(count)]

    async def all_wait():
        return await waiting_claims(client) == count

    await until(all_wait, 120.0)
    assert threading.active_count() <= threads
    for start in range(0, count, 500):
        await client.put_samples([str(i) for i in range(start, start + 500)], "p", rows(500))
    metas = await asyncio.wait_for(asyncio.gather(*claims), 120.0)
    assert sorted(meta.sample_ids[0] for meta in metas) == sorted(map(str, range(count)))


async def test_thousands_of_waiting_claims_are_cancelled_together(client):
    claims = [asyncio.create_task(client.claim_meta("p", "train", ["x"], 1)) for _ in range(3000)]

    async def all_wait():
        return await waiting_claims(client) == 3000

    await until(all_wait, 60.0)
    for claim in claims:
        claim.cancel()
    await asyncio.gather(*claims, return_exceptions=True)
    await until(lambda: _is_zero(waiting_claims(client)))
    await client.put_samples(["a"], "p", rows(1))
    assert (await client.claim_meta("p", "train", ["x"], 1)).sample_ids == ["a"]


async def test_after_a_thousand_cancellations_at_random_moments_the_books_balance(engine):
    """Claims, reads and puts, small and large, some of which wait for room: whatever was cancelled, no claim,
    no place and no lease is left without an owner."""
    luck = random.Random(1)
    # So little room that puts have to wait, and none of it is kept for a next put.
    cfg = config(engine, global_segment_size=16 * LARGE, local_buffer_size=4096)
    async with build(cfg) as client:
        await register(client)
        completed: Counter[str] = Counter()
        sent: set[str] = set()
        claimed: list[str] = []

        async def put(number):
            ids = [f"{number}-{row}" for row in range(luck.randint(1, 3))]
            sent.update(ids)
            width = LARGE if luck.random() < 0.3 else 8192
            await client.put_samples(ids, "p", rows(len(ids), width), timeout_s=20.0)

        async def claim(number):
            claimed.extend((await client.claim_meta("p", "train", ["x"], luck.randint(1, 3))).sample_ids)

        async def get(number):
            known = await client.list_sample_ids("p")
            if known:
                with contextlib.suppress(KeyError):  # cleared meanwhile
                    await client.get_samples(luck.sample(known, min(len(known), 4)), "p", ["x"])

        async def clear(number):
            known = await client.list_sample_ids("p")
            await client.clear_samples(luck.sample(known, len(known) // 2), "p")

        async def interrupted(operation, number):
            task = asyncio.create_task(operation(number))
            if luck.random() < 0.5:
                for _ in range(luck.randint(0, 12)):
                    await asyncio.sleep(0)
            else:
                await asyncio.sleep(luck.random() * 0.004)
            if task.cancel():
                completed["cancelled"] += 1
            try:
                await task
            except asyncio.CancelledError:
                pass
            else:
                completed["in time"] += 1

        number = 0
        while completed["cancelled"] < 1000:
            batch = luck.choices([put, claim, get, clear], [6, 5, 3, 1], k=16)
            await asyncio.gather(*(interrupted(operation, number + i) for i, operation in enumerate(batch)))
            number += len(batch)
        assert completed["cancelled"] >= 1000

        async def is_quiet():
            gc.collect()
            held = await client.service_status()
            status = await client.partition_status("p")
            return held["leases"] == held["reserved"] == 0 and status["tasks"]["train"]["waiting"] == 0

        await until(is_quiet)
        there = await client.list_sample_ids("p")
        assert set(there) <= sent, "nothing was made up"
        left = await client.claim_meta("p", "train", ["x"], 10**6, blocking=False)
        assert not set(left.sample_ids) & set(claimed), "nothing is handed out twice"
        assert set(there) <= {*left.sample_ids, *claimed}, "no claim is held by nobody"
        assert len(claimed) == len(set(claimed))
        if there:
            assert torch.equal(
                (await client.get_samples(there[:1], "p", ["x"]))["x"][0, :SMALL], rows(1)["x"][0]
            )
        await client.clear_samples(there, "p")
        gc.collect()
        await until(lambda: _is_storage_empty(client))


async def _is_storage_empty(client):
    return (await client.partition_status("p"))["bytes"] == 0 and (await client.service_status())["storage"][
        "used"
    ] == 0


async def test_a_put_that_is_cancelled_while_it_waits_for_room_writes_nothing(engine):
    cfg = config(engine, storage_capacity=2)
    async with build(cfg) as client:
        await register(client)
        await client.put_samples(["a", "b"], "p", rows(2))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.put_samples(["c"], "p", rows(1))
        await client.clear_samples(["a", "b"], "p")
        assert await client.list_sample_ids("p") == []
        await client.put_samples(["d", "e"], "p", rows(2), timeout_s=1.0)


async def test_an_append_that_is_cancelled_is_there_whole_or_not_at_all(client):
    """With its tags, so that whoever cancelled it can ask before appending it again."""
    luck = random.Random(2)
    returned = []

    async def append(number):
        turn = TensorDict({"x": torch.full((1, 3), number)}, batch_size=[1])
        await client.append_samples(["a"], "p", turn, [{"turns": number}])
        returned.append(number)

    await append(0)
    for number in range(1, 200):
        task = asyncio.create_task(append(number))
        for _ in range(luck.randint(0, 8)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    turns = (await client.get_samples(["a"], "p", ["x"]))["x"].unbind()[0].view(-1, 3)
    there = turns[:, 0].tolist()
    assert torch.equal(turns, turns[:, :1].expand(-1, 3)), "each turn is whole"
    assert there == sorted(set(there)) and set(returned) <= set(there)
    assert (await client.peek_meta("p")).tags == [{"turns": there[-1]}]


async def test_many_bytes_are_moved_by_a_helper_thread_and_few_on_the_loop(client, monkeypatch):
    storage = (await client._attached()).link.storage
    movers = []
    write = storage.write

    def noted_write(*args):
        movers.append(threading.current_thread().name)
        return write(*args)

    monkeypatch.setattr(storage, "write", noted_write)
    await client.put_samples(["small"], "p", rows(1))
    await client.put_samples(["large"], "p", rows(1, LARGE))
    assert movers[0] == threading.current_thread().name
    assert movers[1].startswith("rlplane-helper")


def slow_column(kind):
    """A column that takes long to encode: it is copied, or has many small parts."""
    tensors = [torch.ones(n % 5 + 1, 1000) for n in range(64)]
    if kind == "nested, strided":
        return torch.nested.as_nested_tensor(tensors, layout=torch.strided)
    if kind == "nested, in another dimension":
        return torch.nested.nested_tensor(tensors, layout=torch.jagged).transpose(1, 2)
    if kind == "a nested TensorDict":
        return TensorDict({"a": torch.ones(64, 3), "b": TensorDict({"c": torch.ones(64)}, [64])}, [64])
    return NonTensorStack(*[{"n": n} for n in range(200)])


@pytest.mark.parametrize(
    "kind", ["nested, strided", "nested, in another dimension", "a nested TensorDict", "objects"]
)
async def test_what_takes_long_to_encode_is_encoded_by_a_helper_thread(client, monkeypatch, kind):
    encoders = []

    def noted_encode(*args, **how):
        encoders.append(threading.current_thread().name)
        return encode_columns(*args, **how)

    monkeypatch.setattr("rlplane.adapters.calls.encode_columns", noted_encode)
    count = 200 if kind == "objects" else 64
    ids = [f"s{row}" for row in range(count)]
    await client.put_samples(ids, "p", TensorDict({"x": slow_column(kind)}, batch_size=[count]))
    await client.put_samples(["small"], "p", rows(1))
    assert encoders[0].startswith("rlplane-helper")
    assert encoders[1] == threading.current_thread().name


async def test_many_rows_are_put_together_by_a_helper_thread_however_small_they_are(client, monkeypatch):
    storage = (await client._attached()).link.storage
    readers = []
    opened = storage.open

    def noted_open(*args):
        readers.append(threading.current_thread().name)
        return opened(*args)

    monkeypatch.setattr(storage, "open", noted_open)
    ids = [f"s{row}" for row in range(200)]
    trees = [NonTensorData({"n": torch.tensor(n)}) for n in range(200)]
    await client.put_samples(ids, "p", TensorDict({"x": NonTensorStack(*trees)}, batch_size=[200]))
    await client.get_samples(ids, "p", ["x"])
    await client.get_samples(ids[:2], "p", ["x"])
    assert readers[0].startswith("rlplane-helper")
    assert readers[1] == threading.current_thread().name


async def test_a_put_that_is_cancelled_during_its_copy_gives_the_place_back_after_it(client, monkeypatch):
    storage = (await client._attached()).link.storage
    begun, go_on = threading.Event(), threading.Event()
    write = storage.write

    def slow_write(*args):
        begun.set()
        assert go_on.wait(20)
        write(*args)

    monkeypatch.setattr(storage, "write", slow_write)
    put = asyncio.create_task(client.put_samples(["a"], "p", rows(1, LARGE)))
    await asyncio.to_thread(begun.wait, 20)
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert (await client.service_status())["reserved"] >= LARGE, "the thread still writes there"
    go_on.set()

    async def is_given_back():
        return (await client.service_status())["reserved"] == 0

    await until(is_given_back)
    assert await client.list_sample_ids("p") == []


async def test_a_flow_is_claimed_batch_by_batch_until_it_is_drained(client):
    await client.register_partition("flow", ["x"], 10, ["train"])

    async def produce():
        for start in range(0, 10, 2):
            await client.put_samples([f"{start}", f"{start + 1}"], "flow", rows(2))
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        group.create_task(produce())
        sizes = [meta.size async for meta in client.claims("flow", "train", ["x"], 4, timeout_s=20.0)]
    assert sizes == [4, 4, 2]


async def test_a_flow_from_which_nothing_comes_times_out(client):
    with pytest.raises(TimeoutError):
        await anext(client.claims("p", "train", ["x"], 1, timeout_s=0.1))


async def test_closing_ends_the_calls_that_wait_and_leaves_no_claim(engine):
    cfg = config(engine)
    async with build(cfg) as client:
        await register(client)
        joined = cfg if engine == "memory" else {**cfg, "controller_address": client.controller_address}
        worker = build(joined, bootstrap=False)
        claims = [asyncio.create_task(worker.claim_meta("p", "train", ["x"], 1)) for _ in range(20)]

        async def all_wait():
            return await waiting_claims(client) == 20

        await until(all_wait)
        await asyncio.gather(worker.close(), client.put_samples(["a", "b"], "p", rows(2)))
        answers = await asyncio.gather(*claims, return_exceptions=True)
        got = [answer for answer in answers if not isinstance(answer, BaseException)]
        assert {type(answer) for answer in answers} <= {ClientClosedError, rlplane.KVBatchMeta}
        await worker.close()
        with pytest.raises(ClientClosedError):
            await worker.list_sample_ids("p")
        left = await client.claim_meta("p", "train", ["x"], 2, blocking=False)
        assert sorted([*left.sample_ids, *(i for meta in got for i in meta.sample_ids)]) == ["a", "b"]


async def all_wait_and_the_service_dies(client, claims):
    async def all_wait():
        return await waiting_claims(client) == len(claims)

    await until(all_wait)
    os.kill((await client.service_status())["pid"], signal.SIGKILL)


async def test_calls_that_wait_go_on_when_the_service_has_died_and_come_back():
    async with build(config("shm")) as client:
        await register(client)
        claims = [asyncio.create_task(client.claim_meta("p", "train", ["x"], 1)) for _ in range(100)]
        for claim in claims[50:]:
            claim.cancel()
        await all_wait_and_the_service_dies(client, claims[:50])
        ids = [str(number) for number in range(50)]
        await client.put_samples(ids, "p", rows(50))
        metas = await asyncio.wait_for(asyncio.gather(*claims[:50]), 60.0)
        assert sorted(i for meta in metas for i in meta.sample_ids) == sorted(ids)
        assert await waiting_claims(client) == 0
        assert (await client.claim_meta("p", "train", ["x"], 1, blocking=False)).size == 0


async def test_the_death_of_the_service_for_good_ends_every_call_that_waits():
    client = build(config("shm", reconnect_timeout_s=0))
    await register(client)
    claims = [asyncio.create_task(client.claim_meta("p", "train", ["x"], 1)) for _ in range(100)]
    await all_wait_and_the_service_dies(client, claims)
    errors = await asyncio.wait_for(asyncio.gather(*claims, return_exceptions=True), 60.0)
    assert {type(error) for error in errors} == {PlaneConnectionError}
    with pytest.raises(PlaneConnectionError):
        await client.partition_status("p")
    await client.close()


async def test_a_bootstrap_client_that_ends_the_plane_ends_the_calls_of_others(engine):
    cfg = config(engine)
    client = build(cfg)
    await register(client)
    joined = cfg if engine == "memory" else {**cfg, "controller_address": client.controller_address}
    async with build(joined, bootstrap=False) as worker:
        claim = asyncio.create_task(worker.claim_meta("p", "train", ["x"], 1))
        await until(lambda: _is_one(waiting_claims(client)))
        await client.close()
        with pytest.raises(PlaneConnectionError):
            await asyncio.wait_for(claim, 20.0)


async def _is_one(count):
    return await count == 1


async def test_a_plane_that_is_not_there_is_an_error_of_the_first_call():
    worker = build(config("memory"), bootstrap=False)
    for _ in range(2):
        with pytest.raises(PlaneConnectionError, match="no plane named"):
            await worker.list_sample_ids("p")
    await worker.close()


async def test_a_first_call_that_is_cancelled_leaves_the_client_usable(engine):
    client = build(config(engine))
    first = asyncio.create_task(register(client))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await register(client)
    await client.close()


def test_one_loop_after_the_other_can_use_a_client_but_not_two_at_once(engine):
    client = build(config(engine))

    async def leave_a_claim_waiting():
        await register(client)
        claim = asyncio.create_task(client.claim_meta("p", "train", ["x"], 1))
        await until(lambda: _is_one(waiting_claims(client)))
        return claim

    async def use():
        await until(lambda: _is_zero(waiting_claims(client)))
        await client.put_samples(["a"], "p", rows(1))
        meta = await client.claim_meta("p", "train", ["x"], 1, timeout_s=5.0)

        async def elsewhere():
            with pytest.raises(InvalidRequestError, match="another event loop"):
                await client.list_sample_ids("p")

        await asyncio.to_thread(asyncio.run, elsewhere())
        await client.close()
        return meta.sample_ids

    asyncio.run(leave_a_claim_waiting())
    assert asyncio.run(use()) == ["a"]


def _in_child(client, queue):
    async def main():
        await client.put_samples(["child"], "p", rows(1))
        queue.put(await client.list_sample_ids("p"))
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("start", ["fork", "spawn"])
async def test_a_child_process_uses_the_plane_of_its_parent(start):
    async with build(config("shm")) as client:
        await register(client)
        await client.put_samples(["parent"], "p", rows(1))
        processes = multiprocessing.get_context(start)
        queue = processes.Queue()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of later Pythons: a fork with threads
            child = processes.Process(target=_in_child, args=(client, queue))
            child.start()
        assert await asyncio.to_thread(queue.get, True, 60) == ["parent", "child"]
        await asyncio.to_thread(child.join, 60)
        meta = await client.claim_meta("p", "train", ["x"], 2, timeout_s=5.0)
        assert meta.sample_ids == ["parent", "child"]


async def test_a_client_that_has_no_plane_yet_cannot_be_pickled():
    with pytest.raises(InvalidRequestError, match="call it once"):
        pickle.dumps(build(config("shm")))


async def test_an_undeclared_field_is_warned_of_where_it_is_put(client):
    fields = TensorDict({"y": torch.ones(1)}, batch_size=[1])
    with pytest.warns(UserWarning, match="not declared") as warned:
        await client.put_samples(["a"], "p", fields)
    assert warned[0].filename == __file__


async def test_checkpoints_go_from_the_asyncio_client_to_the_blocking_one(client, tmp_path):
    await client.put_samples(["a"], "p", rows(1))
    await client.save_checkpoint(str(tmp_path / "c"), metadata={"step": 3})
    with rlplane.build_data_plane_client(config("memory")) as other:
        assert other.load_checkpoint(str(tmp_path / "c")) == {"step": 3}
        assert other.list_sample_ids("p") == ["a"]
    await client.clear_samples(["a"], "p")
    assert await client.load_checkpoint(str(tmp_path / "c")) == {"step": 3}
    assert await client.list_sample_ids("p") == ["a"]


def test_it_runs_under_anyio(engine):
    import anyio

    async def main():
        async with build(config(engine)) as client:
            await register(client)
            with anyio.move_on_after(0.05) as scope:
                await client.claim_meta("p", "train", ["x"], 1)
            assert scope.cancelled_caught
            got = []

            async def claim():
                got.append(await client.claim_meta("p", "train", ["x"], 1))

            async with anyio.create_task_group() as group:
                for _ in range(8):
                    group.start_soon(claim)
                await client.put_samples([str(i) for i in range(8)], "p", rows(8))
            assert sorted(meta.sample_ids[0] for meta in got) == list("01234567")

    anyio.run(main, backend="asyncio")


def test_it_runs_under_uvloop(engine):
    import uvloop

    async def main():
        async with build(config(engine)) as client:
            await register(client)
            claims = [asyncio.create_task(client.claim_meta("p", "train", ["x"], 1)) for _ in range(200)]

            async def all_wait():
                return await waiting_claims(client) == 200

            await until(all_wait)
            for claim in claims[:100]:
                claim.cancel()
            await asyncio.gather(*claims[:100], return_exceptions=True)
            await client.put_samples([str(i) for i in range(100)], "p", rows(100))
            metas = await asyncio.gather(*claims[100:])
            assert sorted(int(meta.sample_ids[0]) for meta in metas) == list(range(100))
            await client.put_samples(["large"], "p", rows(1, LARGE))
            assert torch.equal((await client.get_samples(["large"], "p", ["x"]))["x"], rows(1, LARGE)["x"])

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_the_blocking_client_warns_once_when_it_waits_in_an_event_loop():
    with rlplane.build_data_plane_client(config("memory", storage_capacity=1)) as client:
        client.register_partition("p", ["x"], 10, ["train"])
        await asyncio.to_thread(client.put_samples, ["a"], "p", rows(1))
        with pytest.warns(
            RuntimeWarning, match="claim_meta waits in a thread that runs an event loop"
        ) as seen:
            client.claim_meta("p", "train", ["x"], 1)
        assert len(seen) == 1 and seen[0].filename == __file__
        with pytest.raises(TimeoutError):
            client.claim_meta("p", "train", ["x"], 1, timeout_s=0.01)
    with rlplane.build_data_plane_client(config("memory", storage_capacity=1)) as client:
        client.register_partition("p", ["x"], 10, ["train"])
        await asyncio.to_thread(client.put_samples, ["a"], "p", rows(1))
        with pytest.warns(RuntimeWarning, match="put_samples waits"), pytest.raises(TimeoutError):
            client.put_samples(["b"], "p", rows(1), timeout_s=0.1)
        with pytest.raises(TimeoutError):
            client.put_samples(["b"], "p", rows(1), timeout_s=0.1)


async def test_a_repr_names_the_engine(client):
    assert isinstance(client, AsyncPlaneClient) and "DataPlaneClient(" in repr(client)


async def test_an_adapter_that_is_not_made_of_steps_has_no_asyncio_client():
    cfg = {**config("memory"), "observability": {"enabled": True}}  # any client that is not an engine's own
    client = AsyncPlaneClient(lambda: rlplane.build_data_plane_client(cfg))
    with pytest.raises(NotImplementedError, match="MetricsDataPlaneClient"):
        await client.list_sample_ids("p")
    await client.close()
