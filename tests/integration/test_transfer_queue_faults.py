"""What is left of a cluster plane when a part of it dies: errors in time, and never wrong data."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from tensordict import TensorDict
from tests.warm_workers import run_warm

from rlplane.adapters.transfer_queue import TQDataPlaneClient
from rlplane.errors import MissingDataError, PlaneConnectionError
from rlplane.service import protocol as wire
from rlplane.storage.chunks import Chunk, ChunksLostError, chunk_keys
from rlplane.storage.keyed import CHUNK_BYTES
from rlplane.storage.places import Located, Place

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rows(ids, start=0.0):
    return TensorDict({"x": torch.arange(len(ids), dtype=torch.float32) + start}, batch_size=[len(ids)])


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def kill_listener(actor):
    """Kill the process of one of TransferQueue's actors at once; Ray's own kill takes its time."""
    ports = ray.get(actor.get_zmq_server_info.remote()).ports.values()
    found = psutil.net_connections("tcp")
    pids = {c.pid for c in found if c.status == psutil.CONN_LISTEN and c.laddr.port in ports}
    assert len(pids) == 1
    psutil.Process(pids.pop()).kill()


def kill_unit(client, rank):
    unit = client._plane.units[rank]
    if client._plane.backend == "simple":
        kill_listener(unit)
    else:
        os.kill(ray.get(unit.pid.remote()), signal.SIGKILL)


def lost_samples(client, ids):
    lost = {}
    for sample_id in ids:
        try:
            client.get_samples([sample_id], "p", ["x"])
        except PlaneConnectionError as error:
            lost[sample_id] = str(error)
    assert all(repr(sample_id) in message for sample_id, message in lost.items())
    return set(lost)


@pytest.mark.parametrize("backend", ["simple", "mooncake_cpu"])
def test_what_a_killed_storage_unit_held_is_reported_as_lost(start_plane, backend):
    client = start_plane(backend, num_storage_units=2, ack_timeout_ms=20_000)
    client.register_partition("p", ["x"], 100, ["train"])
    ids = [f"s{i}" for i in range(16)]
    for place, sample_id in enumerate(ids):
        client.put_samples([sample_id], "p", rows([sample_id], start=place))
    kill_unit(client, 0)
    lost = lost_samples(client, ids)
    assert 0 < len(lost) < len(ids)
    with pytest.raises(PlaneConnectionError, match=f"{len(lost)} of the {len(ids)} samples"):
        client.get_samples(ids, "p", ["x"])
    kept = [sample_id for sample_id in ids if sample_id not in lost]
    got = client.get_samples(kept, "p", ["x"])["x"]
    assert got.tolist() == [float(ids.index(sample_id)) for sample_id in kept]
    # What was lost is told, and is not handed out.
    assert client.list_sample_ids("p") == kept
    assert client.claim_meta("p", "train", ["x"], len(ids), blocking=False).sample_ids == kept
    told = client.evicted_meta("p")
    assert set(told.sample_ids) == lost and {tags["evicted"] for tags in told.tags} == {"lost"}
    assert client.service_status()["lost_samples"] == len(lost)
    # Its prompts are issued again: what is written now goes where it can be read.
    for place, sample_id in enumerate(told.sample_ids):
        client.put_samples([sample_id], "p", rows([sample_id], start=100 + place))
    again = client.claim_meta("p", "train", ["x"], len(lost))
    assert client.get_data(again)["x"].tolist() == [100.0 + place for place in range(len(lost))]


@pytest.mark.parametrize("backend", ["simple", "mooncake_cpu"])
def test_a_storage_unit_that_dies_is_noticed_although_nobody_reads_or_writes(start_plane, backend):
    client = start_plane(backend, num_storage_units=2)
    client.register_partition("p", ["x"], 100, ["train"])
    client.register_partition("kept", ["x"], 100, ["train"], flow={"on_lost": "keep"})
    ids = [f"s{i}" for i in range(16)]
    for partition in ("p", "kept"):
        for place, sample_id in enumerate(ids):
            client.put_samples([sample_id], partition, rows([sample_id], start=place))
    kill_unit(client, 1)
    # Mooncake's master itself needs 30 s to notice.
    until(lambda: client.service_status()["lost_samples"], 240)
    claimed = client.claim_meta("p", "train", ["x"], len(ids), blocking=False)
    assert 0 < claimed.size < len(ids)
    assert client.get_data(claimed)["x"].tolist() == [float(ids.index(i)) for i in claimed.sample_ids]
    assert sorted([*claimed.sample_ids, *client.evicted_meta("p").sample_ids]) == sorted(ids)
    claimed = client.claim_meta("kept", "train", ["x"], len(ids), blocking=False)
    assert client.get_data(claimed)["x"].tolist() == [float(ids.index(i)) for i in claimed.sample_ids]
    assert client.list_sample_ids("kept") == ids
    assert client.partition_status("kept")["fields"]["x"]["lost"] == len(ids) - claimed.size


@pytest.mark.parametrize("backend", ["simple", "mooncake_cpu"])
def test_puts_whose_storage_unit_dies_under_them_succeed(start_plane, backend):
    client = start_plane(backend, num_storage_units=2)
    client.register_partition("p", ["x"], 10**6, ["train"])
    written: list[str] = []

    def produce():
        while len(written) < 60:
            number = len(written)
            x = torch.full((1, 2 * CHUNK_BYTES), number, dtype=torch.uint8)
            fields = TensorDict({"x": x}, batch_size=[1])
            client.put_samples([f"s{number}"], "p", fields, timeout_s=240)
            written.append(f"s{number}")
            time.sleep(0.05)

    with ThreadPoolExecutor(1) as threads:
        producing = threads.submit(produce)
        until(lambda: len(written) > 10 or producing.done())
        kill_unit(client, 0)
        before = len(written) + 1  # one may be under way
        producing.result(400)
    # All that was written after the death is there; what was written before has lost its half of the chunks.
    late = written[before + 5 :]
    assert late
    if backend == "simple":
        assert client.get_samples(late, "p", ["x"])["x"][:, 0].tolist() == [int(i[1:]) for i in late]
        assert client.service_status()["dead_units"] == [0]
        left = client.list_sample_ids("p")
        assert client.get_samples(left, "p", ["x"])["x"][:, 0].tolist() == [int(i[1:]) for i in left]
        assert sorted([*left, *client.evicted_meta("p").sample_ids]) == sorted(written)
        # A service that is started again still knows which unit is dead.
        os.kill(client.service_status()["pid"], signal.SIGKILL)
        x = torch.full((1, 4 * CHUNK_BYTES), 7, dtype=torch.uint8)
        after = TensorDict({"x": x}, batch_size=[1])
        client.put_samples(["after"], "p", after, timeout_s=240)
        assert client.service_status()["dead_units"] == [0]
        assert client.get_samples(["after", left[-1]], "p", ["x"])["x"].is_nested


@pytest.mark.parametrize("backend", ["simple", "mooncake_cpu"])
def test_a_dead_controller_of_transferqueue_harms_nobody(start_plane, backend, tmp_path):
    client = start_plane(backend, ack_timeout_ms=15_000)
    client.register_partition("p", ["x"], 100, ["train"])
    client.put_samples(["a"], "p", rows(["a"]))
    kill_listener(ray.get_actor("TransferQueueController", namespace=client._plane.namespace))
    ids = [f"s{i}" for i in range(4)]
    client.put_samples(ids, "p", rows(ids, start=1))
    with contextlib.closing(TQDataPlaneClient(client._cfg, bootstrap=False)) as late:
        meta = late.claim_meta("p", "train", ["x"], 5)
        assert meta.sample_ids == ["a", *ids]
        assert late.get_data(meta)["x"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        late.clear_samples(["a", *ids[:2]], "p")
    with contextlib.closing(TQDataPlaneClient(client._cfg)) as second:
        assert second.list_sample_ids("p") == ids[2:]
    client.save_checkpoint(str(tmp_path / "one"))
    client.clear_samples(ids, "p")
    client.load_checkpoint(str(tmp_path / "one"))
    assert client.get_samples(ids[2:], "p", ["x"])["x"].tolist() == [3.0, 4.0]


def every_call(client):
    return [
        lambda: client.claim_meta("p", "train", ["x"], 4, timeout_s=0.1),
        lambda: client.claim_meta("p", "train", ["x"], 4, blocking=False),
        lambda: client.put_samples(["b"], "p", rows(["b"]), timeout_s=0.1),
        lambda: client.get_samples(["a"], "p", ["x"]),
        lambda: client.clear_samples(["a"], "p"),
        lambda: client.list_sample_ids("p"),
        lambda: client.partition_status("p"),
        lambda: client.register_partition("q", ["x"], 4, ["train"]),
    ]


def test_without_reconnecting_a_dead_control_service_is_an_error_in_time_for_every_call(start_plane):
    ack_timeout_s = 15
    client = start_plane("simple", ack_timeout_ms=1000 * ack_timeout_s, reconnect_timeout_s=0)
    client.register_partition("p", ["x"], 100, ["train"])
    client.put_samples(["a"], "p", rows(["a"]))
    pid = ray.get(client._plane.actor.pid.remote())
    with ThreadPoolExecutor(16) as threads:
        waiting = threads.submit(client.claim_meta, "p", "train", ["x"], 4, timeout_s=3600)
        until(lambda: client.partition_status("p")["tasks"]["train"]["waiting"])
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PlaneConnectionError, match="ended or died"):
            waiting.result(ack_timeout_s)
        for made in [threads.submit(call) for call in every_call(client)]:
            with pytest.raises(PlaneConnectionError, match="ended or died"):
                made.result(ack_timeout_s)


def test_a_control_service_that_has_stopped_is_an_error_in_time_and_comes_back(start_plane):
    client = start_plane("simple", ack_timeout_ms=2000)
    client.register_partition("p", ["x"], 100, ["train"])
    client.put_samples(["a"], "p", rows(["a"]))
    pid = ray.get(client._plane.actor.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(16) as threads:
            for made in [threads.submit(call) for call in every_call(client)]:
                with pytest.raises(PlaneConnectionError, match="has not answered for"):
                    made.result(60)
    finally:
        os.kill(pid, signal.SIGCONT)
    client.put_samples(["c"], "p", rows(["c"], start=5))
    assert client.get_samples(["c"], "p", ["x"])["x"].tolist() == [5.0]


class Worker:
    """Produces, consumes and clears. Told to hang, it stops after a claim and never writes."""

    def __init__(self, client):
        self.client = client
        self.claimed = []

    def pid(self):
        return os.getpid()

    def claimed_ids(self):
        return self.claimed

    def produce(self, partition, count):
        for number in range(count):
            ids = [f"{number}-{row}" for row in range(4)]
            self.client.put_samples(ids, partition, rows(ids, start=number))

    def consume(self, partition, *, hang=False):
        done = []
        while not self.client.check_consumption_status(partition, ["work"]) or hang:
            meta = self.client.claim_meta(partition, "work", ["x"], 4, blocking=False)
            if not meta.size:
                time.sleep(0.005)
                continue
            self.claimed = meta.sample_ids
            if hang:
                time.sleep(3600)
            x = self.client.get_data(meta)["x"]
            self.client.put_samples(
                meta.sample_ids, partition, TensorDict({"y": x * 2}, batch_size=[meta.size])
            )
            done.extend(meta.sample_ids)
        return done

    def clear(self, ids, partition):
        self.client.clear_samples(ids, partition)


def test_actors_work_together_and_the_work_of_those_that_are_killed_is_done_by_others(cluster):
    client = cluster.client()
    partition = f"together-{cluster.backend}"
    client.register_partition(partition, ["x", "y"], 80, ["work"])
    worker = ray.remote(Worker).options(num_cpus=0, max_concurrency=2)
    hung, cut, producer, consumer = (worker.remote(client) for _ in range(4))
    pid = ray.get(cut.pid.remote())
    for actor in (hung, cut):
        actor.consume.remote(partition, hang=True)
    written = producer.produce.remote(partition, 20)
    taken = []
    for actor in (hung, cut):
        until(lambda actor=actor: ray.get(actor.claimed_ids.remote()))
        taken += ray.get(actor.claimed_ids.remote())
    assert len(set(taken)) == 8
    ray.kill(hung)
    os.kill(pid, signal.SIGKILL)

    done = [actor.consume.remote(partition) for actor in (producer, consumer)]
    ray.get(written)
    finished = [sample_id for part in ray.get(done, timeout=240) for sample_id in part]
    # They may have seen everything claimed while the claims of the dead were still theirs.
    until(lambda: _returned(client, partition, taken, finished))
    assert sorted(finished) == sorted(client.list_sample_ids(partition))
    assert len(finished) == len(set(finished)) == 80
    got = client.get_samples(finished, partition, ["x", "y"])
    assert torch.equal(got["y"], 2 * got["x"])

    clears = [
        producer.clear.remote(finished[::2], partition),
        consumer.clear.remote(finished[1::2], partition),
    ]
    ray.get(clears)
    assert client.list_sample_ids(partition) == []
    ray.kill(producer)
    ray.kill(consumer)
    client.close()


def _returned(client, partition, taken, finished):
    """Finish what came back from the dead after the others had stopped; True when all of it is done."""
    meta = client.claim_meta(partition, "work", ["x"], 80, blocking=False)
    if meta.size:
        x = client.get_data(meta)["x"]
        client.put_samples(meta.sample_ids, partition, TensorDict({"y": x * 2}, batch_size=[meta.size]))
        finished.extend(meta.sample_ids)
    return set(taken) <= set(finished)


class DyingWriter:
    """Stores the bytes of a write and dies before it commits. What it stored under is left in a file."""

    def __init__(self, client):
        self.client = client

    def write(self, partition, note):
        connection = self.client._link().connection
        exchange = connection.exchange

        def die(request, **how):
            if isinstance(request, wire.Commit):
                Path(note).write_text(str(request.place))
                os.kill(os.getpid(), signal.SIGKILL)
            return exchange(request, **how)

        connection.exchange = die
        ids = ["dead-0", "dead-1"]
        fields = TensorDict({"x": torch.zeros(2, CHUNK_BYTES)}, batch_size=[2])
        self.client.put_samples(ids, partition, fields, [{"v": 1}, {"v": 2}])


def stored_keys(client, keys):
    """Which of these keys the store has a value for."""
    store = client._link().storage._store
    found = set()
    for key in keys:
        with contextlib.suppress(ChunksLostError):
            store.get([Chunk(key, 0, CHUNK_BYTES)], torch.empty(CHUNK_BYTES, dtype=torch.uint8))
            found.add(key)
    return found


def values_in_units(client):
    """How many values the storage units of a plane say that they hold."""
    units = client._link().storage._store
    bodies: dict[int, dict[str, Any]] = {rank: {} for rank in range(len(client._plane.units))}
    answers = units._exchange("GET_METRICS", bodies, "METRICS_RESPONSE", 0)
    return sum(body["active_keys"] for body in answers.values())


@pytest.mark.parametrize("backend", ["simple", "mooncake_cpu"])
def test_a_writer_that_dies_before_it_is_done_leaves_nothing_behind(start_plane, backend, tmp_path):
    client = start_plane(backend, num_storage_units=2)
    client.register_partition("p", ["x"], 4, ["train"])
    chunks = TensorDict({"x": torch.zeros(1, 2 * CHUNK_BYTES)}, batch_size=[1])
    client.put_samples(["alive"], "p", chunks)
    link = client._link()
    located = link.request(wire.Locate("p", ["alive"], ["x"]), Located)
    alive = set(chunk_keys(located.places[0]))
    link.connection.release(located.lease)
    until(lambda: client.service_status()["leases"] == 0)
    before = client.service_status()
    held = values_in_units(client) if backend == "simple" else 0
    assert backend != "simple" or held == len(alive) == 8

    writer = ray.remote(DyingWriter).options(num_cpus=0).remote(client)
    note = tmp_path / "place"
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(writer.write.remote("p", str(note)))
    written = set(chunk_keys(Place(int(note.read_text()), 8 * CHUNK_BYTES)))
    assert len(written) == 8 and not written & alive
    assert client.list_sample_ids("p") == ["alive"]
    with pytest.raises(MissingDataError):
        client.get_samples(["dead-0"], "p", ["x"])

    def as_before():
        now = client.service_status()
        return all(now[name] == before[name] for name in ("clients", "leases", "reserved", "storage"))

    until(as_before)
    assert stored_keys(client, written) == set()
    assert stored_keys(client, alive) == alive
    if backend == "simple":
        assert values_in_units(client) == held
    client.clear_samples(["alive"], "p")
    until(lambda: client.service_status()["storage"]["used"] == client.service_status()["reserved"])
    assert stored_keys(client, alive) == set()
    if backend == "simple":
        assert values_in_units(client) == 0


class Sharer:
    """Uses a client that it was given, as a copy of its own."""

    def __init__(self, client):
        self.client = client

    def write(self, partition):
        assert self.client.put_samples(["b"], partition, rows(["b"], start=7)).size == 1
        return self.client.get_samples(["a"], partition, ["x"])["x"].tolist()

    def close(self):
        self.client.close()


def test_a_client_pickles_into_an_actor_and_its_close_there_leaves_the_plane_up(cluster):
    client = cluster.client()
    partition = f"pickled-{cluster.backend}"
    client.register_partition(partition, ["x"], 4, ["train"])
    client.put_samples(["a"], partition, rows(["a"], start=3))
    actor = ray.remote(Sharer).options(num_cpus=0).remote(client)
    assert ray.get(actor.write.remote(partition)) == [3.0]
    ray.get(actor.close.remote())
    assert client.get_samples(["b"], partition, ["x"])["x"].tolist() == [7.0]
    with contextlib.closing(TQDataPlaneClient(client._cfg, bootstrap=False)) as worker:
        assert worker.list_sample_ids(partition) == ["a", "b"]
    client.close()
    ray.kill(actor)


LOSE_THE_MASTER = """
import json, os, signal, sys
import ray, torch
from tensordict import TensorDict
from rlplane.config import load_config
from rlplane.errors import PlaneConnectionError
from rlplane.factory import build_data_plane_client

client = build_data_plane_client(load_config("cluster-mooncake", json.loads(sys.argv[1])))
client.register_partition("p", ["x"], 4, ["t"])
one = TensorDict({"x": torch.ones(1)}, batch_size=[1])
client.put_samples(["a"], "p", one)
os.kill(ray.get(client._plane.master.pid.remote()), signal.SIGKILL)
for call in (
    lambda: client.put_samples(["b"], "p", one),
    lambda: client.get_samples(["a"], "p", ["x"]),
):
    try:
        call()
    except PlaneConnectionError as error:
        assert "mooncake_master has died" in str(error), error
        print("lost", flush=True)
assert client.list_sample_ids("p") == ["a"]
client.close()
print("closed", flush=True)
"""


def test_a_dead_mooncake_master_is_an_error_in_time_and_its_clients_can_end(ray_cluster):
    config = {
        "controller_address": ray_cluster,
        "transfer_queue.node_ip": "127.0.0.2",
        "transfer_queue.namespace": "without-a-master",
        "num_storage_units": 1,
        "global_segment_size": 64 << 20,
        "local_buffer_size": 4 << 20,
        "ack_timeout_ms": 5000,
    }
    done = run_warm(
        [sys.executable, "-c", LOSE_THE_MASTER, json.dumps(config)],
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # A value whose place this client knows already may still be read, from the unit that has it.
    assert done.stdout.split() in (["lost", "lost", "closed"], ["lost", "closed"])
