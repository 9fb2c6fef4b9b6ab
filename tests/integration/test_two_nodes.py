"""Two hosts, made of network namespaces with a cable between them: one produces, the other consumes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.warm_workers import WarmProcess, run_warm

from rlplane.viewing.feed import read_run

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(420)]

RLPLANE = [sys.executable, "-m", "rlplane.cli"]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
NET = f"10.231.{os.getpid() % 250}"
HEAD, WORKER = f"{NET}.1", f"{NET}.2"
# No token: the two hosts have no way out, and nobody has a way in.
ENVIRONMENT = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Host:
    """A network namespace, and the processes in it."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = f"rlp{os.getpid()}{name}", address
        self.cable = f"rlp{os.getpid()}{name}"
        self.network = Path("/run/netns", self.name)
        run("ip", "netns", "add", self.name)

    def plug_in(self) -> None:
        run("ip", "link", "set", self.cable, "netns", self.name)
        self.ip("addr", "add", f"{self.address}/24", "dev", self.cable)
        self.ip("link", "set", self.cable, "up")
        self.ip("link", "set", "lo", "up")

    def ip(self, *command: str) -> None:
        run("ip", "-n", self.name, *command)

    def command(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def run_python(self, *arguments: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        return run_warm([sys.executable, *arguments], env=env, network=self.network)

    def received(self) -> int:
        """Bytes that came over the cable."""
        file = f"/sys/class/net/{self.cable}/statistics/rx_bytes"
        return int(run(*self.command("cat", file)))

    def pids(self) -> list[int]:
        return [int(pid) for pid in run("ip", "netns", "pids", self.name).split()]

    def remove(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + 10
            while (pids := self.pids()) and time.monotonic() < deadline:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(0.1)
        run("ip", "netns", "del", self.name)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other and nobody else: a Ray head on the first, a worker on the second."""
    made: list[Host] = []
    directory = tempfile.mkdtemp(prefix="rlp-", dir="/tmp")
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, directory, ignore_errors=True)
        try:
            for name, address in (("a", HEAD), ("b", WORKER)):
                made.append(Host(name, address))
                cleanup.callback(made[-1].remove)
            run("ip", "link", "add", made[0].cable, "type", "veth", "peer", "name", made[1].cable)
            for host in made:
                host.plug_in()
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        common = ["--num-cpus=4", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
        head = ["start", "--head", f"--node-ip-address={HEAD}", "--port=6379", f"--temp-dir={directory}"]
        commands = [
            made[0].command(*RAY, *head, "--include-dashboard=false", *common),
            made[1].command(*RAY, "start", f"--address={HEAD}:6379", f"--node-ip-address={WORKER}", *common),
        ]
        for number, command in enumerate(commands):
            log = cleanup.enter_context(Path(directory, f"start-{number}.log").open("w"))
            process = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT)
            cleanup.callback(process.wait)
            cleanup.callback(process.terminate)
            wait_for_nodes(made[0], number + 1)
        yield made[0], made[1]


COUNT_NODES = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()))
"""


def wait_for_nodes(head: Host, count: int) -> None:
    deadline = time.monotonic() + 120
    while True:
        command = head.command(sys.executable, "-c", COUNT_NODES, f"{HEAD}:6379")
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
        if done.returncode == 0 and int(done.stdout.split()[-1]) >= count:
            return
        assert time.monotonic() < deadline, f"Ray did not come up: {done.stderr[-2000:]}"
        time.sleep(0.5)


MOVE_A_BATCH = """
import json, sys
import ray, torch
from tensordict import NonTensorStack, TensorDict
from rlplane.config import load_config
from rlplane.factory import build_data_plane_client

address, backend, consumer_ip, producer_ip = sys.argv[1:]
keys = {
    "transfer_queue.ray_address": address,
    "transfer_queue.namespace": backend,
    "num_storage_units": 2,
    "global_segment_size": 64 << 20,
    "local_buffer_size": 4 << 20,
}
client = build_data_plane_client(load_config(backend, keys))

def host(ip):
    return {"num_cpus": 0, "resources": {f"node:{ip}": 0.001}}

class Worker:
    def __init__(self, client):
        self.client = client

    def produce(self):
        rows = [torch.arange(1000 + n, dtype=torch.float32) + n for n in range(256)]
        fields = TensorDict(
            {
                "ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
                "dense": torch.arange(256 * 1024, dtype=torch.int64).reshape(256, 1024),
                "reward": torch.arange(256.0),
                "info": NonTensorStack(*[{"n": n} for n in range(256)]),
            },
            batch_size=[256],
        )
        names = [f"s{n}" for n in range(256)]
        self.client.put_samples(names, "p", fields, [{"input_lengths": 1000 + n} for n in range(256)])
        return ray.util.get_node_ip_address()

    def consume(self):
        got = {}
        for _ in range(2):
            meta = self.client.claim_meta("p", "train", ["ids", "dense", "reward", "info"], 128, timeout_s=60)
            data = self.client.get_data(meta)
            for place, name in enumerate(meta.sample_ids):
                n = int(name[1:])
                assert torch.equal(data["ids"][place], torch.arange(1000 + n, dtype=torch.float32) + n)
                assert torch.equal(data["dense"][place], torch.arange(1024) + 1024 * n)
                assert data["reward"][place] == n and data["info"][place] == {"n": n}
                assert meta.sequence_lengths[place] == 1000 + n
                got[name] = True
            self.client.clear_samples(meta.sample_ids, "p")
        from rlplane.adapters.transfer_queue import _get_local_node_ip
        return len(got), ray.util.get_node_ip_address(), _get_local_node_ip()

client.register_partition("p", ["ids", "dense", "reward", "info"], 256, ["train"])
producer = ray.remote(Worker).options(**host(producer_ip)).remote(client)
consumer = ray.remote(Worker).options(**host(consumer_ip)).remote(client)
consumed = consumer.consume.remote()
produced = ray.get(producer.produce.remote())
count, where, found = ray.get(consumed)
left = client.list_sample_ids("p")
client.close()
print(json.dumps({"produced": produced, "count": count, "consumed": where, "found": found, "left": left}))
"""


@pytest.mark.parametrize("backend", ["cluster-simple", "cluster-mooncake"])
def test_a_batch_that_one_host_writes_is_read_on_another(hosts, backend):
    head, worker = hosts
    before = worker.received()
    arguments = (f"{HEAD}:6379", backend, WORKER, HEAD)
    done = head.run_python("-c", MOVE_A_BATCH, *arguments, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {
        "produced": HEAD,
        "count": 256,
        "consumed": WORKER,
        # The host's name resolves to loopback and there is no route out: this is the cable's own address.
        "found": WORKER,
        "left": [],
    }
    assert worker.received() - before > 3_000_000, "the batch did not travel over the cable"


DRIVER = """
import os, signal, sys
import ray
from rlplane.config import load_config
from rlplane.factory import build_data_plane_client

address, run_dir = sys.argv[1:]
keys = {
    "transfer_queue.ray_address": address,
    "transfer_queue.namespace": "seen",
    "num_storage_units": 2,
    "observability": {"enabled": True, "role": "driver", "run_dir": run_dir, "callback": list().append},
}
with build_data_plane_client(load_config("cluster-simple", keys)) as client:
    client.register_partition("p", ["x"], 64, ["train"])
    print("ready", flush=True)
    for _ in sys.stdin:
        service = ray.get_actor("rlplane.control", namespace="seen")
        os.kill(ray.get(service.pid.remote()), signal.SIGKILL)
        print("killed", flush=True)
"""

FAR_WORKER = """
import asyncio, sys, torch
from tensordict import TensorDict
from rlplane.config import load_config
from rlplane.factory import build_async_data_plane_client, build_data_plane_client

address, role = sys.argv[1:]
keys = {
    "transfer_queue.ray_address": address,
    "transfer_queue.namespace": "seen",
    "observability": {"enabled": True, "role": role, "callback": list().append},
}
cfg = load_config("cluster-simple", keys)
ids, fields = [f"{role}-{n}" for n in range(4)], TensorDict({"x": torch.ones(4, 8)}, [4])

async def put():
    async with build_async_data_plane_client(cfg, bootstrap=False) as client:
        await client.put_samples(ids, "p", fields)

if role == "asyncio":
    asyncio.run(put())
else:
    with build_data_plane_client(cfg, bootstrap=False) as client:
        client.put_samples(ids, "p", fields)
"""


# Another host has other files: what is in the driver's directory is not seen there.
HIDE = 'mount -t tmpfs none "$XDG_RUNTIME_DIR" && exec "$@"'


class Job:
    """A driver on the first host that only switches observability on."""

    def __init__(self, head: Host, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.runtime = tempfile.mkdtemp(prefix="rlp-", dir="/tmp")
        self.environment = {**ENVIRONMENT, "XDG_RUNTIME_DIR": self.runtime}
        for name in ("RLPLANE_METRICS_ADDRESS", "RAY_ADDRESS"):
            self.environment.pop(name, None)
        self.driver = WarmProcess(
            [sys.executable, "-c", DRIVER, f"{HEAD}:6379", str(run_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
            network=head.network,
        )

    def __enter__(self) -> Job:
        assert self.driver.stdout is not None and self.driver.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self.driver.stdin is not None and self.driver.stdout is not None
        self.driver.stdin.close()
        self.driver.wait(120)
        self.driver.stdout.close()
        shutil.rmtree(self.runtime, ignore_errors=True)

    def info(self) -> dict[str, str]:
        (announced,) = Path(self.runtime).glob("rlplane/run-*.json")
        return dict(json.loads(announced.read_text()))

    def kill_service(self) -> None:
        assert self.driver.stdin is not None and self.driver.stdout is not None
        self.driver.stdin.write("kill\n")
        self.driver.stdin.flush()
        assert self.driver.stdout.readline() == "killed\n"

    def on(self, host: Host, *command: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Python's on a host that has none of the driver's files."""
        return subprocess.run(
            host.command("sh", "-c", HIDE, "sh", sys.executable, *command),
            capture_output=True,
            text=True,
            timeout=180,
            env={**self.environment, **extra},
        )


def test_workers_on_another_host_are_seen_by_a_job_that_only_switches_observability_on(hosts, tmp_path):
    head, worker = hosts
    with Job(head, tmp_path / "run") as job:
        inherited = {"RLPLANE_METRICS_ADDRESS": job.info()["events_address"]}
        for role, extra in (("plain", {}), ("inherited", inherited), ("asyncio", {})):
            if role == "asyncio":  # It joins a control service that has died and come back.
                job.kill_service()
            done = job.on(worker, "-c", FAR_WORKER, f"{HEAD}:6379", role, **extra)
            assert done.returncode == 0, done.stderr[-4000:]
        info = job.info()
        assert info["remote_address"].startswith("curve://") and f"@{HEAD}:" in info["remote_address"]
    final = read_run(job.run_dir)
    assert final.state.value == "COMPLETE"
    assert {"driver", "plain", "inherited", "asyncio"} <= {seen.role for seen in final.workers}
    assert final.total("samples_written") == 12


LOOK_AT_THE_PAGE = """
import json, sys, time, urllib.request

base, token = sys.stdin.readline().split()[1].split("?token=")
deadline = time.monotonic() + 120
while True:
    request = urllib.request.Request(f"{base}api/view", headers={"authorization": f"Bearer {token}"})
    view = json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60))
    if "run" in view or time.monotonic() > deadline:
        break
    time.sleep(0.2)
print(json.dumps(view))
"""


def command_lines() -> list[str]:
    """What everybody on the machine can read of every process."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(file.read_text(errors="replace"))
    return lines


def test_viewers_on_another_host_find_the_run_through_ray(hosts, tmp_path):
    head, worker = hosts
    here = {"RAY_ADDRESS": f"{HEAD}:6379"}
    with Job(head, tmp_path / "run") as job:
        job.kill_service()  # What it was told about the run it still knows when it comes back.
        top = job.on(worker, "-m", "rlplane.cli", "top", "--json", "--wait", "60", **here)
        assert top.returncode == 0, top.stderr
        shown, info = json.loads(top.stdout), job.info()
        assert shown["snapshot"]["run_id"] == info["run_id"] and shown["feed"]["state"] == "live"
        report = job.on(worker, "-m", "rlplane.cli", "report", **here)
        assert f"Run {info['run_id']}: LIVE" in report.stdout, report.stderr
        assert report.stderr.splitlines() == [
            f"run {info['run_id']}, which goes on now; for a finished one: rlplane report RUN_DIR"
        ]
        dash = subprocess.Popen(
            worker.command(
                "sh", "-c", HIDE, "sh", sys.executable, "-m", "rlplane.cli", "dash", "--port", "0"
            ),
            stderr=subprocess.PIPE,
            text=True,
            env={**job.environment, **here},
        )
        assert dash.stderr is not None
        try:
            look = worker.command(sys.executable, "-c", LOOK_AT_THE_PAGE)
            page = subprocess.run(
                look, input=dash.stderr.readline(), capture_output=True, text=True, timeout=180
            )
            assert page.returncode == 0, page.stderr
            assert json.loads(page.stdout)["run"]["id"] == info["run_id"]
            lines = command_lines()
        finally:
            dash.send_signal(signal.SIGINT)
            assert dash.wait(60) == 130
            said = dash.stderr.read()
            dash.stderr.close()
        for address in (info["remote_address"], info["remote_snapshots"]):
            keys = address.removeprefix("curve://").partition("@")[0].split(":")
            seen = "".join([top.stdout, top.stderr, report.stdout, report.stderr, page.stdout, said, *lines])
            assert len(keys) == 2 and not any(key in seen for key in keys)


def test_a_viewer_outside_of_the_cluster_says_which_line_to_add(hosts, tmp_path):
    head, worker = hosts
    with Job(head, tmp_path / "run") as job:
        # No address, and no process of Ray's on its host.
        alone = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", HIDE, "sh", sys.executable]
        top = subprocess.run(
            worker.command(*alone, "-m", "rlplane.cli", "top", "--json", "--wait", "1"),
            capture_output=True,
            text=True,
            timeout=180,
            env=job.environment,
        )
        nobody = job.on(worker, "-m", "rlplane.cli", "top", "--json", "--wait", "1", RAY_ADDRESS=f"{HEAD}:1")
    line = 'a job is seen when its config has "observability": {"enabled": True}'
    assert top.returncode == nobody.returncode == 3
    assert top.stderr == f"rlplane: no run found on this machine yet: {line} (waited 1 s)\n"
    assert f"Ray at {HEAD}:1 does not answer" in nobody.stderr and line in nobody.stderr


UNDER_THEIR_CONFIG = """
import importlib, json, os, sys
import ray, torch
from tensordict import TensorDict

address, storage, worker_ip, name = sys.argv[1:]
job = {"env_vars": {"RLPLANE_AS_TRANSFER_QUEUE": os.environ.get("RLPLANE_AS_TRANSFER_QUEUE", "0")}}
ray.init(address=address, log_to_driver=False, logging_level="ERROR", runtime_env=job)
tq = importlib.import_module(name)
table = {"global_segment_size": 64 << 20, "local_buffer_size": 16 << 20} if storage == "MooncakeStore" else {}
tq.init({"backend": {"storage_backend": storage, storage: table}})

class Worker:
    def produce(self):
        tq = importlib.import_module(name)
        tq.init()
        fields = TensorDict({"x": torch.arange(8.0).reshape(4, 2)}, batch_size=4)
        tq.kv_batch_put([f"s{n}" for n in range(4)], "p", fields, [{"n": n} for n in range(4)])
        return ray.util.get_node_ip_address()

placed = ray.remote(Worker).options(num_cpus=0, resources={f"node:{worker_ip}": 0.001}).remote()
where = ray.get(placed.produce.remote())
got = tq.kv_batch_get(["s3", "s1"], "p", ["x"])["x"]
rows = [row.tolist() for row in got.unbind()]
tags = tq.kv_list("p")["p"]
from rlplane.compat.transfer_queue.session import current

backend = current().engine._cfg["backend"]
ray.kill(placed)
tq.close()
print(json.dumps({"where": where, "rows": rows, "tags": tags, "backend": backend}))
"""


@pytest.mark.parametrize("name", ["rlplane.compat.transfer_queue", "transfer_queue"])
@pytest.mark.parametrize(
    ("storage", "backend"), [("SimpleStorage", "simple"), ("MooncakeStore", "mooncake_cpu")]
)
def test_transfer_queues_own_config_uses_the_storage_of_the_cluster_by_itself(hosts, storage, backend, name):
    head, _ = hosts
    arguments = (f"{HEAD}:6379", storage, WORKER, name)
    environment = {**ENVIRONMENT, "RLPLANE_AS_TRANSFER_QUEUE": str(int(name == "transfer_queue"))}
    done = head.run_python("-c", UNDER_THEIR_CONFIG, *arguments, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "where": WORKER,
        "rows": [[6.0, 7.0], [2.0, 3.0]],
        "tags": {f"s{n}": {"n": n} for n in range(4)},
        "backend": backend,
    }
