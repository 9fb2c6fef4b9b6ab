"""The cluster engine beside TransferQueue without it: ``rlplane bench --raw-transfer-queue``.

One Ray, and on it our plane and a plain TransferQueue of the same shape. Both are called from the same
process with the same batches, in turns, so that whatever disturbs the machine disturbs both. With Mooncake
they even share the processes that hold the memory. The plain one is called as its users do:
``kv_batch_put``, ``kv_batch_get``, ``kv_clear``, and ``get_meta`` for a claim.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from rlplane.bench.batches import Batch, make_batches
from rlplane.bench.contestants.ray_cluster import LOOPBACK, end_ray, start_ray
from rlplane.bench.contestants.store import columns_of
from rlplane.bench.plan import MB, Workload

__all__ = ["render", "run"]

TARGET = 1.1
BACKENDS = ("simple", "mooncake_cpu")
_TASK = "bench"
_CLAIM_ROWS, _CLAIM_RESIDENT = 64, 4096
_UNITS = 2


def run(quick: bool = False) -> dict[str, Any]:
    """Measure both backends, and return plain numbers: seconds, and ours divided by theirs."""
    workloads = [
        Workload("grpo-13MB", "GRPO batch, 13 MB: 512 ragged rows × 6 fields", 512, 6, 13 * MB, True),
        Workload("grpo-52MB", "GRPO batch, 52 MB: 512 ragged rows × 6 fields", 512, 6, 52 * MB, True),
        Workload("dense-26MB", "dense batch, 26 MB: 512 rows × 6 fields", 512, 6, 26 * MB, False),
        Workload("rows-8", "8 ragged rows × 6 fields, 0.2 MB", 8, 6, MB // 5, True),
    ]
    if quick:
        workloads = [workloads[0], workloads[3]]
    rounds = 5 if quick else 15
    lines = []
    for backend in BACKENDS:
        with _both(backend) as (ours, theirs):
            for batch in make_batches(workloads).values():
                lines += _measure_batch(backend, batch, ours, theirs, rounds)
            lines.append(_measure_claims(backend, ours, theirs, rounds))
    return {
        "lines": lines,
        "workloads": {workload.name: workload.title for workload in workloads},
        "target": TARGET,
        "load_average": os.getloadavg()[0],
        "cpus": os.cpu_count(),
    }


def render(result: dict[str, Any]) -> str:
    """The figures as lines for people."""
    titles = {**result["workloads"], "claims": f"claim of {_CLAIM_ROWS} out of {_CLAIM_RESIDENT} rows"}
    text = [f"{'':<14}{'':<48}{'op':<7}{'TransferQueue':>14}{'rlplane':>12}{'ratio':>8}"]
    for line in result["lines"]:
        theirs, ours = line["theirs_s"] * 1e3, line["ours_s"] * 1e3
        text.append(
            f"{line['backend']:<14}{titles[line['workload']]:<48}{line['op']:<7}"
            f"{theirs:>11.1f} ms{ours:>9.1f} ms{line['ratio']:>8.2f}"
        )
    judged = [line for line in result["lines"] if line["nbytes"] >= 13 * MB and line["op"] != "clear"]
    worst = max((line["ratio"] for line in judged), default=0.0)
    text.append(f"worst ratio for 13 MB and up: {worst:.2f} (target: at most {result['target']})")
    text.append(f"load average {result['load_average']:.1f} on {result['cpus']} CPUs")
    return "\n".join(text) + "\n"


class _Plain:
    """TransferQueue as it comes."""

    def __init__(self, backend: str, ours: Any) -> None:
        import transfer_queue
        from omegaconf import OmegaConf

        self._tq = transfer_queue
        if backend == "simple":
            storage: dict[str, Any] = {"num_data_storage_units": _UNITS}
            name = "SimpleStorage"
        else:
            # Its process lends no memory either, and finds the units of our plane through their master.
            storage, name = {**ours._plane.tq["backend"], "local_hostname": LOOPBACK}, "MooncakeStore"
        config = {
            "controller": {"polling_mode": True},
            "backend": {"storage_backend": name, name: storage},
        }
        transfer_queue.init(OmegaConf.create(config))

    def put(self, batch: Batch, ids: list[str], form: Any) -> None:
        self._tq.kv_batch_put(keys=ids, partition_id=batch.name, fields=form)

    def get(self, batch: Batch, ids: list[str]) -> Any:
        return self._tq.kv_batch_get(keys=ids, partition_id=batch.name, select_fields=batch.fields)

    def clear(self, batch: Batch, ids: list[str]) -> None:
        self._tq.kv_clear(keys=ids, partition_id=batch.name)

    def fill(self, ids: list[str], rows: Any) -> None:
        self._tq.kv_batch_put(keys=ids, partition_id="claims", fields=rows)

    def claim(self) -> int:
        client = self._tq.get_client()
        meta = client.get_meta(
            data_fields=["x"], batch_size=_CLAIM_ROWS, partition_id="claims", mode="fetch", task_name=_TASK
        )
        return int(meta.size)

    def close(self) -> None:
        self._tq.close()


class _Ours:
    """The same calls through the contract."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, batch: Batch, ids: list[str], form: Any) -> None:
        self._client.put_samples(ids, batch.name, form)

    def get(self, batch: Batch, ids: list[str]) -> Any:
        return self._client.get_samples(ids, batch.name, batch.fields)

    def clear(self, batch: Batch, ids: list[str]) -> None:
        self._client.clear_samples(ids, batch.name)

    def fill(self, ids: list[str], rows: Any) -> None:
        self._client.register_partition("claims", ["x"], len(ids), [_TASK])
        self._client.put_samples(ids, "claims", rows)

    def claim(self) -> int:
        return int(self._client.claim_meta("claims", _TASK, ["x"], _CLAIM_ROWS).size)


@contextlib.contextmanager
def _both(backend: str) -> Iterator[tuple[_Ours, _Plain]]:
    from rlplane.config import load_config
    from rlplane.factory import build_data_plane_client

    name = "cluster-simple" if backend == "simple" else "cluster-mooncake"
    keys = {
        "num_storage_units": _UNITS,
        "global_segment_size": 1 << 30,
        "local_buffer_size": 64 << 20,
        "transfer_queue.node_ip": LOOPBACK,
        "transfer_queue.namespace": "rlplane-bench",
    }
    start_ray(200 << 20)
    try:
        with contextlib.ExitStack() as closing:
            client = build_data_plane_client(load_config(name, keys))
            closing.callback(client.close)
            plain = _Plain(backend, client)
            closing.callback(plain.close)
            yield _Ours(client), plain
    finally:
        end_ray()


def _measure_batch(
    backend: str, batch: Batch, ours: _Ours, theirs: _Plain, rounds: int
) -> list[dict[str, Any]]:
    ours._client.register_partition(batch.name, batch.fields, batch.rows, [_TASK])
    form = batch.tensordict()
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(-2, rounds):
        batch.stamp(number + 2)
        ids = batch.ids(number + 2)
        sides: list[tuple[str, Any]] = [("ours", ours), ("theirs", theirs)]
        for side, engine in sides if number % 2 else reversed(sides):
            took = {"put": _timed(engine.put, batch, ids, form)[0]}
            took["get"], got = _timed(engine.get, batch, ids)
            wrong = batch.difference(columns_of(got), None)
            if wrong:
                raise AssertionError(f"{side} on {backend}: {wrong}")
            del got
            took["clear"] = _timed(engine.clear, batch, ids)[0]
            # The first rounds warm up.
            for op, value in took.items() if number >= 0 else ():
                seconds.setdefault((side, op), []).append(value)
    return [
        _line(backend, batch.name, op, batch.nbytes, seconds["ours", op], seconds["theirs", op])
        for op in ("put", "get", "clear")
    ]


def _measure_claims(backend: str, ours: _Ours, theirs: _Plain, rounds: int) -> dict[str, Any]:
    import torch
    from tensordict import TensorDict

    ids = [f"claim-{number}" for number in range(_CLAIM_RESIDENT)]
    rows = TensorDict({"x": torch.zeros(_CLAIM_RESIDENT, 1)}, batch_size=[_CLAIM_RESIDENT])
    sides: list[tuple[str, Any]] = [("ours", ours), ("theirs", theirs)]
    seconds: dict[str, list[float]] = {side: [] for side, _ in sides}
    for _, engine in sides:
        engine.fill(ids, rows)
        engine.claim()
    for _ in range(min(rounds * 2, _CLAIM_RESIDENT // _CLAIM_ROWS - 2)):
        for side, engine in sides:
            took, size = _timed(engine.claim)
            if size != _CLAIM_ROWS:
                raise AssertionError(f"{side} on {backend} claimed {size} rows instead of {_CLAIM_ROWS}")
            seconds[side].append(took)
    return _line(backend, "claims", "claim", 0, seconds["ours"], seconds["theirs"])


def _timed(call: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call(*args)
    return time.perf_counter() - began, result


def _line(
    backend: str, workload: str, op: str, nbytes: int, ours: list[float], theirs: list[float]
) -> dict[str, Any]:
    # Pairs of one round: what slows the machine down for a while slows down both halves of a pair.
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "backend": backend,
        "workload": workload,
        "op": op,
        "nbytes": nbytes,
        "ours_s": statistics.median(ours),
        "theirs_s": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "rounds": len(ours),
    }
