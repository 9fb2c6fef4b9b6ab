"""``TransferStats``: what an engine's transfers cost, in a container that can be merged over ranks.

An engine records each copy or network transfer; whoever reports takes the container's content with
``clone_and_reset`` and merges it with that of other ranks. It may be left alone for as long as one likes:
past ``max_samples`` transfers it keeps exact totals and a fair sample of the single ones.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import msgspec
import numpy as np

from rlplane.errors import InvalidRequestError

__all__ = [
    "DEFAULT_MAX_SAMPLES",
    "KVConnectorStats",
    "NixlKVConnectorStats",
    "NixlTelemetry",
    "TransferRecord",
    "TransferStats",
    "nixlXferTelemetry",
]

DEFAULT_MAX_SAMPLES = 8192

_SERIES = ("transfer_duration", "post_duration", "bytes_transferred", "num_descriptors")
_FAILURES = ("num_failed_transfers", "num_failed_notifications", "num_kv_expired_reqs")
_KEYS = (*_SERIES, *_FAILURES)
_WIRE_ONLY = ("beyond_sample", "window")
_MB = 2**20


class TransferRecord(msgspec.Struct, frozen=True, gc=False):
    """One transfer of ours. Times are in seconds.

    ``post_s`` is what it took to post the transfer (for us: the round trip to the control service),
    ``transfer_s`` what it took to move the bytes, ``descriptors`` how many extents they were in.
    """

    bytes: int
    descriptors: int
    post_s: float
    transfer_s: float


class NixlTelemetry(Protocol):
    """What ``nixl_agent.get_xfer_telemetry`` returns. Times are in microseconds."""

    xferDuration: int
    postDuration: int
    totalBytes: int
    descCount: int


nixlXferTelemetry = NixlTelemetry


class KVConnectorStats(Protocol):
    """Statistics of any connector: collected in one process, merged over all, reduced for people."""

    data: dict[str, list[float]]

    def reset(self) -> None: ...

    def is_empty(self) -> bool: ...

    def aggregate(self, other: Any) -> Self: ...

    def reduce(self) -> dict[str, int | float]: ...


class TransferStats:
    """Transfers and failures since the last reset. Thread-safe; pickles; merges.

    Args:
        data: Lists to start from, under the keys of :attr:`data`.
        max_samples: How many single transfers (and entries per kind of failure) are kept.

    Attributes:
        data: A list per key. Of the four series, entry ``i`` belongs to one transfer; past
            ``max_samples`` they hold a fair sample, and the rest is in the totals that
            :meth:`reduce` and the counts use.
    """

    def __init__(
        self, data: Mapping[str, Sequence[float]] | None = None, *, max_samples: int = DEFAULT_MAX_SAMPLES
    ) -> None:
        if max_samples < 1:
            raise InvalidRequestError(f"max_samples is {max_samples}; at least 1 transfer has to be kept")
        self.max_samples = max_samples
        self._lock = threading.Lock()
        self.reset()
        if data:
            self._merge(_checked(data))

    def reset(self) -> None:
        """Forget everything, and let the window that throughput refers to begin now."""
        with self._lock:
            self._reset()

    def _reset(self) -> None:
        self.data: dict[str, list[float]] = {key: [] for key in _KEYS}
        # What is not in the lists: a count and a sum per series, and a count per kind of failure. Values
        # are only ever added, so that integers stay exact and floats lose nothing to cancellation.
        self._extra_transfers = 0
        self._extra_sums: list[float] = [0.0, 0.0, 0, 0]
        self._extra_failures = dict.fromkeys(_FAILURES, 0)
        # When it began, and when it ended: None while it is still being recorded into.
        self._window: tuple[float, float | None] = (time.time(), None)

    def record_transfer(self, res: TransferRecord | NixlTelemetry) -> None:
        """Record a transfer that succeeded: ours (seconds) or NIXL's telemetry (microseconds)."""
        row: tuple[float, float, int, int]
        if isinstance(res, TransferRecord):
            row = (res.transfer_s, res.post_s, res.bytes, res.descriptors)
        else:
            row = (res.xferDuration / 1e6, res.postDuration / 1e6, res.totalBytes, res.descCount)
        with self._lock:
            if self._window[1] is not None:
                self._window = (self._window[0], None)
            series = [self.data[key] for key in _SERIES]
            kept = len(series[-1])  # an interrupt may have left the others one longer
            if kept < self.max_samples:
                for values, value in zip(series, row, strict=True):
                    values[kept:] = [value]
                return
            # Algorithm R: every transfer so far is equally likely to be in the lists.
            self._extra_transfers += 1
            slot = int(random.random() * (kept + self._extra_transfers))
            for index, (values, value) in enumerate(zip(series, row, strict=True)):
                left_out = value
                if slot < kept:
                    left_out, values[slot] = values[slot], value
                self._extra_sums[index] += left_out

    def record_failed_transfer(self) -> None:
        """Record a transfer that failed."""
        self._record_failure("num_failed_transfers")

    def record_failed_notification(self) -> None:
        """Record a transfer whose completion could not be announced."""
        self._record_failure("num_failed_notifications")

    def record_kv_expired_req(self) -> None:
        """Record a claim that expired, or that was given back because its worker was gone."""
        self._record_failure("num_kv_expired_reqs")

    def _record_failure(self, key: str) -> None:
        with self._lock:
            entries = self.data[key]
            if len(entries) < self.max_samples:
                entries.append(1)
            else:
                self._extra_failures[key] += 1

    def clone_and_reset(self) -> TransferStats:
        """Hand out everything so far and start anew, in one step: nothing is lost or counted twice."""
        clone = type(self)(max_samples=self.max_samples)
        with self._lock:
            clone.data, clone._window = self.data, (self._window[0], time.time())
            clone._extra_transfers, clone._extra_sums = self._extra_transfers, self._extra_sums
            clone._extra_failures = self._extra_failures
            self._reset()
        return clone

    @property
    def num_successful_transfers(self) -> int:
        """Exact, also past ``max_samples``."""
        return len(self.data["transfer_duration"]) + self._extra_transfers

    def failures(self) -> dict[str, int]:
        """The count of each kind of failure; exact, also past ``max_samples``."""
        return {key: len(self.data[key]) + self._extra_failures[key] for key in _FAILURES}

    def is_empty(self) -> bool:
        """Whether nothing was recorded. Failures alone are something."""
        return self.num_successful_transfers == 0 and not any(self.failures().values())

    def aggregate(self, other: TransferStats | Mapping[str, Any]) -> Self:
        """Add what another rank recorded: a container, or a dict of one that has crossed a wire.

        Raises:
            ValueError: A dict with an unknown key, or with series of different lengths. Nothing was added.
        """
        part = _checked(other.to_dict() if isinstance(other, TransferStats) else other)
        if part.transfers or any(part.failures.values()):
            self._merge(part)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for msgpack or JSON: :attr:`data`, and what goes beyond it."""
        with self._lock:
            return {
                **{key: list(values) for key, values in self.data.items()},
                "beyond_sample": {
                    "transfers": self._extra_transfers,
                    **dict(zip(_SERIES, self._extra_sums, strict=True)),
                    **self._extra_failures,
                },
                "window": [self._window[0], self._window[1] or time.time()],
            }

    @classmethod
    def from_dict(cls, wire: Mapping[str, Any], *, max_samples: int = DEFAULT_MAX_SAMPLES) -> Self:
        """The inverse of :meth:`to_dict`; also takes the bare :attr:`data`."""
        stats = cls(max_samples=max_samples)
        part = _checked(wire)
        stats._merge(part)
        if part.window is not None:
            stats._window = part.window
        return stats

    def reduce(self) -> dict[str, int | float]:
        """Figures for people. All zero without a successful transfer, except for the failures.

        The first eight are per transfer: ``Throughput (MB/s)`` is bytes by the time spent transferring, as
        if one transfer followed another. ``Wall-clock throughput (MB/s)`` is what the system moved: the
        bytes of all ranks by the time from the earliest reset to the latest clone (or now).
        """
        with self._lock:
            n = self.num_successful_transfers
            series = [np.asarray(self.data[key], dtype=np.float64) for key in _SERIES]
            sums = [float(values.sum()) for values in series]
            if self._extra_transfers:
                sums = [kept + extra for kept, extra in zip(sums, self._extra_sums, strict=True)]
            failures = self.failures()
            start, end = self._window[0], self._window[1] or time.time()
        transfer, post, moved, descriptors = sums
        megabytes = moved / _MB
        many = max(n, 1)
        p90 = [float(np.percentile(values, 90)) if n else 0.0 for values in series[:2]]
        return {
            "Num successful transfers": n,
            "Avg xfer time (ms)": round(transfer / many * 1e3, 3),
            "P90 xfer time (ms)": round(p90[0] * 1e3, 3),
            "Avg post time (ms)": round(post / many * 1e3, 3),
            "P90 post time (ms)": round(p90[1] * 1e3, 3),
            "Avg MB per transfer": round(megabytes / many, 3),
            "Throughput (MB/s)": round(megabytes / transfer, 3) if transfer > 0 else 0.0,
            "Avg number of descriptors": round(descriptors / many, 1),
            "Num failed transfers": failures["num_failed_transfers"],
            "Num failed notifications": failures["num_failed_notifications"],
            "Num expired claims": failures["num_kv_expired_reqs"],
            "Wall-clock throughput (MB/s)": round(megabytes / (end - start), 3) if end > start else 0.0,
        }

    def describe(self, interval_s: float) -> str:
        """The log line for people."""
        figures = ", ".join(f"{name}={value}" for name, value in self.reduce().items())
        return f"TransferStats over the last {interval_s:g} s: {figures}"

    def __repr__(self) -> str:
        failures = sum(self.failures().values())
        return f"TransferStats({self.num_successful_transfers} transfers, {failures} failures)"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.to_dict(), "max_samples": self.max_samples, "ended": self._window[1]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        max_samples, ended = state.pop("max_samples"), state.pop("ended")
        self.__init__(max_samples=max_samples)  # type: ignore[misc]
        part = _checked(state)
        self._merge(part)
        if part.window is not None:
            self._window = (part.window[0], ended)

    def _merge(self, part: _Part) -> None:
        with self._lock:
            if part.window is not None:
                self._widen(*part.window)
            mine = list(zip(*(self.data[key] for key in _SERIES), strict=True))
            counts = self.num_successful_transfers, part.transfers
            take = _fair_shares(counts, (len(mine), len(part.rows)), self.max_samples)
            (mine, left), (theirs, out) = _split(mine, take[0]), _split(part.rows, take[1])
            for index, key in enumerate(_SERIES):
                self.data[key] = [row[index] for row in (*mine, *theirs)]
                self._extra_sums[index] += part.extra_sums[index] + sum(row[index] for row in (*left, *out))
            self._extra_transfers = sum(counts) - len(mine) - len(theirs)
            for key, count in part.failures.items():
                room = min(count, max(self.max_samples - len(self.data[key]), 0))
                self.data[key].extend([1] * room)
                self._extra_failures[key] += count - room

    def _widen(self, start: float, end: float) -> None:
        if self.is_empty():
            self._window = (start, end)
            return
        own_start, own_end = self._window
        self._window = (min(own_start, start), None if own_end is None else max(own_end, end))


NixlKVConnectorStats = TransferStats
"""The container's name in the source documents, where NIXL's telemetry is all that is recorded."""


class _Part(NamedTuple):
    """A checked dict of statistics: single transfers, and exact totals of what is not among them."""

    rows: list[tuple[float, ...]]
    transfers: int
    extra_sums: list[float]
    failures: dict[str, int]
    window: tuple[float, float] | None


def _checked(wire: Mapping[str, Any]) -> _Part:
    unknown = sorted(str(key) for key in wire if key not in _KEYS and key not in _WIRE_ONLY)
    if unknown:
        raise InvalidRequestError(
            f"transfer statistics with unknown keys {unknown}; known are {[*_KEYS, *_WIRE_ONLY]}"
        )
    series = [list(wire.get(key, ())) for key in _SERIES]
    lengths = {key: len(values) for key, values in zip(_SERIES, series, strict=True)}
    if len(set(lengths.values())) != 1:
        raise InvalidRequestError(
            f"transfer statistics need one entry per transfer in each series: {lengths}"
        )
    beyond = dict(wire.get("beyond_sample") or {})
    odd = sorted(key for key in beyond if key not in _KEYS and key != "transfers")
    if odd:
        raise InvalidRequestError(f"transfer statistics with unknown keys {odd} in 'beyond_sample'")
    window = wire.get("window")
    return _Part(
        rows=list(zip(*series, strict=True)),
        transfers=lengths["transfer_duration"] + int(beyond.get("transfers", 0)),
        extra_sums=[beyond.get(key, 0) for key in _SERIES],
        failures={key: len(wire.get(key, ())) + int(beyond.get(key, 0)) for key in _FAILURES},
        window=None if window is None else (float(window[0]), float(window[1])),
    )


def _fair_shares(counts: tuple[int, int], kept: tuple[int, int], bound: int) -> tuple[int, int]:
    """How many of two samples to keep, so that each transfer behind them stays equally likely."""
    if counts == kept and sum(kept) <= bound:
        return kept
    total = sum(counts)
    size = min([bound] + [k * total // n for k, n in zip(kept, counts, strict=True) if n])
    # A draw without replacement, except beyond what numpy can count; there the two are alike.
    rng = np.random.default_rng()
    first = rng.hypergeometric(*counts, size) if total < 10**9 else rng.binomial(size, counts[0] / total)
    return min(int(first), kept[0]), min(size - int(first), kept[1])


def _split(rows: list[tuple[float, ...]], take: int) -> tuple[list[Any], list[Any]]:
    if take == len(rows):
        return rows, []
    shuffled = random.sample(rows, len(rows))
    return shuffled[:take], shuffled[take:]
