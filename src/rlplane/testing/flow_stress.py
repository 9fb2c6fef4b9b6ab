"""Flow control under stress: rollouts that are four times faster than the trainer, a tenth of the prompts ten
times slower than the others, and a job that is killed as a whole and resumes from its checkpoint.

A job is a process that starts the plane and the rollout workers, and trains. A step is told in the plane
before anything else happens to its groups, so that any checkpoint says which groups were trained.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from rlplane.adapters.checkpoint import latest_checkpoint
from rlplane.atomic_file import write_atomically
from rlplane.control.policies import FlowPolicy
from rlplane.errors import ClaimTimeoutError, UnknownPartitionError
from rlplane.factory import build_data_plane_client
from rlplane.interfaces import ADDRESS_VARIABLE, DataPlaneClient, DataPlaneConfig
from rlplane.testing.stress import context

PROMPTS, STEPS = "flow", "steps"
_GROUP, _BATCH, _BOUND, _ROLLOUTS = 4, 4, 1, 3
_GENERATION_S = 0.03
_TRAINING_S = 4 * _BATCH * _GENERATION_S / _ROLLOUTS
_SLOWNESS = 10
_PATIENCE_S = 300.0

POLICIES = {
    "windowed": FlowPolicy.windowed(_BOUND),
    "ready_first": FlowPolicy.ready_first(_BOUND, _BATCH),
    "weight_fifo": FlowPolicy.weight_fifo(_BOUND, _BATCH),
    "in_order": FlowPolicy.in_order(_BOUND, _BATCH),
}


@dataclass(frozen=True)
class FlowStressReport:
    """What was tried, how often, and what held. Groups are counted, not samples."""

    policy: str
    engine: str
    seconds: float
    kills: int
    issued: int
    slow: int
    trained: int
    evicted: int
    late: int
    too_old: int
    starved: int
    twice: int
    uncounted: int
    failed: int

    @property
    def held(self) -> bool:
        """Whether the policy kept what it promises, across all deaths."""
        return not (self.too_old or self.starved or self.twice or self.uncounted or self.failed)

    def row(self) -> str:
        """A row of the table of ``docs/reliability.md``."""
        tried = (
            f"`{self.policy}`, bound {_BOUND}, for {self.seconds:.0f} s on {self.engine}: rollouts four times"
            f" faster than the trainer, a tenth of the groups ten times slower; SIGKILL of the whole job, and"
            f" a resume from the checkpoint that the plane saved by itself"
        )
        result = (
            f"{self.issued:,} prompts ({self.slow:,} slow), {self.trained:,} groups trained,"
            f" {self.evicted:,} evicted and told; {self.too_old} older than the bound,"
            f" {self.starved} starved, {self.twice} twice, {self.uncounted} not accounted for,"
            f" {self.failed} processes failed"
        )
        if self.late:
            result += f"; {self.late} trained late, as the policy says"
        return f"| {tried} | {self.kills} | {result} |"


def run_flow_stress(
    cfg: DataPlaneConfig,
    policy: str,
    seconds: float,
    *,
    kill_every_s: float = 5.0,
    say: Callable[[str], None] = lambda _: None,
) -> FlowStressReport:
    """Run a job under ``policy``, kill it as a whole every few seconds (once at least), and count."""
    with tempfile.TemporaryDirectory(prefix="rlplane-stress-") as name:
        books = Path(name)
        saved = {"dir": str(books / "checkpoints"), "every_s": 0.25, "keep": 2}
        begin, kills, failed = time.monotonic(), 0, 0
        while True:
            job = _Job({**cfg, "checkpoint": saved}, books, policy)
            is_last = kills > 0 and time.monotonic() - begin >= seconds
            failed += job.wait_for_a_checkpoint_and_steps()
            if is_last:
                break
            time.sleep(min(kill_every_s, max(seconds - (time.monotonic() - begin), 0.0)))
            job.kill()
            kills += 1
            say(f"{policy}: {kills} kills, {len(_steps(books))} steps")
        (books / "stop").touch()
        failed += job.join()
        return _counted(books, policy, cfg["backend"], time.monotonic() - begin, kills, failed)


class _Job:
    """One life of a job: its processes, seen from outside."""

    def __init__(self, cfg: Any, books: Path, policy: str) -> None:
        self._books = books
        self._newest = latest_checkpoint(books / "checkpoints")
        self._process = context.Process(target=_train, args=(cfg, books, policy))
        self._process.start()

    def wait_for_a_checkpoint_and_steps(self) -> int:
        """Until it has trained and saved something that a later life can go on with; how many failed."""
        deadline = time.monotonic() + _PATIENCE_S
        seen = len(_steps(self._books))
        while latest_checkpoint(self._books / "checkpoints") == self._newest or (
            len(_steps(self._books)) < seen + 3
        ):
            if time.monotonic() > deadline or self._process.exitcode is not None:
                return 1
            time.sleep(0.02)
        return 0

    def kill(self) -> None:
        """SIGKILL to every process, those first who would start others again: the trainer, and its Ray."""
        assert self._process.pid is not None
        for pid in _with_all_below(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.join()

    def join(self) -> int:
        """Wait for its end; how many processes did not end well."""
        self._process.join(_PATIENCE_S)
        if self._process.exitcode is None:
            self.kill()
        return abs(self._process.exitcode or 0)


def _with_all_below(pid: int) -> list[int]:
    """A process, those that it has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The second field is the command in parentheses, which may have spaces in it.
            above = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(above, []).append(int(path.parent.name))
    found = [pid]
    for above in found:
        found += children.get(above, [])
    return found


def _counted(
    books: Path, policy: str, engine: str, seconds: float, kills: int, failed: int
) -> FlowStressReport:
    late = sum(map(int, _steps(books)))
    end = books / "end.json"
    result = json.loads(end.read_text()) if end.exists() else None
    if result is None:
        return FlowStressReport(policy, engine, seconds, kills, 0, 0, 0, 0, late, 0, 0, 0, 0, failed + 1)
    trained = [_number(name) for name in result["trained"]]
    issued = range(result["issued"])
    may_be_late = policy in ("ready_first", "weight_fifo")
    rows = _GROUP * (len(trained) + len(result["live"])) + result["evicted"]
    never = set(issued) - set(trained)
    return FlowStressReport(
        policy,
        engine,
        seconds,
        kills,
        len(issued),
        sum(map(_is_slow, issued)),
        len(trained),
        result["evicted"] // _GROUP,
        late=late if may_be_late else 0,
        too_old=0 if may_be_late else late,
        starved=len(never) if POLICIES[policy].is_gated else 0,
        twice=len(trained) - len(set(trained)),
        uncounted=abs(result["written"] - rows) + abs(result["untold"]) + len(result["live"]),
        failed=failed,
    )


def _steps(books: Path) -> list[str]:
    """A line for every claim of every life: how many groups were older than the bound."""
    book = books / "claims.book"
    return [line for line in book.read_text().split("\n") if line] if book.exists() else []


def _number(name: str) -> int:
    """The number of a prompt: 7 of ``p7``, or of ``p7.2``, which was issued again, or of ``p7.2_g0``."""
    return int(name.partition("_")[0].partition(".")[0][1:])


def _next_name(name: str) -> str:
    """Another name for a prompt that is issued again: a late write must not reach it."""
    number, _, attempt = name.partition(".")
    return f"{number}.{int(attempt or 0) + 1}"


def _is_slow(number: int) -> bool:
    return zlib.crc32(str(number).encode()) % 10 == 0


def _roll_out(cfg: Any) -> None:
    torch.set_num_threads(1)
    with build_data_plane_client(cfg, bootstrap=False) as client:
        while _roll_out_one(client):
            pass


def _roll_out_one(client: DataPlaneClient) -> bool:
    """Generate one group; False when there will be no more."""
    try:
        meta = client.claim_meta(PROMPTS, "rollout", ["prompt"], _GROUP, timeout_s=1.0)
    except ClaimTimeoutError:
        return True
    if not meta.size:
        return False
    version = client.partition_status(PROMPTS)["flow"]["version"]
    time.sleep(_GENERATION_S * (_SLOWNESS if _is_slow(_number(meta.sample_ids[0])) else 1))
    rows = TensorDict({"response": torch.zeros(meta.size, 16)}, [meta.size])
    client.put_samples(
        meta.sample_ids, PROMPTS, rows, [{"weight_version": version}] * meta.size, must_exist=True
    )
    return True


def _train(cfg: Any, books: Path, policy: str) -> None:
    torch.set_num_threads(1)
    saved = latest_checkpoint(books / "checkpoints")
    plane: Any = build_data_plane_client(_with_own_ray(cfg, books))
    with plane as client:
        trainer = _Trainer(client, books)
        trainer.open(policy, saved)
        # On a cluster, rollouts find the Ray of this process because they are its children.
        address = getattr(client, "controller_address", None)
        joining = {**cfg, **({"controller_address": address} if address else {})}
        rollouts = [context.Process(target=_roll_out, args=(joining,)) for _ in range(_ROLLOUTS)]
        for process in rollouts:
            process.start()
        while trainer.step():
            pass
        for process in rollouts:
            process.join(_PATIENCE_S)
        trainer.write_end()
    sys.exit(sum(process.exitcode != 0 for process in rollouts))


def _with_own_ray(cfg: Any, books: Path) -> Any:
    """On a cluster, with a Ray that is started with the job and dies with it. Nobody who is killed removes
    his journal, so it is where the books are."""
    if cfg["impl"] != "transfer_queue":
        return cfg
    os.environ.pop(ADDRESS_VARIABLE, None)  # of another Ray; rollouts inherit that of this one
    options = {**cfg["transfer_queue"], "ray_address": "local"}
    return {**cfg, "journal_dir": str(books), "transfer_queue": options}


class _Trainer:
    """Trains, feeds prompts, and issues again what was evicted."""

    def __init__(self, client: DataPlaneClient, books: Path) -> None:
        self.client, self._books = client, books
        self._book = open(books / "claims.book", "a")  # noqa: SIM115
        self._stop = books / "stop"
        self.version = self.issued = 0
        self.told = self.told_before = 0
        self.trained: list[str] = []
        self.is_finishing = False

    def open(self, policy: str, saved: Path | None) -> None:
        """Register the partitions, or go on with a checkpoint, at whatever moment it was saved."""
        try:
            if saved is not None:
                self.client.load_checkpoint(str(saved), release_claims=True)
                self._go_on()
                return
        except UnknownPartitionError:
            pass  # it was saved before there were any
        flow, tasks = POLICIES[policy], ["rollout", "train"]
        self.client.register_partition(PROMPTS, ["prompt", "response"], 0, tasks, _GROUP, flow=flow)
        self.client.register_partition(STEPS, [], 0, [])

    def _go_on(self) -> None:
        steps = self.client.peek_meta(STEPS).tags or []
        self.trained = [name for step in steps for name in step["groups"]]
        self.version = len(steps)
        self.client.advance_version(PROMPTS, self.version)
        done = set(self.trained)
        evicted = self._take_evicted()
        self.told_before = self._evicted() - self.told
        live = list(dict.fromkeys(map(_group, self.client.list_sample_ids(PROMPTS))))
        used = [f"{name}_g{n}" for name in live if name in done for n in range(_GROUP)]
        if used:
            # Claimed before they are cleared, so that they count as trained, and not as failed.
            self.client.put_samples(used, PROMPTS, None, [{"used": True}] * len(used))
            self.client.claim_meta(PROMPTS, "train", [], len(used), blocking=False, where={"used": True})
            self.client.clear_samples(used, PROMPTS)
        numbers = {*map(_number, done), *map(_number, live)}
        self.issued = max(numbers, default=-1) + 1
        self.issued = max([self.issued, *(_number(name) + 1 for name in evicted)])
        # Nobody who knew a name from before is alive.
        self._issue(f"p{number}" for number in range(self.issued) if number not in numbers)

    def _evicted(self) -> int:
        return sum(self.client.partition_status(PROMPTS)["flow"]["evicted"].values())

    def _take_evicted(self) -> list[str]:
        """The groups that were evicted, each told once."""
        ids = self.client.evicted_meta(PROMPTS).sample_ids
        self.told += len(ids)
        return list(dict.fromkeys(map(_group, ids)))

    def _issue(self, names: Iterable[str]) -> None:
        ids = [f"{name}_g{n}" for name in names for n in range(_GROUP)]
        if ids:
            rows = TensorDict({"prompt": torch.zeros(len(ids))}, [len(ids)])
            self.client.put_samples(ids, PROMPTS, rows)

    def _feed(self) -> None:
        """Issue what was evicted again, and new prompts, so that rollouts never lack any."""
        evicted = self._take_evicted()
        if self.is_finishing:
            return
        self._issue(_next_name(name) for name in evicted)
        if self.client.partition_status(PROMPTS)["tasks"]["rollout"]["unclaimed"] < 4 * _BATCH * _GROUP:
            first, self.issued = self.issued, self.issued + 4 * _BATCH
            self._issue(f"p{number}" for number in range(first, self.issued))
        if self._stop.exists():
            self.is_finishing = True
            self.client.finish_partition(PROMPTS)

    def step(self) -> bool:
        """Train one batch; False when there is nothing left."""
        self._feed()
        try:
            batch = self.client.claim_meta(PROMPTS, "train", ["response"], _BATCH * _GROUP, timeout_s=0.5)
        except ClaimTimeoutError:
            return True
        if not batch.size:
            return False
        ages = [self.version - tag["weight_version"] for tag in batch.tags or []]
        self._book.write(f"{sum(age > _BOUND for age in ages) // _GROUP}\n")
        self._book.flush()
        time.sleep(_TRAINING_S)
        groups = list(dict.fromkeys(map(_group, batch.sample_ids)))
        self.client.put_samples([f"s{self.version}"], STEPS, None, [{"groups": groups}])
        self.trained += groups
        self.version += 1
        self.client.advance_version(PROMPTS, self.version)
        self.client.clear_samples(batch.sample_ids, PROMPTS)
        return True

    def write_end(self) -> None:
        """Say what is there in the end, as the plane tells it."""
        self._take_evicted()
        status = self.client.partition_status(PROMPTS)
        end = {
            "trained": self.trained,
            "issued": self.issued,
            "live": self.client.list_sample_ids(PROMPTS),
            "written": status["written"],
            "evicted": self._evicted(),
            "untold": self._evicted() - self.told_before - self.told,
        }
        write_atomically(self._books / "end.json", json.dumps(end).encode())


def _group(sample_id: str) -> str:
    return sample_id.rpartition("_g")[0]
