"""Where the bytes go: recycled at once, bounded, and never taken from under a reader."""

from __future__ import annotations

import gc
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from tests.integration import shm_workers as workers
from tests.warm_workers import run_warm

from rlplane.config import load_config
from rlplane.errors import CapacityError, CapacityTimeoutError
from rlplane.factory import build_data_plane_client

MB = 2**20


def make_plane(**config):
    client = build_data_plane_client(load_config("shm", config))
    client.register_partition("flow", ["x"], 10**9, ["train"])
    return client


def rows(count, nbytes_each):
    return TensorDict({"x": torch.ones(count, nbytes_each, dtype=torch.uint8)}, batch_size=[count])


def resident(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_a_column_and_a_leaf_are_saved_without_what_else_their_put_wrote():
    with make_plane() as plane:
        plane.register_partition("images", ["x", "y"], 4, ["train"])
        images = [{"image": torch.full((64, 64, 64), seed), "size": torch.tensor(seed)} for seed in range(4)]
        trees = NonTensorStack(*[NonTensorData(row) for row in images])
        plane.put_samples(list("abcd"), "images", TensorDict({"x": torch.ones(4, 2**18), "y": trees}, [4]))
        got = plane.get_samples(list("abcd"), "images", ["x", "y"])
        read = got.get("y").tolist()
        for row, image in zip(read, images, strict=True):
            assert all(torch.equal(row[name], image[name]) for name in image)
        for value in (got["x"], read[2]["image"], read[2]["size"]):
            assert len(pickle.dumps(value)) < value.nbytes + 4096
        del got, read, row, value
        gc.collect()
        workers.wait_until(lambda: plane.service_status()["leases"] == 0)


def test_a_thousand_steps_hold_the_arena_and_every_process_flat():
    plane = make_plane()
    data = rows(64, 16 * 1024)
    sizes, residents = [], []
    for step in range(1000):
        ids = [f"{step}-{row}" for row in range(64)]
        plane.put_samples(ids, "flow", data)
        meta = plane.claim_meta("flow", "train", ["x"], 64)
        got = plane.get_data(meta)
        assert got["x"][5, 5] == 1
        got["x"] += 1
        plane.clear_samples(meta.sample_ids, "flow")
        del got
        if step in (200, 999):
            gc.collect()
            storage = plane.service_status()["storage"]
            sizes.append((storage["total"], storage["backed"]))
            residents.append((resident(os.getpid()), resident(plane._supervisor.pid)))
    # A handful of batches: the one that is written, the one that is read, and what is on its way back.
    assert sizes[0][0] == sizes[1][0] and sizes[1][1] <= 8 * MB
    # The collector may have been at work in another thread when it was asked.
    workers.wait_until(lambda: gc.collect() >= 0 and plane.service_status()["leases"] == 0)
    status = plane.service_status()
    assert status["storage"]["used"] == status["reserved"]
    for before, after in zip(*residents, strict=True):
        assert after - before < 16 * MB
    plane.close()


def test_what_is_read_is_recycled_only_when_the_reader_drops_it():
    plane = make_plane(global_segment_size=8 * MB, local_buffer_size=8 * MB)
    plane.put_samples(["a"], "flow", rows(1, 4 * MB))
    held = plane.get_samples(["a"], "flow", ["x"])
    plane.clear_samples(["a"], "flow")
    with pytest.raises(CapacityTimeoutError):
        plane.put_samples(["b"], "flow", rows(1, 6 * MB), timeout_s=0.1)
    assert int(held["x"].sum()) == 4 * MB
    view = held["x"][0, 100:200]
    del held
    with pytest.raises(CapacityTimeoutError):
        plane.put_samples(["b"], "flow", rows(1, 6 * MB), timeout_s=0.1)
    assert int(view.sum()) == 100
    del view
    plane.put_samples(["b"], "flow", rows(1, 6 * MB), timeout_s=120)
    plane.close()


def test_two_reads_of_the_same_rows_do_not_see_each_others_changes():
    plane = make_plane()
    plane.put_samples(["a", "b"], "flow", rows(2, MB))
    first = plane.get_samples(["a", "b"], "flow", ["x"])
    first["x"].fill_(7)
    second = plane.get_samples(["a", "b"], "flow", ["x"])
    assert int(second["x"].sum()) == 2 * MB
    worker = workers.connect(plane.controller_address)
    assert int(worker.get_samples(["b", "a"], "flow", ["x"])["x"].sum()) == 2 * MB
    worker.close()
    plane.close()


def test_what_was_read_survives_the_close_of_the_client():
    plane = make_plane()
    plane.put_samples(["a"], "flow", rows(1, 4 * MB))
    worker = workers.connect(plane.controller_address)
    data = worker.get_samples(["a"], "flow", ["x"])
    worker.close()
    plane.clear_samples(["a"], "flow")
    for step in range(4):
        zeros = TensorDict({"x": torch.zeros(1, 4 * MB, dtype=torch.uint8)}, batch_size=[1])
        plane.put_samples([f"z{step}"], "flow", zeros)
    assert int(data["x"].sum()) == 4 * MB
    plane.close()
    assert int(data["x"].sum()) == 4 * MB


def test_a_put_waits_for_bytes_and_goes_on_when_a_clear_makes_room():
    plane = make_plane(global_segment_size=8 * MB)
    plane.put_samples(["a"], "flow", rows(1, 5 * MB))
    done = threading.Event()

    def put():
        plane.put_samples(["b"], "flow", rows(1, 5 * MB), timeout_s=60)
        done.set()

    thread = threading.Thread(target=put)
    thread.start()
    assert not done.wait(0.3)
    assert plane.list_sample_ids("flow") == ["a"]
    plane.clear_samples(["a"], "flow")
    assert done.wait(20)
    thread.join()
    assert plane.list_sample_ids("flow") == ["b"]
    plane.close()


def test_a_put_that_could_never_fit_is_refused_at_once():
    plane = make_plane(global_segment_size=8 * MB)
    with pytest.raises(CapacityError, match="can never fit") as caught:
        plane.put_samples(["a"], "flow", rows(1, 9 * MB), timeout_s=600)
    assert not isinstance(caught.value, TimeoutError)
    plane.close()


def test_memory_kept_for_a_next_put_is_taken_back_when_another_needs_it():
    plane = make_plane(global_segment_size=32 * MB, local_buffer_size=32 * MB)
    plane.put_samples(["a"], "flow", rows(1, 6 * MB))
    plane.clear_samples(["a"], "flow")
    assert plane.service_status()["reserved"] > 6 * MB
    worker = workers.connect(plane.controller_address, local_buffer_size=32 * MB)
    worker.put_samples(["b"], "flow", rows(1, 30 * MB), timeout_s=120)
    # And the first one notices that its spare is gone.
    worker.clear_samples(["b"], "flow")
    plane.put_samples(["c"], "flow", rows(1, 6 * MB), timeout_s=120)
    assert int(worker.get_samples(["c"], "flow", ["x"])["x"].sum()) == 6 * MB
    worker.close()
    plane.close()


def test_the_arena_grows_on_demand_up_to_its_bound():
    plane = make_plane(global_segment_size=64 * MB)
    assert plane.service_status()["storage"]["total"] == 0
    totals = []
    for step in range(10):
        plane.put_samples([f"s{step}"], "flow", rows(1, 5 * MB))
        totals.append(plane.service_status()["storage"]["total"])
    assert totals[0] < totals[-1] <= 64 * MB
    assert totals == sorted(totals)
    plane.close()


def test_a_few_live_samples_of_many_clients_do_not_keep_a_large_put_out():
    plane = make_plane(global_segment_size=1024 * MB, local_buffer_size=MB)
    clients = [workers.connect(plane.controller_address, local_buffer_size=MB) for _ in range(32)]
    for number, client in enumerate(clients):
        client.put_samples([f"small-{number}"], "flow", rows(1, 1000))
    plane.put_samples(["large"], "flow", rows(1, 257 * MB), timeout_s=0.0)
    clients[0].put_samples(["next"], "flow", rows(1, 2 * MB), timeout_s=0.0)
    assert int(clients[1].get_samples(["large"], "flow", ["x"])["x"].sum()) == 257 * MB
    assert plane.service_status()["storage"]["total"] < 512 * MB
    for client in clients:
        client.close()
    plane.close()


def test_a_torn_arena_takes_what_fits_by_the_sum_and_stays_within_its_bound():
    plane = make_plane(global_segment_size=64 * MB, local_buffer_size=1, reserve_for_live=0.0)
    pick = random.Random(2)
    sizes: dict[str, int] = {}
    for number in range(300):
        size = pick.randrange(1, 4 * MB)
        while sum(sizes.values()) + size + 4096 * (len(sizes) + 1) > 0.95 * 64 * MB:
            gone = pick.choice(list(sizes))
            plane.clear_samples([gone], "flow")
            del sizes[gone]
        data = TensorDict({"x": torch.full((1, size), number % 251, dtype=torch.uint8)}, batch_size=[1])
        plane.put_samples([str(number)], "flow", data, timeout_s=0.0)
        sizes[str(number)] = size
    for name, size in sizes.items():
        got = plane.get_samples([name], "flow", ["x"])["x"]
        assert got.shape == (1, size) and bool((got == int(name) % 251).all())
    directory = Path(plane.controller_address.removeprefix("shm://"))
    held = sum(file.stat().st_blocks * 512 for file in directory.glob("segment-*"))
    assert held <= 64 * MB
    plane.close()


def jagged_rows(count, nbytes_each):
    values = [torch.full((nbytes_each - row,), row, dtype=torch.uint8) for row in range(count)]
    return TensorDict({"x": torch.nested.nested_tensor(values, layout=torch.jagged)}, batch_size=[count])


def used(plane):
    return plane.service_status()["storage"]["used"] - plane.service_status()["reserved"]


@pytest.mark.parametrize("make", [rows, jagged_rows])
def test_a_straggler_holds_its_own_memory_and_not_that_of_its_put(make):
    plane = make_plane(global_segment_size=8 * MB, local_buffer_size=1, reserve_for_live=0.0)
    ids = [f"s{row}" for row in range(64)]
    plane.put_samples(ids, "flow", make(64, 64 * 1024))
    expected = plane.get_samples(["s17", "s40"], "flow", ["x"])["x"].unbind()
    expected = [row.clone() for row in expected]
    held = plane.get_samples(ids[30:50], "flow", ["x"])  # without a copy, so it holds the place
    for first in (0, 18, 41):
        gone = [sample for sample in ids[first : first + 23] if sample not in ("s17", "s40")]
        plane.clear_samples(gone, "flow")
    assert used(plane) > 3 * MB
    assert all(bool((row == row[0]).all()) for row in held["x"].unbind())
    del held
    deadline = time.monotonic() + 20
    while used(plane) > 64 * 1024 * 3:
        assert time.monotonic() < deadline, used(plane)
        time.sleep(0.01)
    # What came back is written to, and the service that knows so dies.
    plane.put_samples(["new"], "flow", rows(1, 7 * MB), timeout_s=0.0)
    os.kill(plane._supervisor.pid, signal.SIGKILL)
    plane.put_samples(["more"], "flow", rows(1, MB // 2), timeout_s=20)
    plane.clear_samples(["new"], "flow")
    plane.put_samples(["newer"], "flow", rows(1, 7 * MB), timeout_s=20)
    got = plane.get_samples(["s17", "s40"], "flow", ["x"])["x"].unbind()
    assert all(torch.equal(now, then) for now, then in zip(got, expected, strict=True))
    plane.clear_samples(["s17", "s40", "more", "newer"], "flow")
    assert used(plane) == 0
    plane.close()


def test_a_checkpoint_of_a_put_of_which_rows_came_back_is_whole(tmp_path):
    plane = make_plane(global_segment_size=13 * MB, local_buffer_size=1, reserve_for_live=0.0)
    ids = [f"s{row}" for row in range(64)]
    plane.put_samples(ids, "flow", jagged_rows(64, 64 * 1024))
    plane.clear_samples(ids[1:], "flow")
    plane.put_samples(["new"], "flow", rows(1, 3 * MB), timeout_s=20)
    plane.save_checkpoint(str(tmp_path))
    plane.load_checkpoint(str(tmp_path))
    assert bool((plane.get_samples(["s0"], "flow", ["x"])["x"].values() == 0).all())
    assert int(plane.get_samples(["new"], "flow", ["x"])["x"].sum()) == 3 * MB
    plane.close()


def test_without_file_descriptors_there_is_a_clear_error_and_the_plane_goes_on():
    plane = make_plane()
    plane.put_samples(["a"], "flow", rows(1, MB))
    script = """
import os, resource, sys
from tests.integration.shm_workers import connect
plane = connect(sys.argv[1])
plane.list_sample_ids("flow")
used = len(os.listdir("/proc/self/fd"))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
fillers = []
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, hard))
try:
    while True:
        fillers.append(os.dup(0))
except OSError:
    pass
try:
    plane.get_samples(["a"], "flow", ["x"])
except MemoryError as error:
    print(error)
for fd in fillers:
    os.close(fd)
print(int(plane.get_samples(["a"], "flow", ["x"])["x"].sum()))
"""
    result = run_warm([sys.executable, "-c", script, plane.controller_address], timeout=300)
    assert result.returncode == 0, result.stderr
    assert "ulimit -n" in result.stdout and str(MB) in result.stdout
    plane.close()


@pytest.mark.parametrize("spare", [0, 1])
def test_a_service_without_file_descriptors_refuses_newcomers_and_serves_the_others(spare, monkeypatch):
    monkeypatch.setattr("rlplane.service.connection._ANSWER_TIMEOUT_S", 2.0)
    plane = make_plane()
    plane.put_samples(["a"], "flow", rows(1, MB))
    service = psutil.Process(plane._supervisor.pid)
    before = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir(f"/proc/{service.pid}/fd"))) + 1
    resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (used + spare, before[1]))
    worked = sum(service.cpu_times()[:2])
    with pytest.raises(ConnectionError, match="cannot connect"):
        workers.connect(plane.controller_address, reconnect_timeout_s=2)
    assert int(plane.get_samples(["a"], "flow", ["x"])["x"].sum()) == MB
    assert sum(service.cpu_times()[:2]) - worked < 0.5, "it does not ask again and again"
    if spare:
        assert plane.service_status()["refused"] == 1, "the newcomer does not ask again and again either"
    resource.prlimit(service.pid, resource.RLIMIT_NOFILE, before)
    worker = workers.connect(plane.controller_address)
    assert worker.list_sample_ids("flow") == ["a"]
    worker.close()
    plane.close()


def test_a_segment_that_somebody_deleted_is_a_clear_error():
    plane = make_plane()
    plane.put_samples(["a"], "flow", rows(1, MB))
    for file in Path(plane.controller_address.removeprefix("shm://")).glob("segment-*"):
        file.unlink()
    worker = workers.connect(plane.controller_address)
    with pytest.raises(ConnectionError, match="is gone"):
        worker.get_samples(["a"], "flow", ["x"])
    assert int(plane.get_samples(["a"], "flow", ["x"])["x"].sum()) == MB
    worker.close()
    plane.close()


FULL = """
import threading
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from rlplane.config import load_config
from rlplane.factory import build_data_plane_client
plane = build_data_plane_client(load_config("shm", {"global_segment_size": "256 MiB"}))
plane.register_partition("flow", ["x"], 100, ["train"])
def rows(n):
    return TensorDict({"x": torch.ones(1, n * 2**20, dtype=torch.uint8)}, batch_size=[1])
plane.put_samples(["a"], "flow", rows(8))
try:
    plane.put_samples(["b"], "flow", rows(64), timeout_s=0.5)
except TimeoutError as error:
    print("refused:", isinstance(error, MemoryError), error)
print(plane.list_sample_ids("flow"), int(plane.get_samples(["a"], "flow", ["x"])["x"].sum()))
plane.put_samples(["c"], "flow", rows(4))
print(plane.list_sample_ids("flow"), plane.service_status()["reserved"] < 16 * 2**20)
waiting = threading.Thread(target=lambda: plane.put_samples(["d"], "flow", rows(24), timeout_s=60))
waiting.start()
waiting.join(0.5)
print(waiting.is_alive(), plane.list_sample_ids("flow"))
plane.clear_samples(["a"], "flow")
waiting.join(30)
print(plane.list_sample_ids("flow"), int(plane.get_samples(["d"], "flow", ["x"])["x"].sum()))
plane.close()
"""


KILLED_WHEN_FULL = """
import os, signal
import torch
from tensordict import TensorDict
from rlplane.config import load_config
from rlplane.factory import build_data_plane_client
plane = build_data_plane_client(load_config("shm", {"global_segment_size": "256 MiB"}))
plane.register_partition("flow", ["x"], 10**6, ["train"])
written = 0
for size in (2**20, 2**15, 2**12):
    try:
        while True:
            x = torch.full((1, size), written % 251, dtype=torch.uint8)
            plane.put_samples([str(written)], "flow", TensorDict({"x": x}, batch_size=[1]), timeout_s=0.1)
            written += 1
    except TimeoutError:
        pass
for _ in range(300):
    plane.unclaim(plane.claim_meta("flow", "train", ["x"], 1))
os.kill(plane.service_status()["pid"], signal.SIGKILL)
ids = plane.list_sample_ids("flow")
print(written > 30, sorted(map(int, ids)) == list(range(written)))
for sample_id in ids:
    assert (plane.get_samples([sample_id], "flow", ["x"])["x"] == int(sample_id) % 251).all()
plane.close()
"""


def test_a_plane_that_has_filled_dev_shm_survives_its_service():
    result = with_32_mib(KILLED_WHEN_FULL)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "True True\n"
    assert "the journal cannot be written" not in result.stderr


def with_32_mib(program):
    """Run a program in a mount namespace of its own, with a /dev/shm of 32 MiB."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("a small /dev/shm of its own needs root and unshare")
    probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True)
    if probe.returncode:
        pytest.skip(f"mount namespaces are not allowed here: {probe.stderr.decode()}")
    setup = 'mount -t tmpfs -o size=32m tmpfs /dev/shm && exec "$0" -c "$1"'
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", setup, sys.executable, program],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_put_waits_for_a_full_dev_shm_and_nothing_is_corrupted():
    """In a mount namespace of its own, with a /dev/shm of 32 MiB."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("a small /dev/shm of its own needs root and unshare")
    setup = 'mount -t tmpfs -o size=32m tmpfs /dev/shm && exec "$0" -c "$1"'
    probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True)
    if probe.returncode:
        pytest.skip(f"mount namespaces are not allowed here: {probe.stderr.decode()}")
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", setup, sys.executable, FULL],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("refused: True /dev/shm is full")
    assert lines[1] == f"['a'] {8 * MB}"
    assert lines[2] == "['a', 'c'] True"
    assert lines[3] == "True ['a', 'c']"
    assert lines[4] == f"['c', 'd'] {24 * MB}"
    assert "global_segment_size is 268,435,456 bytes, and /dev/shm has 33,554,432" in result.stderr


def test_a_waiting_claim_is_answered_first_come_first_served():
    plane = make_plane()
    order, threads = [], []
    for number in range(40):
        before = plane.partition_status("flow")["tasks"]["train"]["waiting"]

        def claim(number=number):
            meta = plane.claim_meta("flow", "train", ["x"], 2, timeout_s=60)
            order.append((int(meta.sample_ids[0]), number))

        threads.append(threading.Thread(target=claim))
        threads[-1].start()
        deadline = time.monotonic() + 20
        while plane.partition_status("flow")["tasks"]["train"]["waiting"] == before:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    ids = [str(number) for number in range(80)]
    plane.put_samples(ids, "flow", rows(80, 8))
    for thread in threads:
        thread.join(120)
    assert sorted(order) == [(2 * number, number) for number in range(40)]
    plane.close()


def test_hundreds_of_claims_wait_and_are_answered():
    plane = make_plane()
    got, threads = [], []
    for _ in range(300):
        threads.append(
            threading.Thread(
                target=lambda: got.extend(
                    plane.claim_meta("flow", "train", ["x"], 1, timeout_s=120).sample_ids
                )
            )
        )
        threads[-1].start()
    deadline = time.monotonic() + 60
    while plane.partition_status("flow")["tasks"]["train"]["waiting"] < 300:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for start in range(0, 300, 50):
        ids = [str(number) for number in range(start, start + 50)]
        plane.put_samples(ids, "flow", rows(50, 8))
    for thread in threads:
        thread.join(60)
    assert sorted(map(int, got)) == list(range(300))
    plane.close()
