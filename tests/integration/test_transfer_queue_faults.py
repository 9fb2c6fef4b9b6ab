"""What is left of a cluster plane when a part of it dies: errors in time, and never wrong data."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import psutil
import pytest
import ray
import torch
from tensordict import TensorDict

from rlplane.adapters.transfer_queue import TQDataPlaneClient
from rlplane.errors import MissingDataError, PlaneConnectionError

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
    if backend == "simple":
        kill_listener(client._plane.units[0])
    else:
        os.kill(ray.get(client._plane.units[0].pid.remote()), signal.SIGKILL)
    lost = lost_samples(client, ids)
    assert 0 < len(lost) < len(ids)
    with pytest.raises(PlaneConnectionError, match=f"{len(lost)} of the {len(ids)} samples"):
        client.get_samples(ids, "p", ["x"])
    kept = [sample_id for sample_id in ids if sample_id not in lost]
    got = client.get_samples(kept, "p", ["x"])["x"]
    assert got.tolist() == [float(ids.index(sample_id)) for sample_id in kept]
    # The control state lives on: what is known about the samples is still there.
    assert client.list_sample_ids("p") == ids


def test_a_dead_controller_is_an_error_in_time_and_so_is_a_dead_control_actor(start_plane):
    client = start_plane("simple", ack_timeout_ms=15_000)
    client.register_partition("p", ["x"], 100, ["train"])
    client.put_samples(["a"], "p", rows(["a"]))
    kill_listener(client._plane.controller)
    with pytest.raises(PlaneConnectionError, match="controller has died"):
        client.put_samples([f"s{i}" for i in range(4)], "p", rows(range(4)))
    assert client.list_sample_ids("p") == ["a"], "a write that failed is not visible"
    assert client.get_samples(["a"], "p", ["x"])["x"].tolist() == [0.0]

    os.kill(ray.get(client._plane.control.pid.remote()), signal.SIGKILL)
    calls = {
        "claim": lambda: client.claim_meta("p", "train", ["x"], 4, timeout_s=30),
        "put": lambda: client.put_samples(["b"], "p", rows(["b"])),
        "get": lambda: client.get_samples(["a"], "p", ["x"]),
        "clear": lambda: client.clear_samples(["a"], "p"),
        "status": lambda: client.partition_status("p"),
    }
    for call in calls.values():
        with pytest.raises(PlaneConnectionError, match="gone"):
            call()


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
    """Stores the bytes of a write and dies before it commits."""

    def __init__(self, client):
        self.client = client

    def write(self, partition):
        ask = self.client._ask

        def die(method, *args):
            if method == "commit":
                os.kill(os.getpid(), signal.SIGKILL)
            return ask(method, *args)

        self.client._ask = die
        ids = ["dead-0", "dead-1"]
        self.client.put_samples(ids, partition, rows(ids), [{"v": 1}, {"v": 2}])


def test_a_writer_that_dies_before_it_is_done_leaves_nothing_behind(cluster):
    client = cluster.client()
    partition = f"dying-{cluster.backend}"
    client.register_partition(partition, ["x"], 4, ["train"])
    client.put_samples(["alive"], partition, rows(["alive"]))
    writer = ray.remote(DyingWriter).options(num_cpus=0).remote(client)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(writer.write.remote(partition))
    assert client.list_sample_ids(partition) == ["alive"]
    with pytest.raises(MissingDataError):
        client.get_samples(["dead-0"], partition, ["x"])
    control = client._plane.control
    # Its rows are given back: TransferQueue has as many produced rows as there are visible writes.
    until(lambda: ray.get(control.open_writes.remote()) == 0)
    assert ray.get(control.drain.remote()) == 0
    client.clear_samples(["alive"], partition)
    assert ray.get(control.drain.remote()) == 0
    snapshot = ray.get(client._plane.controller.get_partition_snapshot.remote(partition))
    assert not snapshot.production_status.any(), "TransferQueue still has rows that nobody refers to"
    client.close()


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
