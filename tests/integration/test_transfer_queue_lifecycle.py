"""Starting, joining and ending a plane on Ray, its checkpoints, and silence in the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import cast

import pytest
import ray
import torch
from tensordict import NonTensorStack, TensorDict
from tests.warm_workers import WarmProcess, run_warm

from rlplane.adapters.transfer_queue import TQDataPlaneClient
from rlplane.errors import CheckpointError, ConfigError, PlaneConnectionError
from rlplane.interfaces import DataPlaneConfig
from rlplane.service.connection import SocketConnection
from rlplane.storage.checkpoint import FILE_NAME

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


USE_A_PLANE = """
import json, os, sys
import torch
from tensordict import TensorDict
from rlplane.config import load_config
from rlplane.factory import build_data_plane_client

cfg = load_config("cluster-mooncake", json.loads(sys.argv[1]))
client = build_data_plane_client(cfg)
import ray
assert os.environ["RLPLANE_CONTROLLER_ADDRESS"] == ray.get_runtime_context().gcs_address
client.register_partition("p", ["x"], 4, ["t"])
client.put_samples(["a", "b"], "p", TensorDict({"x": torch.arange(2.0)}, batch_size=[2]))
assert client.get_data(client.claim_meta("p", "t", ["x"], 2))["x"].tolist() == [0.0, 1.0]
pids = [ray.get(client._plane.master.pid.remote()), ray.get(client._plane.actor.pid.remote())]
client.close()
client.close()
assert not ray.is_initialized()
assert "RLPLANE_CONTROLLER_ADDRESS" not in os.environ
json.dump(pids, open(sys.argv[2], "w"))
"""


def small(**keys):
    return {
        "transfer_queue.node_ip": "127.0.0.2",
        "num_storage_units": 1,
        "global_segment_size": 64 << 20,
        "local_buffer_size": 4 << 20,
        **keys,
    }


def test_without_ray_the_client_starts_one_and_ends_all_of_it_in_silence(tmp_path):
    pids = tmp_path / "pids"
    directory = f"/tmp/rlp-{os.getpid()}-own"
    environment = {**os.environ, "RAY_TMPDIR": directory}
    for name in ("RAY_ADDRESS", "RLPLANE_CONTROLLER_ADDRESS"):
        environment.pop(name, None)
    config = small(**{"transfer_queue.ray_address": "local"})
    os.makedirs(directory)
    try:
        done = run_warm(
            [sys.executable, "-c", USE_A_PLANE, json.dumps(config), str(pids)],
            env=environment,
            timeout=240,
        )
    finally:
        subprocess.run(["rm", "-rf", directory], check=True)
    assert done.returncode == 0, done.stderr
    # What torch says about itself is not ours.
    noise = [line for line in (done.stdout + done.stderr).splitlines() if "torch/" not in line]
    assert noise == []
    for pid in json.loads(pids.read_text()):
        until(lambda pid=pid: not alive(pid))


BOOTSTRAP_AND_WAIT = """
import json, sys, time
from rlplane.config import load_config
from rlplane.factory import build_data_plane_client

client = build_data_plane_client(load_config("cluster-mooncake", json.loads(sys.argv[1])))
import ray
print(ray.get(client._plane.master.pid.remote()), flush=True)
time.sleep(600)
"""


def test_a_bootstrap_process_that_is_killed_takes_its_plane_and_mooncake_with_it(ray_cluster):
    # controller_address is that of the Ray cluster which the controller is on.
    config = small(**{"controller_address": ray_cluster, "transfer_queue.namespace": "killed"})
    process = WarmProcess(
        [sys.executable, "-c", BOOTSTRAP_AND_WAIT, json.dumps(config)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        master = int(process.stdout.readline())
        assert alive(master)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    until(lambda: not alive(master))


def test_a_second_bootstrap_joins_a_plane_of_the_same_config_and_refuses_another(start_plane):
    first = start_plane("simple", storage_capacity=100)
    second = TQDataPlaneClient(first._cfg)
    second.register_partition("p", ["x"], 4, ["t"])
    second.close()
    assert first.list_sample_ids("p") == [], "the close of a client that joined must not end the plane"
    other = cast("DataPlaneConfig", {**first._cfg, "storage_capacity": 200, "num_storage_units": 3})
    with pytest.raises(ConfigError) as refused:
        TQDataPlaneClient(other)
    assert "storage_capacity: it has 100, this config says 200" in str(refused.value)
    assert "num_storage_units: it has 1, this config says 3" in str(refused.value)
    assert "backend" not in str(refused.value).split(":\n")[1]
    # A worker reads nothing of what the plane is made from.
    TQDataPlaneClient(other, bootstrap=False).close()
    first.put_samples(["a"], "p", TensorDict({"x": torch.zeros(1)}, batch_size=[1]))


def test_a_worker_without_a_plane_gets_an_error_in_time(ray_cluster):
    from rlplane.config import load_config

    options = {"transfer_queue.namespace": "nobody-is-here", "ack_timeout_ms": 300}
    with pytest.raises(PlaneConnectionError, match="nobody-is-here"):
        TQDataPlaneClient(load_config("cluster-simple", options), bootstrap=False)


def test_transferqueue_without_us_in_the_namespace_is_refused(ray_cluster):
    from transfer_queue.controller import TransferQueueController

    from rlplane.config import load_config

    theirs = TransferQueueController.options(
        name="TransferQueueController", namespace="theirs", num_cpus=0
    ).remote()
    ray.get(theirs.get_zmq_server_info.remote())
    options = small(**{"transfer_queue.namespace": "theirs", "ack_timeout_ms": 300})
    with pytest.raises(ConfigError, match="rlplane did not start"):
        TQDataPlaneClient(load_config("cluster-simple", options))
    assert ray.get(theirs.get_zmq_server_info.remote()), "it is not ours to end"
    ray.kill(theirs)


JOIN_BY_THE_ENVIRONMENT = """
import json, os, sys
from rlplane.config import load_config
from rlplane.factory import build_data_plane_client

assert "RAY_ADDRESS" not in os.environ
client = build_data_plane_client(load_config("cluster-simple", json.loads(sys.argv[1])), bootstrap=False)
meta = client.claim_meta("p", "t", ["x"], 1)
print(meta.sample_ids, client.get_data(meta)["x"].tolist())
client.close()
"""


def test_a_process_that_is_not_rays_joins_by_the_inherited_address_alone(start_plane, ray_cluster, tmp_path):
    client = start_plane("simple")
    client.register_partition("p", ["x"], 4, ["t"])
    client.put_samples(["a"], "p", TensorDict({"x": torch.ones(1)}, batch_size=[1]))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_ADDRESS")}
    # In a directory where Ray leaves no trace of a cluster of this machine: the variable is all it has.
    environment.update(RLPLANE_CONTROLLER_ADDRESS=ray_cluster, RAY_TMPDIR=str(tmp_path))
    config = {"transfer_queue.namespace": client._plane.namespace}
    done = run_warm(
        [sys.executable, "-c", JOIN_BY_THE_ENVIRONMENT, json.dumps(config)],
        env=environment,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "['a'] [1.0]"


@pytest.mark.parametrize("address", ["shm:///dev/shm/rlplane-1/plane", "unix:///run/plane/service"])
def test_the_address_of_a_local_plane_is_refused_where_a_ray_cluster_is_meant(
    start_plane, address, monkeypatch
):
    client = start_plane("simple")
    config = cast("DataPlaneConfig", {**client._cfg, "controller_address": address})
    for bootstrap in (True, False):
        with pytest.raises(ConfigError, match="address of a Ray cluster"):
            TQDataPlaneClient(config, bootstrap=bootstrap)
    monkeypatch.setenv("RLPLANE_CONTROLLER_ADDRESS", address)
    TQDataPlaneClient(client._cfg, bootstrap=False).close()


def command_lines():
    """What every process of this machine was started with, as bytes."""
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                lines.append(entry.joinpath("cmdline").read_bytes())
    return lines


@pytest.mark.parametrize("backend", ["simple", "mooncake_cpu"])
def test_only_who_has_the_token_is_let_in_and_nobody_else_gets_to_see_it(start_plane, backend, caplog):
    client = start_plane(backend)
    address, token = (client._plane.service[name] for name in ("address", "token"))
    assert len(token) == 64
    before = client.service_status()
    for wrong in ("", "0" * 64, token[:-1]):
        with pytest.raises(PlaneConnectionError, match="the token is wrong") as refused:
            SocketConnection(address, token=wrong, ack_timeout_s=30)
        assert token not in str(refused.value)
    after = client.service_status()
    assert after["clients"] == before["clients"]
    assert after["refused"] == before["refused"] + 3

    own = Path("/proc/self/cmdline").read_bytes()
    lines = command_lines()
    assert own in lines and len(lines) > 3
    assert not [line for line in lines if token.encode() in line]
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    texts = {file: file.read_bytes() for file in logs.rglob("*") if file.is_file()}
    assert any(texts.values()), "there are logs to look at"
    assert not [file for file, text in texts.items() if token.encode() in text]
    assert token not in caplog.text
    assert token not in repr(client) and token not in repr(client._plane)


def batch(ids, start):
    columns = {
        "x": torch.arange(len(ids), dtype=torch.float32) + start,
        "ids": torch.nested.as_nested_tensor(
            [torch.arange(n + 1) for n in range(len(ids))], layout=torch.jagged
        ),
        "meta": NonTensorStack(*[{"n": start + n} for n in range(len(ids))]),
    }
    return TensorDict(columns, batch_size=[len(ids)])


@pytest.mark.parametrize("backend", ["simple", "mooncake_cpu"])
def test_a_checkpoint_is_consistent_while_work_goes_on_and_loads_into_another_plane(
    start_plane, backend, tmp_path
):
    client = start_plane(backend, num_storage_units=2)
    client.register_partition("p", ["x", "ids", "meta"], 1000, ["train", "eval"])
    client.put_samples(["a", "b", "c"], "p", batch("abc", 0), [{"v": 1}, {"v": 2}, {"v": 3}])
    client.put_samples(["b"], "p", TensorDict({"x": torch.tensor([70.0])}, batch_size=[1]))
    assert client.claim_meta("p", "train", ["x"], 1).sample_ids == ["a"]

    stop = threading.Event()

    def work():
        with TQDataPlaneClient(client._cfg, bootstrap=False) as worker:
            for number in range(10_000):
                if stop.is_set():
                    break
                pair = [f"w{number}-0", f"w{number}-1"]
                worker.put_samples(pair, "p", batch(pair, number))
                worker.clear_samples(pair, "p")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        client.save_checkpoint(str(tmp_path / "one"))
        client.save_checkpoint(str(tmp_path / "one"))
    finally:
        stop.set()
        thread.join()

    other = start_plane(backend, num_storage_units=2)
    other.register_partition("old", ["x"], 5, ["train"])
    other.put_samples(["gone"], "old", TensorDict({"x": torch.zeros(1)}, batch_size=[1]))
    other.load_checkpoint(str(tmp_path / "one"))
    live = other.list_sample_ids("p")
    assert live[:3] == ["a", "b", "c"] and len(live) in (3, 5)
    got = other.get_samples(live, "p", ["x", "ids", "meta"])
    assert got["x"][:3].tolist() == [0.0, 70.0, 2.0]
    assert [row.tolist() for row in got["ids"].unbind()][:3] == [[0], [0, 1], [0, 1, 2]]
    assert list(got["meta"])[:3] == [{"n": 0}, {"n": 1}, {"n": 2}]
    meta = other.claim_meta("p", "train", ["x"], 2)
    assert meta.sample_ids == ["b", "c"] and meta.tags == [{"v": 2}, {"v": 3}]
    with pytest.raises(KeyError):
        other.list_sample_ids("old")
    # It goes on from there: new writes do not go to places that the checkpoint uses.
    more = [f"n{number}" for number in range(20)]
    for sample_id in more:
        other.put_samples([sample_id], "p", batch([sample_id], 5))
    assert other.get_samples(live, "p", ["x"])["x"][:3].tolist() == [0.0, 70.0, 2.0]
    assert other.get_samples(more, "p", ["x"])["x"].tolist() == [5.0] * 20

    used = other.service_status()["storage"]["used"]
    part = tmp_path / "one" / FILE_NAME
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="refused"):
        other.load_checkpoint(str(tmp_path / "one"))
    with pytest.raises(CheckpointError, match="cannot read"):
        other.load_checkpoint(str(tmp_path / "nothing"))
    # A bad one leaves nothing behind. What was freed before it may be discarded only now.
    until(lambda: other.service_status()["storage"]["used"] <= used)
    assert other.get_samples(["b"], "p", ["x"])["x"].tolist() == [70.0], "a bad one is refused whole"


def test_the_bytes_that_move_are_recorded(cluster):
    client = cluster.client()
    client.register_partition("stats", ["x"], 4, ["t"])
    client.put_samples(["a", "b"], "stats", TensorDict({"x": torch.zeros(2, 8)}, batch_size=[2]))
    client.get_samples(["a", "b"], "stats", ["x"])
    assert client.transfer_stats.data["bytes_transferred"] == [64, 64]
    client.clear_samples(None, "stats")
    client.close()


def test_the_program_in_the_documentation_runs(ray_cluster):
    text = Path(__file__).parents[2].joinpath("docs", "engines.md").read_text(encoding="utf-8")
    programs = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    assert programs
    for program in programs:
        exec(compile(program, "docs/engines.md", "exec"), {"__name__": "__main__"})
