"""What the processes of the shared-memory tests do. Each function is the whole life of one process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import torch
from tensordict import TensorDict

from rlplane.adapters.local import client as client_module
from rlplane.adapters.local.connection import Connection
from rlplane.adapters.local.mapping import Segments
from rlplane.config import load_config
from rlplane.factory import build_data_plane_client

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
    process.join(10)


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


def die_while_putting(address, step, ids):
    """Put ``ids``, and be killed at ``step``."""
    plane = connect(address)
    if step == "before the memory is reserved":
        client_module.ShmDataPlaneClient._reserve = lambda *_: _die()
    elif step == "before the pages exist":
        Segments.back = lambda *_: _die()
    elif step == "in the middle of the copy":
        copy_all = client_module.copy_all

        def die_half_way(pairs):
            copy_all(pairs[: len(pairs) // 2])
            _die()

        client_module.copy_all = die_half_way
    elif step == "before the commit is sent":
        exchange = Connection.exchange

        def dying(self, request, **waits):
            if isinstance(request, client_module.wire.Commit):
                _die()
            return exchange(self, request, **waits)

        Connection.exchange = dying
    plane.put_samples(ids, "flow", batch(ids))


def die_after_the_commit(address, ids):
    """Put ``ids`` and be killed before the answer is read, with the commit certainly sent."""
    plane = connect(address)
    plane._link().describe("flow")
    receive = Connection._receive

    def dying(self, channel, number, waits_s):
        answer = receive(self, channel, number, waits_s)
        if not isinstance(answer, client_module.wire.Reserved):
            _die()
        return answer

    Connection._receive = dying
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
    plane = build_data_plane_client(load_config("shm"))
    plane.register_partition("flow", FIELDS, 10**6, ["train"])
    process = plane._process
    ready.put((plane.controller_address, process.pid))
    time.sleep(600)
