"""What the processes of the shared-memory tests do. Each function is the whole life of one process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from unittest import mock

import torch
from tensordict import TensorDict

from rlplane.adapters.local.shm import ShmDataPlaneClient
from rlplane.config import load_config
from rlplane.factory import build_data_plane_client
from rlplane.service import protocol as wire
from rlplane.service.connection import SocketConnection
from rlplane.storage import copying, layout
from rlplane.storage.shm.mapping import Segments

# Processes start from a server that has torch loaded already, so that a test can have dozens.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.integration.shm_workers"])

FIELDS = ["a", "b", "c"]


def connect(address, **config):
    return build_data_plane_client(
        load_config("shm", {"controller_address": address, **config}), bootstrap=False
    )


def start(target, *args):
    process = context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def kill(process):
    process.kill()
    process.join(120)


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def batch(ids, width=300):
    """Rows whose content follows from the id, so that any reader can tell whether they are whole."""
    seeds = torch.tensor([hash_of(sample_id) for sample_id in ids])
    rows = seeds[:, None] + torch.arange(width)
    ragged = torch.nested.nested_tensor([row[: 1 + int(row[0]) % width] for row in rows], layout=torch.jagged)
    return TensorDict({"a": seeds, "b": rows, "c": ragged}, batch_size=[len(ids)])


def hash_of(sample_id):
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(sample_id)) % 10_007


def is_whole(ids, data, width=300):
    wanted = batch(ids, width)
    return (
        torch.equal(data["a"], wanted["a"])
        and torch.equal(data["b"], wanted["b"])
        and all(torch.equal(x, y) for x, y in zip(data["c"].unbind(), wanted["c"].unbind(), strict=True))
    )


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_before(kind):
    """Be killed instead of sending a request of this kind."""
    exchange = SocketConnection.exchange

    def dying(self, request, **waits):
        if isinstance(request, kind):
            _die()
        return exchange(self, request, **waits)

    mock.patch.object(SocketConnection, "exchange", dying).start()


def die_while_putting(address, step, ids):
    """Put ``ids``, and be killed at ``step``."""
    plane = connect(address)
    if step == "before the memory is reserved":
        die_before(wire.Reserve)
    elif step == "before the pages exist":
        mock.patch.object(Segments, "back", side_effect=lambda *_: _die()).start()
    elif step == "in the middle of the copy":
        copy_all = copying.copy_all

        def die_half_way(copies):
            copy_all(copies[: len(copies) // 2])
            _die()

        mock.patch.object(layout, "copy_all", die_half_way).start()
    elif step == "before the commit is sent":
        die_before(wire.Commit)
    plane.put_samples(ids, "flow", batch(ids))


def die_after_the_commit(address, ids):
    """Put ``ids`` and be killed before the answer is read, with the commit certainly sent."""
    plane = connect(address)
    plane.put_samples([], "flow")  # so that it knows the partition
    receive = SocketConnection._receive

    def dying(self, channel, number, waits_s):
        answer = receive(self, channel, number, waits_s)
        if not isinstance(answer, wire.Reserved):
            _die()
        return answer

    mock.patch.object(SocketConnection, "_receive", dying).start()
    plane.put_samples(ids, "flow", batch(ids))


def claim_and_wait(address, ready, count, then=None):
    """Claim, say what was claimed, optionally write a field, and wait to be killed."""
    plane = connect(address)
    meta = plane.claim_meta("flow", "train", ["a"], count)
    if then == "write":
        half = meta.sample_ids[: count // 2]
        plane.put_samples(half, "flow", TensorDict({"done": torch.ones(len(half))}, batch_size=[len(half)]))
    ready.put(meta.sample_ids)
    time.sleep(600)


def claim_in_one_thread_and_write_in_another(address, ready):
    plane = connect(address)
    meta = plane.claim_meta("flow", "train", ["a"], 8)
    writer = threading.Thread(
        target=plane.put_samples, args=(meta.sample_ids, "flow", batch(meta.sample_ids))
    )
    writer.start()
    writer.join()
    ready.put(meta.sample_ids)
    time.sleep(600)


def read_and_hold(address, ready, ids):
    plane = connect(address)
    data = plane.get_samples(ids, "flow", ["b"])
    ready.put(int(data["b"].sum()))
    time.sleep(600)


def wait_in_a_claim(address, ready):
    plane = connect(address)
    ready.put(True)
    try:
        plane.claim_meta("flow", "train", ["a"], 64, timeout_s=600)
        ready.put("claimed")
    except BaseException as error:
        ready.put(type(error).__mro__)


def list_and_clear(address, ids):
    plane = connect(address)
    plane.list_sample_ids("flow")
    plane.clear_samples(ids, "flow")


def consume(address, stop, log):
    """Claim, check, write down what was read, and clear, until the file ``stop`` exists.

    Not an Event: whoever is killed while it looks at one takes the Event's lock along, and all others wait.
    """
    plane = connect(address)
    while not stop.exists():
        meta = plane.claim_meta("flow", "train", FIELDS, 8, blocking=False)
        if not meta.size:
            time.sleep(0.001)
            continue
        verdict = "whole" if is_whole(meta.sample_ids, plane.get_data(meta)) else "changed"
        note(log, *meta.sample_ids, verdict)
        plane.clear_samples(meta.sample_ids, "flow")


def produce(address, name, count, log):
    """Put ``count`` batches of eight, writing each down after its commit."""
    plane = connect(address)
    for number in range(count):
        ids = [f"{name}-{number}-{row}" for row in range(8)]
        plane.put_samples(ids, "flow", batch(ids))
        note(log, *ids)


def note(log, *words):
    """Append a line in one system call: it is in the file even if the process is killed right after."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (" ".join(words) + "\n").encode())
    os.close(fd)


def bootstrap_and_wait(ready):
    plane = build_data_plane_client(load_config("shm", {"journal": False}))
    plane.register_partition("flow", FIELDS, 10**6, ["train"])
    assert isinstance(plane, ShmDataPlaneClient)
    ready.put((plane.controller_address, plane.service_status()["pid"]))
    time.sleep(600)


def fill(address, name, batches, rows, width):
    """Write new samples as fast as the plane takes them."""
    client = connect(address)
    for number in range(batches):
        ids = [f"{name}-{number}-{row}" for row in range(rows)]
        data = {"x": torch.ones(rows, width, dtype=torch.uint8)}
        client.put_samples(ids, "flow", TensorDict(data, batch_size=[rows]), timeout_s=60)
    client.close()


def score(address, batches, rows):
    """Write the column without which no sample is finished."""
    client = connect(address)
    for _ in range(batches):
        meta = client.claim_meta("flow", "score", ["x"], rows, timeout_s=60)
        # A little later than it could, so that the producers have filled the plane by then.
        time.sleep(0.05)
        data = {"logprobs": torch.zeros(rows, 512)}
        client.put_samples(meta.sample_ids, "flow", TensorDict(data, batch_size=[rows]), timeout_s=60)
    client.close()
