"""One client in many places: threads, forked and spawned processes, pickles, asyncio."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.integration import shm_workers as workers
from tests.warm_workers import run_warm
from torch.utils.data import DataLoader, Dataset

from rlplane.adapters.local.shm import ShmDataPlaneClient
from rlplane.config import load_config
from rlplane.errors import ClientClosedError
from rlplane.factory import build_data_plane_client
from rlplane.interfaces import ADDRESS_VARIABLE


@pytest.fixture
def plane():
    client = build_data_plane_client(load_config("shm"))
    client.register_partition("flow", ["x"], 10**9, ["train"])
    yield client
    client.close()


def put(plane, *ids, value=1):
    data = TensorDict({"x": torch.full((len(ids), 100_000), value, dtype=torch.int32)}, batch_size=[len(ids)])
    plane.put_samples(list(ids), "flow", data)


def test_a_script_that_fails_without_closing_shows_its_own_error_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import rlplane\n"
        "client = rlplane.build_data_plane_client(rlplane.load_config('shm'))\n"
        "client.register_partition('flow', ['x'], 1, ['train'])\n"
        "raise ValueError('mine')\n"
    )
    done = run_warm([sys.executable, str(script)], timeout=120)
    assert "ValueError: mine" in done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr


def in_child(function):
    """Run in a forked child and return what it printed through a pipe."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # the parent's pool of threads is not in the child
            os.write(write_fd, repr(function()).encode())
        except BaseException as error:
            os.write(write_fd, f"failed: {error!r}".encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


def test_a_forked_child_uses_the_client_and_the_parent_goes_on(plane):
    put(plane, "a")

    def child():
        put(plane, "b", value=2)
        total = int(plane.get_samples(["a", "b"], "flow", ["x"])["x"].sum())
        plane.close()  # a worker's close: the plane stays up
        return total

    assert in_child(child) == "300000"
    assert plane.list_sample_ids("flow") == ["a", "b"]
    assert int(plane.get_samples(["b"], "flow", ["x"])["x"][0, 0]) == 2


def test_what_was_read_before_a_fork_stays_right_in_the_child(plane):
    put(plane, "a", value=3)
    held = plane.get_samples(["a"], "flow", ["x"])
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_fd)
        torch.set_num_threads(1)
        os.read(read_fd, 1)  # until the parent has recycled the memory
        os._exit(0 if int(held["x"].sum()) == 300_000 else 1)
    os.close(read_fd)
    del held
    plane.clear_samples(["a"], "flow")
    for number in range(8):
        put(plane, f"z{number}", value=9)
    os.write(write_fd, b"x")
    os.close(write_fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class Rows(Dataset[Any]):
    def __init__(self, plane, ids):
        self.plane, self.ids = plane, ids

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.plane.get_samples([self.ids[index]], "flow", ["x"])["x"][0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers_read_through_the_client(plane, method):
    ids = [f"s{number}" for number in range(12)]
    for number, sample_id in enumerate(ids):
        put(plane, sample_id, value=number)
    loader = DataLoader(Rows(plane, ids), batch_size=4, num_workers=2, multiprocessing_context=method)
    values = [int(value) for loaded in loader for value in loaded[:, 0]]
    assert values == list(range(12))


def test_a_pickled_client_connects_when_it_is_first_used(plane):
    put(plane, "a")
    copy = pickle.loads(pickle.dumps(plane))
    assert "not connected" in repr(copy)
    assert copy.list_sample_ids("flow") == ["a"]
    copy.close()
    assert plane.list_sample_ids("flow") == ["a"]


def test_a_child_process_finds_the_plane_in_its_environment(plane):
    put(plane, "a")
    assert os.environ[ADDRESS_VARIABLE] == plane.controller_address
    script = (
        "import rlplane\n"
        "plane = rlplane.build_data_plane_client(rlplane.load_config('shm'), bootstrap=False)\n"
        "print(plane.list_sample_ids('flow'))"
    )
    done = run_warm([sys.executable, "-c", script], timeout=300)
    assert done.stdout.strip() == "['a']", done.stderr


def test_of_two_planes_of_a_process_its_workers_join_the_newest_that_is_open(plane):
    config = load_config("shm")  # loaded while another plane is there, as by a second job in a notebook

    def address_of_a_worker():
        with ShmDataPlaneClient(config, bootstrap=False) as worker:
            return worker.controller_address

    with ShmDataPlaneClient(config) as newer:
        assert address_of_a_worker() == newer.controller_address
    assert address_of_a_worker() == plane.controller_address


def test_many_threads_share_one_client(plane):
    failures = []

    def work(name):
        try:
            for step in range(20):
                ids = [f"{name}-{step}"]
                put(plane, *ids, value=step)
                assert int(plane.get_samples(ids, "flow", ["x"])["x"][0, 7]) == step
                plane.clear_samples(ids, "flow")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert plane.list_sample_ids("flow") == []


async def test_asyncio_code_waits_in_a_thread_and_the_loop_goes_on(plane):
    waiting = asyncio.create_task(asyncio.to_thread(plane.claim_meta, "flow", "train", ["x"], 1))
    ticks = 0
    while plane.partition_status("flow")["tasks"]["train"]["waiting"] == 0:
        await asyncio.sleep(0.001)
        ticks += 1
    await asyncio.to_thread(put, plane, "a")
    meta = await asyncio.wait_for(waiting, 20)
    assert meta.sample_ids == ["a"] and ticks > 0


def test_the_bootstrap_close_ends_the_plane_and_a_workers_close_does_not(plane):
    worker = workers.connect(plane.controller_address)
    worker.close()
    worker.close()
    with pytest.raises(ClientClosedError):
        worker.list_sample_ids("flow")
    other = workers.connect(plane.controller_address)
    path = Path(plane.controller_address.removeprefix("shm://"))
    controller = plane._supervisor.pid
    plane.close()
    assert not path.exists() and not Path(f"/proc/{controller}").exists()
    assert ADDRESS_VARIABLE not in os.environ
    with pytest.raises(ConnectionError):
        other.list_sample_ids("flow")
    other.close()


def test_a_process_that_forgets_to_close_leaves_nothing_behind():
    script = (
        "import rlplane\n"
        "plane = rlplane.build_data_plane_client(rlplane.load_config('shm'))\n"
        "plane.register_partition('flow', ['x'], 8, ['train'])\n"
        "print(plane.controller_address, plane._supervisor.pid)"
    )
    done = run_warm([sys.executable, "-c", script], timeout=300)
    address, controller = done.stdout.split()
    deadline = 0
    while Path(f"/proc/{controller}").exists() and deadline < 2000:
        deadline += 1
        threading.Event().wait(0.01)
    assert not Path(f"/proc/{controller}").exists()
    assert not Path(address.removeprefix("shm://")).exists()


def test_the_service_loads_no_torch():
    script = "import sys, rlplane.adapters.local.process; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr


def test_connecting_to_nothing_says_what_to_do(monkeypatch):
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    with pytest.raises(ConnectionError, match="controller_address"):
        build_data_plane_client(load_config("shm"), bootstrap=False)
    with pytest.raises(ConnectionError, match="no plane at"):
        workers.connect("shm:///dev/shm/rlplane-none")
