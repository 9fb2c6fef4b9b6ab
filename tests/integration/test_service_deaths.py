"""The control service may die at any step, and nothing that it has said is lost, done twice or changed."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlplane.adapters.local import shm, supervisor
from rlplane.adapters.local.shm import ShmDataPlaneClient
from rlplane.adapters.local.supervisor import Supervisor
from rlplane.errors import ClaimTimeoutError, PlaneConnectionError
from rlplane.service import parts

CFG: Any = {
    "enabled": True,
    "impl": "local",
    "backend": "shm",
    "storage_capacity": 1000,
    "num_storage_units": 1,
    "claim_meta_poll_interval_s": 0.01,
    "global_segment_size": 64 << 20,
    "local_buffer_size": 1 << 20,
}
FAULTS = [
    *(f"ControlService.{step} {when} {n}"
      for step in ("handle", "_serve", "_claim", "carry_out", "send", "go_on")
      for when in ("before", "after") for n in (1, 3)),
    *(f"ControlService.{step} {when} 1"
      for step in ("connect", "disconnect") for when in ("before", "after")),
    *(f"Journal.{step} {when} 2" for step in ("add", "flush") for when in ("before", "after")),
    *(f"Journal._write {when} {n}" for when in ("before", "torn", "after") for n in (1, 2, 5)),
    *(f"Journal.compact {when} 1" for when in ("before", "after")),
    "Journal.tidy before 9",
    *(f"ShmHost.{step} {when} 1" for step in ("reserve", "shrink", "free") for when in ("before", "after")),
    *(f"Server.{step} {when} 2"
      for step in ("_send_answers", "_send_answer") for when in ("before", "after")),
    *(f"Server._resume {when} {n}" for when in ("before", "after") for n in (1, 2)),
]  # fmt: skip


def batch(ids: list[str], step: int) -> TensorDict:
    return TensorDict({"x": torch.full((len(ids), 4000), step, dtype=torch.int64)}, batch_size=[len(ids)])


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "plan"
    path.write_text("")
    script = Path(__file__).with_name("faulty_service.py")
    command = (sys.executable, str(script), str(path))
    monkeypatch.setattr(shm, "Supervisor", functools.partial(Supervisor, command=command))
    monkeypatch.setattr(supervisor, "_MOST_DEATHS", 10**6)
    return path


@pytest.mark.timeout(240)
def test_killed_at_every_step_nothing_is_lost_done_twice_or_changed(plan: Path) -> None:
    plan.write_text("\n".join(["Journal.tidy before 1000000", *FAULTS]))
    with (
        ShmDataPlaneClient(CFG) as client,
        ThreadPoolExecutor(1) as other,
        ShmDataPlaneClient(worker_config(client), bootstrap=False) as worker,
    ):
        _kill(client)  # the first service has no fault that ever comes
        step = 0
        while plan.read_text():
            step += 1
            assert step < 300, f"these faults were never met: {plan.read_text().splitlines()}"
            _one_cycle(client, worker, other, step)
        _one_cycle(client, worker, other, step + 1)
    assert not Path(str(client.controller_address).removeprefix("shm://")).exists()


@pytest.mark.timeout(240)
def test_killed_at_any_step_of_calls_that_are_several_requests_nothing_is_lost_or_done_twice(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_AT_ONCE", 1)
    faults = [
        *(f"ControlService.handle {when} {n}" for when in ("before", "after") for n in (2, 5, 9)),
        *(f"ControlService.go_on {when} {n}" for when in ("before", "after") for n in (1, 3)),
        *(f"Journal._write {when} {n}" for when in ("before", "torn", "after") for n in (3, 7)),
        *(f"Server._send_answer {when} {n}" for when in ("before", "after") for n in (3, 8)),
    ]
    plan.write_text("\n".join(["Journal.tidy before 1000000", *faults]))
    with (
        ShmDataPlaneClient(CFG) as client,
        ThreadPoolExecutor(1) as other,
        ShmDataPlaneClient(worker_config(client), bootstrap=False) as worker,
    ):
        _kill(client)
        client.register_partition("q", ["x"], 0, ["t"])
        step = 0
        while plan.read_text():
            step += 1
            assert step < 300, f"these faults were never met: {plan.read_text().splitlines()}"
            _one_cycle(client, worker, other, step)
            ids = [f"q{step}_{n}" for n in range(3)]
            worker.put_samples(ids, "q", batch(ids, step), [{"n": n} for n in range(3)])
            worker.unclaim(worker.claim_meta("q", "t", ["x"], 3, timeout_s=60))
            again: Any = client.claim_meta("q", "t", ["x"], 3, timeout_s=60)
            assert again.sample_ids == ids and [tags["n"] for tags in again.tags] == [0, 1, 2]
            assert (client.get_data(again)["x"] == step).all()
            client.finish_claims(again)
            client.clear_samples(ids, "q")
        assert client.list_sample_ids("q") == [] and client.service_status()["leases"] == 0


def _one_cycle(client: Any, worker: Any, other: ThreadPoolExecutor, step: int) -> None:
    client.register_partition("p", ["x", "y"], 4, ["score", "train"])
    ids = [f"s{step}_{n}" for n in range(4)]
    waiting = other.submit(worker.claim_meta, "p", "score", ["x"], 4, timeout_s=60)
    kept = batch(ids[:2], step)
    client.put_samples(ids[:2], "p", kept, tags=[{"step": step}] * 2)
    client.put_samples(ids[2:], "p", batch(ids[2:], step), tags=[{"step": step}] * 2)
    meta = waiting.result(60)
    assert sorted(meta.sample_ids) == sorted(ids)
    assert [tag["step"] for tag in meta.tags] == [step] * 4
    read = worker.get_data(meta)["x"]
    assert (read == step).all()
    worker.put_samples(meta.sample_ids, "p", TensorDict({"y": torch.full((4,), step)}, batch_size=[4]))
    again = client.claim_meta("p", "train", ["x", "y"], 4, timeout_s=60)
    assert sorted(again.sample_ids) == sorted(ids)
    assert client.claim_meta("p", "score", ["x"], 4, blocking=False).sample_ids == []
    client.clear_samples(again.sample_ids, "p")
    assert client.list_sample_ids("p") == []
    client.put_samples([f"t{step}"], "p", batch(["t"], -step))
    assert (read == step).all(), "what was read changed after it was cleared"
    client.clear_samples([f"t{step}"], "p")
    with ShmDataPlaneClient(worker_config(client), bootstrap=False) as visitor:
        assert visitor.list_sample_ids("p") == []


def _client(*, bootstrap: bool = True, **keys: Any) -> ShmDataPlaneClient:
    cfg: Any = {**CFG, **keys}
    return ShmDataPlaneClient(cfg, bootstrap=bootstrap)


def worker_config(client: Any) -> Any:
    return {**CFG, "controller_address": client.controller_address}


def _kill(client: Any, number: int = signal.SIGKILL) -> int:
    pid: int = client.service_status()["pid"]
    os.kill(pid, number)
    return pid


@pytest.fixture
def stoppable() -> Iterator[tuple[Any, Any]]:
    """A bootstrap client that is patient, and a worker that is not."""
    with ShmDataPlaneClient(CFG) as client:
        client.register_partition("p", ["x"], 10**6, ["t"])
        impatient: Any = {**worker_config(client), "ack_timeout_ms": 300}
        with ShmDataPlaneClient(impatient, bootstrap=False) as worker:
            worker.partition_status("p")
            yield client, worker


def test_a_claim_that_a_stopped_service_did_not_answer_has_claimed_nothing(
    stoppable: tuple[Any, Any],
) -> None:
    client, worker = stoppable
    client.put_samples(["a", "b"], "p", batch(["a", "b"], 1))
    pid = _kill(client, signal.SIGSTOP)
    with pytest.raises(PlaneConnectionError):
        worker.claim_meta("p", "t", ["x"], 2, blocking=False)
    os.kill(pid, signal.SIGCONT)
    assert client.claim_meta("p", "t", ["x"], 2, timeout_s=120).sample_ids == ["a", "b"]


def test_a_put_that_a_stopped_service_did_not_answer_is_not_visible(stoppable: tuple[Any, Any]) -> None:
    client, worker = stoppable
    worker.put_samples(["first"], "p", batch(["first"], 1))  # so that the next one has a spare place
    pid = _kill(client, signal.SIGSTOP)
    with pytest.raises(PlaneConnectionError):
        worker.put_samples(["lost"], "p", batch(["lost"], 2), timeout_s=0.2)
    os.kill(pid, signal.SIGCONT)
    worker.put_samples(["next"], "p", batch(["next"], 3))
    assert client.list_sample_ids("p") == ["first", "next"]


def test_a_waiting_claim_that_gave_up_swallows_nothing(stoppable: tuple[Any, Any]) -> None:
    client, worker = stoppable
    failed: list[Exception] = []

    def claim() -> None:
        try:
            worker.claim_meta("p", "t", ["x"], 2, timeout_s=1.0)
        except (PlaneConnectionError, ClaimTimeoutError) as error:
            failed.append(error)

    waiting = threading.Thread(target=claim)
    waiting.start()
    while not client.partition_status("p")["tasks"]["t"]["waiting"]:
        time.sleep(0.01)
    pid = _kill(client, signal.SIGSTOP)
    waiting.join(120)
    assert len(failed) == 1
    os.kill(pid, signal.SIGCONT)
    client.put_samples(["a", "b"], "p", batch(["a", "b"], 1))
    assert client.claim_meta("p", "t", ["x"], 2, timeout_s=120).sample_ids == ["a", "b"]


def test_a_client_that_only_computes_is_not_taken_for_dead_after_a_restart() -> None:
    with (
        _client(reconnect_timeout_s=6.0) as client,
        ShmDataPlaneClient(worker_config(client), bootstrap=False) as worker,
    ):
        client.register_partition("p", ["x"], 10, ["t"])
        client.put_samples(["a"], "p", batch(["a"], 1))
        held = worker.get_data(worker.claim_meta("p", "t", ["x"], 1))["x"]
        _kill(client)
        client.clear_samples(["a"], "p")
        time.sleep(6.5)  # longer than a client may stay away
        for step in range(2, 8):
            client.put_samples([f"b{step}"], "p", batch(["b"], step))
        assert (held == 1).all()
        worker.put_samples(["c"], "p", batch(["c"], 1))
        assert client.service_status()["clients"] == 2


def test_a_client_that_closes_while_the_service_is_started_again_is_not_waited_for() -> None:
    with _client(reconnect_timeout_s=600.0) as client:
        client.register_partition("p", ["x"], 10, ["t"])
        client.put_samples(["a"], "p", batch(["a"], 1))
        worker = ShmDataPlaneClient(worker_config(client), bootstrap=False)
        worker.claim_meta("p", "t", ["x"], 1)
        _kill(client)
        lifeline = worker._link().connection._lifeline  # type: ignore[attr-defined]
        while lifeline.is_alive():
            time.sleep(0.001)
        worker.close()
        assert client.claim_meta("p", "t", ["x"], 1, timeout_s=60).sample_ids == ["a"]


@pytest.mark.parametrize("keys", [{"reconnect_timeout_s": 0}, {"journal": False}])
def test_without_reconnecting_a_death_is_an_error_at_once_and_leaves_nothing(keys: dict[str, Any]) -> None:
    client = _client(**keys)
    worker = ShmDataPlaneClient(worker_config(client), bootstrap=False)
    path = Path(str(client.controller_address).removeprefix("shm://"))
    client.register_partition("p", ["x"], 10, ["t"])
    waiting: list[Exception] = []

    def claim() -> None:
        try:
            worker.claim_meta("p", "t", ["x"], 2, timeout_s=60)
        except PlaneConnectionError as error:
            waiting.append(error)

    thread = threading.Thread(target=claim)
    thread.start()
    while not client.partition_status("p")["tasks"]["t"]["waiting"]:
        time.sleep(0.01)
    _kill(client)
    thread.join(120)
    assert len(waiting) == 1
    assert not path.exists()
    with pytest.raises(PlaneConnectionError):
        client.list_sample_ids("p")
    worker.close()
    client.close()


def test_a_served_plane_survives_its_service_and_ends_with_a_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlplane.cli", "serve", "shm", f"journal_dir={tmp_path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        address = served.stdout.readline().strip()
        with _client(bootstrap=False, controller_address=address) as client:
            client.register_partition("p", ["x"], 10, ["t"])
            client.put_samples(["a"], "p", batch(["a"], 1))
            _kill(client)
            assert client.list_sample_ids("p") == ["a"]
        assert list(tmp_path.iterdir())
        served.send_signal(signal.SIGTERM)
        assert served.wait(20) == 0
    assert not Path(address.removeprefix("shm://")).exists()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_child_that_is_forked_while_the_service_is_started_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has the pipe over which the service says that it is ready."""
    children = []
    start = subprocess.Popen

    def start_and_fork(*args: Any, **kwargs: Any) -> Any:
        child = os.fork()
        if not child:
            time.sleep(600)
            os._exit(0)
        children.append(child)
        return start(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", start_and_fork)
    try:
        with ThreadPoolExecutor() as pool:
            client = pool.submit(_client).result(60)
            client.register_partition("p", ["x"], 10, ["t"])
            for deaths in (2, 3):
                _kill(client)
                assert client.list_sample_ids("p") == []
                assert len(children) == deaths
            pool.submit(client.close).result(60)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
