"""A plane under stress: processes produce, score and train while the control service is killed repeatedly.

At the end everything that was committed must have been trained on or be in the plane still, once, with the
bytes that were written.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from rlplane.errors import ClaimTimeoutError, DataPlaneError
from rlplane.factory import build_data_plane_client
from rlplane.interfaces import DataPlaneConfig

PARTITION = "stress"
_ROWS = 8
_PRODUCERS, _SCORERS, _TRAINERS = 3, 3, 2
# Processes start from one that has torch loaded already.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["rlplane.testing.stress"])


@dataclass(frozen=True)
class StressReport:
    """What was tried, how often, and what held."""

    engine: str
    seconds: float
    processes: int
    kills: int
    committed: int
    trained: int
    left: int
    lost: int
    twice: int
    changed: int
    failed_calls: int
    longest_call_s: float
    pauses_s: tuple[float, ...] = ()  # from each kill to the next answer of the plane

    @property
    def held(self) -> bool:
        """Whether nothing was lost, handed out twice or changed, and no call failed."""
        return not (self.lost or self.twice or self.changed or self.failed_calls)

    def row(self) -> str:
        """A row of the table of ``docs/reliability.md``."""
        tried = f"{self.processes} processes for {self.seconds:.0f} s on {self.engine}"
        result = (
            f"{self.committed:,} samples committed: {self.lost} lost, {self.twice} twice,"
            f" {self.changed} changed, {self.failed_calls} calls failed;"
            f" longest call {self.longest_call_s:.2f} s; from the kill to the next answer"
            f" {statistics.median(self.pauses_s or (0.0,)):.2f} s in the middle,"
            f" {max(self.pauses_s, default=0.0):.2f} s at most"
        )
        return f"| SIGKILL of the control service, {tried} | {self.kills} | {result} |"


def run_stress(
    cfg: DataPlaneConfig,
    seconds: float,
    *,
    kill_every_s: float = 2.0,
    say: Callable[[str], None] = lambda _: None,
) -> StressReport:
    """Stress the plane of ``cfg``, which is started for that, and count."""
    with (
        tempfile.TemporaryDirectory(prefix="rlplane-stress-") as name,
        build_data_plane_client(cfg) as client,
    ):
        books = Path(name)
        client.register_partition(PARTITION, ["tokens", "score"], 10**9, ["score", "train"])
        address = getattr(client, "controller_address", None)
        worker_cfg: Any = {**cfg, **({"controller_address": address} if address else {})}
        roles = [_produce] * _PRODUCERS + [_score] * _SCORERS + [_train] * _TRAINERS
        workers = [
            context.Process(target=_work, args=(role, worker_cfg, number, books), daemon=True)
            for number, role in enumerate(roles)
        ]
        for worker in workers:
            worker.start()
        while len(list(books.glob("*.ready"))) < len(workers):
            time.sleep(0.05)
        pauses: list[float] = []
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            time.sleep(min(kill_every_s, max(seconds - (time.monotonic() - begin), 0.01)))
            os.kill(client.service_status()["pid"], signal.SIGKILL)  # type: ignore[attr-defined]
            killed = time.monotonic()
            here = len(client.list_sample_ids(PARTITION))
            pauses.append(time.monotonic() - killed)
            say(f"{len(pauses)} kills, {here:,} samples in the plane, a pause of {pauses[-1]:.2f} s")
        (books / "stop").touch()
        for worker in workers:
            worker.join(120)
            if worker.is_alive():
                worker.kill()
        left = client.list_sample_ids(PARTITION)
        changed = 0
        for at in range(0, len(left), 256):
            some = left[at : at + 256]
            changed += _wrong_rows(some, client.get_samples(some, PARTITION, ["tokens"]))
        crashed = sum(worker.exitcode != 0 for worker in workers)
        return _counted(books, cfg["backend"], seconds, tuple(pauses), left, changed, crashed)


def _counted(
    books: Path,
    engine: str,
    seconds: float,
    pauses: tuple[float, ...],
    left: list[str],
    changed: int,
    crashed: int,
) -> StressReport:
    lines = [line.split() for path in books.glob("*.book") for line in path.read_text().splitlines()]
    committed = {name for kind, name in lines if kind == "committed"}
    trained = Counter(name for kind, name in lines if kind == "trained")
    seen = Counter(left) + trained
    return StressReport(
        engine,
        seconds,
        _PRODUCERS + _SCORERS + _TRAINERS,
        len(pauses),
        len(committed),
        len(trained),
        len(left),
        lost=len(committed - seen.keys()),
        twice=sum(count > 1 for count in seen.values()),
        changed=changed + sum(kind == "changed" for kind, _ in lines),
        failed_calls=crashed + sum(kind == "failed" for kind, _ in lines),
        longest_call_s=max((float(value) for kind, value in lines if kind == "longest"), default=0.0),
        pauses_s=pauses,
    )


class _Worker:
    """One process: its client, and a book of what it has seen."""

    def __init__(self, cfg: Any, number: int, books: Path) -> None:
        self.number, self._stop = number, books / "stop"
        self._book = open(books / f"{number}.book", "w")  # noqa: SIM115
        self.client = build_data_plane_client(cfg, bootstrap=False)
        self.longest = 0.0
        (books / f"{number}.ready").touch()

    @property
    def stopped(self) -> bool:
        return self._stop.exists()

    def note(self, kind: str, names: list[str]) -> None:
        self._book.writelines(f"{kind} {name}\n" for name in names)
        self._book.flush()

    def timed(self, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """A call that waits for nobody but the service."""
        begin = time.monotonic()
        result = call(*args, **more)
        self.longest = max(self.longest, time.monotonic() - begin)
        return result

    def close(self) -> None:
        self.client.close()
        self.note("longest", [str(self.longest)])
        self._book.close()


def _work(role: Callable[[_Worker], None], cfg: Any, number: int, books: Path) -> None:
    torch.set_num_threads(1)
    worker = _Worker(cfg, number, books)
    try:
        role(worker)
    except DataPlaneError as error:
        worker.note("failed", [type(error).__name__])
    finally:
        worker.close()


def _produce(worker: _Worker) -> None:
    step = 0
    while not worker.stopped:
        step += 1
        ids = [f"{worker.number}-{step}-{row}" for row in range(_ROWS)]
        if len(worker.timed(worker.client.list_sample_ids, PARTITION)) > 2000:
            time.sleep(0.01)
            continue
        worker.timed(worker.client.put_samples, ids, PARTITION, _tokens(ids))
        worker.note("committed", ids)


def _score(worker: _Worker) -> None:
    while not worker.stopped:
        try:
            meta = worker.client.claim_meta(PARTITION, "score", ["tokens"], _ROWS, timeout_s=0.5)
        except ClaimTimeoutError:
            continue
        data = worker.timed(worker.client.get_data, meta)
        worker.note("changed", ["score"] * _wrong_rows(meta.sample_ids, data))
        score = TensorDict({"score": data["tokens"].sum(-1)}, batch_size=[meta.size])
        worker.timed(worker.client.put_samples, meta.sample_ids, PARTITION, score)


def _train(worker: _Worker) -> None:
    while not worker.stopped:
        try:
            meta = worker.client.claim_meta(PARTITION, "train", ["tokens", "score"], _ROWS, timeout_s=0.5)
        except ClaimTimeoutError:
            continue
        data = worker.timed(worker.client.get_data, meta)
        wrong = _wrong_rows(meta.sample_ids, data)
        wrong += int((data["score"] != data["tokens"].sum(-1)).sum())
        worker.note("changed", ["train"] * wrong)
        worker.timed(worker.client.clear_samples, meta.sample_ids, PARTITION)
        worker.note("trained", meta.sample_ids)


def _tokens(ids: list[str]) -> TensorDict:
    first = torch.tensor([[sum(map(ord, name)) * 7 + len(name)] for name in ids])
    return TensorDict({"tokens": first + torch.arange(512)}, batch_size=[len(ids)])


def _wrong_rows(ids: list[str], data: TensorDict) -> int:
    return int((data["tokens"] != _tokens(ids)["tokens"]).any(-1).sum())
