"""What observability costs an operation: ``rlplane bench --observability``.

The same put is done by the bare client, by our wrapper, and by one with the cost model of the documented
implementation: the bytes summed up and a dictionary entry updated for every key, on the operation's path.
They alternate, put by put, with new ids each time, as in a training job.

An engine that does nothing shows what the wrapper itself adds. The engine in shared memory shows what
that is of a real put, and what ``verify`` adds to a put and a get. ``background`` is what the wrapper's
thread uses beside it, per put, in CPU time: on one of the other cores, or while the put waits for its copy.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict
from torch.nested._internal.nested_tensor import NestedTensor

from rlplane.config import load_config
from rlplane.factory import build_data_plane_client
from rlplane.interfaces import DataPlaneClient, KVBatchMeta
from rlplane.observability import MetricsDataPlaneClient
from rlplane_benchmarks.batches import BYTES_PER_TOKEN, GRPO_FIELDS, grpo_batch, touch, words_of
from rlplane_benchmarks.plan import Workload

__all__ = ["render", "run"]

TARGETS = {"put_of_8_rows_us": 5.0, "put_of_512_rows_percent": 1.0}

_MEAN_TOKENS = 1024  # of an answer: 13 MB in 512 rows


def run(quick: bool = False) -> dict[str, Any]:
    """Measure, and return plain numbers. ``quick`` takes a few seconds."""
    puts = 600 if quick else 4000
    result: dict[str, Any] = {
        "wrapper": {rows: _compare(_Nothing(), rows, puts) for rows in (8, 512)},
        "shm": {},
        "verify": {},
        "targets": TARGETS,
        "load_average": os.getloadavg()[0],
        "cpus": os.cpu_count(),
    }
    for rows, count in ((8, puts // 4), (512, puts // 20)):
        overrides = {"controller_address": f"ipc:///tmp/rlplane-bench-{uuid.uuid4().hex[:12]}"}
        engine = build_data_plane_client(load_config("shm", overrides))
        try:
            result["shm"][rows] = _compare(engine, rows, max(count, 30))
            result["verify"][rows] = _verified(overrides, engine, rows, max(count // 4, 30))
        finally:
            engine.close()
    added = {rows: result["wrapper"][rows]["observed"]["added_us"] for rows in (8, 512)}
    whole = result["shm"][512]["bare"]["median_us"]
    result["put_of_8_rows_us"] = added[8]
    result["put_of_512_rows_percent"] = 100 * added[512] / whole
    result["met"] = {name: result[name] <= limit for name, limit in TARGETS.items()}
    return result


def render(result: Mapping[str, Any]) -> str:
    """The figures as lines for people."""
    lines = ["Cost of observability, on the path of a put (median; 6 ragged fields)", ""]
    lines.append(f"{'':38}{'bare':>12}{'observed':>12}{'described':>12}")
    for name, title in (("wrapper", "an engine that does nothing"), ("shm", "shared memory")):
        for rows, cell in sorted(result[name].items()):
            values = "".join(
                f"{cell[who]['median_us']:>9.1f} µs" for who in ("bare", "observed", "described")
            )
            lines.append(f"{f'{title}, {rows} rows':38}{values}")
    lines += ["", f"{'with verify, shared memory':38}{'put':>12}{'verified':>12}{'get':>12}{'verified':>12}"]
    for rows, cell in sorted(result["verify"].items()):
        times = (cell[op][who] for op in ("put", "get") for who in ("plain_us", "verified_us"))
        lines.append(f"{f'{rows} rows':38}" + "".join(f"{time:>9.1f} µs" for time in times))
    small, large = result["wrapper"][8]["observed"], result["wrapper"][512]["observed"]
    peer = {rows: result["wrapper"][rows]["described"]["added_us"] for rows in (8, 512)}
    share = result["put_of_512_rows_percent"]
    lines += [
        "",
        f"added to a put of 8 rows     {small['added_us']:8.2f} µs"
        f"  (target ≤ 5 µs; described: {peer[8]:.1f} µs)",
        f"added to a put of 512 rows   {large['added_us']:8.2f} µs  = {share:.2f} % of {_ms(result)} ms"
        f"  (target ≤ 1 %; described: {peer[512]:.1f} µs)",
        f"background, per put          {small['background_us']:8.2f} µs of CPU for 8 rows,"
        f" {large['background_us']:.1f} µs for 512",
        f"load average {result['load_average']:.2f} on {result['cpus']} cores",
    ]
    return "\n".join(lines)


def _ms(result: Mapping[str, Any]) -> str:
    return f"{result['shm'][512]['bare']['median_us'] / 1e3:.2f}"


def _compare(engine: DataPlaneClient, rows: int, puts: int) -> dict[str, Any]:
    fields = _batch(rows)
    engine.register_partition("bench", list(GRPO_FIELDS), 0, [])
    observed = MetricsDataPlaneClient(engine)
    clients = {"bare": engine, "observed": observed, "described": _Described(engine)}
    times: dict[str, list[float]] = {name: [] for name in clients}
    gc.collect()
    gc.disable()  # A collection would be counted for whichever of the three it happened in.
    try:
        for turn in range(puts + 20):
            for name, client in clients.items():
                ids = [f"{name}-{turn}-{row}" for row in range(rows)]
                began = time.perf_counter()
                client.put_samples(ids, "bench", fields)
                ended = time.perf_counter()
                client.clear_samples(ids, "bench")
                if turn >= 20:
                    times[name].append(ended - began)
    finally:
        gc.enable()
    medians = {name: statistics.median(values) * 1e6 for name, values in times.items()}
    result = {
        name: {"median_us": median, "added_us": median - medians["bare"]} for name, median in medians.items()
    }
    result["observed"]["background_us"] = _background_us(observed, fields, rows)
    # Not ``observed.close()``: the engine is used by the others too.
    observed._dispatcher.close()
    return result


def _verified(
    overrides: Mapping[str, Any], plain: DataPlaneClient, rows: int, turns: int
) -> dict[str, dict[str, float]]:
    """Put and get (with a read of every byte) by a client that verifies, beside one that does not."""
    address = {"controller_address": plain.controller_address}  # type: ignore[attr-defined]
    watched = {"observability.enabled": True, "observability.verify": True}
    config = load_config("shm", {**overrides, **address, **watched, "observability.metrics_address": "off"})
    events: deque[Any] = deque(maxlen=1)
    config["observability"]["callback"] = events.append
    fields, names = _batch(rows), list(GRPO_FIELDS)
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    with build_data_plane_client(config, bootstrap=False) as verified:
        clients = {"plain_us": plain, "verified_us": verified}
        for turn in range(turns + 3):
            for name, client in clients.items():
                ids = [f"{name}-{turn}-{row}" for row in range(rows)]
                began = time.perf_counter()
                client.put_samples(ids, "bench", fields)
                written = time.perf_counter()
                got = client.get_samples(ids, "bench", names)
                touch(words_of({field: (got.get(field)._values, None) for field in names}))
                ended = time.perf_counter()
                del got
                client.clear_samples(ids, "bench")
                if turn >= 3:
                    times["put", name].append(written - began)
                    times["get", name].append(ended - written)
        wrong = verified.snapshot()["rows_mismatched"]  # type: ignore[attr-defined]
    assert not wrong, f"{wrong} rows came back with other bytes than were written"
    return {op: {name: statistics.median(times[op, name]) * 1e6 for name in clients} for op in ("put", "get")}


def _background_us(observed: MetricsDataPlaneClient, fields: TensorDict, rows: int, puts: int = 200) -> float:
    """The CPU time that the wrapper's thread needs for a put, as the mean of ``puts`` puts."""
    batches = [[f"background-{turn}-{row}" for row in range(rows)] for turn in range(puts)]
    observed.snapshot()
    with observed._dispatcher.lock:  # The thread has to wait: the work is done, and measured, here.
        for ids in batches:
            observed.put_samples(ids, "bench", fields)
        began = time.thread_time()
        observed.snapshot()
        used = time.thread_time() - began
    observed.clear_samples(None, "bench")
    return used / puts * 1e6


def _batch(rows: int) -> TensorDict:
    nbytes = rows * _MEAN_TOKENS * BYTES_PER_TOKEN
    return grpo_batch(Workload("bench", "", rows, len(GRPO_FIELDS), nbytes, ragged=True)).tensordict()


class _Nothing(DataPlaneClient):
    """An engine that takes everything and does nothing."""

    _receipt = KVBatchMeta("bench", None, [])

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        return self._receipt

    register_partition = claim_meta = get_data = check_consumption_status = _answer
    put_samples = get_samples = clear_samples = close = _answer


class _Described(_Nothing):
    """The documented wrapper's work: bytes of every tensor, and a dictionary update for every key."""

    def __init__(self, inner: DataPlaneClient) -> None:
        self._inner = inner
        self._bytes_by_key: dict[str, dict[str, int]] = {}
        self.total_bytes = self.bytes_outstanding = self.peak_bytes_outstanding = 0

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        *,
        timeout_s: float = 60.0,
        must_exist: bool = False,
    ) -> KVBatchMeta:
        n_bytes = 0
        for value in fields.values() if fields is not None else ():
            tensor = value._values if type(value) is NestedTensor else value
            n_bytes += tensor.numel() * tensor.element_size()
        began = time.perf_counter()
        meta = self._inner.put_samples(sample_ids, partition_id, fields, tags)
        event = {"op": "put", "n_keys": len(sample_ids), "n_bytes": n_bytes}
        event["wall_ms"] = (time.perf_counter() - began) * 1e3
        held = self._bytes_by_key.setdefault(partition_id, {})
        each = n_bytes // max(len(sample_ids), 1)
        for key in sample_ids:
            held[key] = held.get(key, 0) + each
        self.total_bytes += n_bytes
        self.bytes_outstanding += n_bytes
        self.peak_bytes_outstanding = max(self.peak_bytes_outstanding, self.bytes_outstanding)
        return meta

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        self._inner.clear_samples(sample_ids, partition_id)
        held = self._bytes_by_key.get(partition_id, {})
        for key in sample_ids or list(held):
            self.bytes_outstanding -= held.pop(key, 0)
