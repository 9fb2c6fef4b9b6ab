"""What a run found: series of measurements, what they come to, and the JSON file that holds them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

__all__ = [
    "CLUSTER_SCHEMA",
    "SCHEMA",
    "SCHEMA_VERSION",
    "BenchResult",
    "Check",
    "Machine",
    "Ratio",
    "Series",
    "TargetResult",
    "describe_machine",
    "notes_about",
    "ratio_of",
]

SCHEMA = "rlplane.bench"
CLUSTER_SCHEMA = "rlplane.bench.cluster"
SCHEMA_VERSION = 2
# A ratio whose quartiles leave it open by more than this factor says nothing.
MEANINGLESS_BEYOND = 2.0


class Series(msgspec.Struct, frozen=True):
    """Measurements of one operation of one participant: seconds, or cycles per second."""

    part: str
    workload: str
    participant: str
    op: str
    unit: str
    nbytes: int
    values: list[float]
    median: float
    q1: float
    q3: float
    p99: float
    spread: float
    """(q3 − q1) ÷ median."""

    @classmethod
    def of(
        cls,
        part: str,
        workload: str,
        participant: str,
        op: str,
        values: list[float],
        *,
        unit: str = "s",
        nbytes: int = 0,
    ) -> Series:
        """The series of ``values``, which must not be empty."""
        median, q1, q3, p99 = np.quantile(values, (0.5, 0.25, 0.75, 0.99)).tolist()
        spread = (q3 - q1) / median if median else 0.0
        return cls(part, workload, participant, op, unit, nbytes, values, median, q1, q3, p99, spread)


class Ratio(msgspec.Struct, frozen=True):
    """A quotient of two medians, or one median in some unit, and how far the quartiles leave it open."""

    value: float
    low: float
    high: float
    meaningless: bool


class Check(msgspec.Struct, frozen=True):
    """Whether a participant gave back what it was given, in every read of the run."""

    participant: str
    reads: int
    wrong: list[str]
    """The faults of the first few reads that had one."""
    failure: str | None = None
    """Why the participant dropped out, if it did."""

    @property
    def right(self) -> bool:
        return not self.wrong


class TargetResult(msgspec.Struct, frozen=True):
    """One line of the table of targets."""

    what: str
    target: str
    measured: Ratio | None
    verdict: str
    """``met``, ``missed``, ``unclear`` (the spread reaches over the target) or ``not measured``."""
    note: str = ""


class Machine(msgspec.Struct, frozen=True):
    """Where the run took place."""

    cpu: str
    cores: int
    memory_bytes: int
    shm_bytes: int
    kernel: str
    python: str
    torch: str
    torch_threads: int
    packages: dict[str, str]
    load_before: float
    load_after: float


class BenchResult(msgspec.Struct, frozen=True):
    """A whole run."""

    schema: str
    schema_version: int
    started_at: float
    elapsed_s: float
    quick: bool
    scale: float
    peers: list[str]
    machine: Machine
    workloads: dict[str, str]
    """Title of each workload, by name."""
    participants: dict[str, str]
    """Title of each participant, by name."""
    series: list[Series]
    checks: list[Check]
    targets: list[TargetResult]
    notes: list[str]
    backend: str = "shm"
    """The engine of rlplane that was measured."""

    def find(self, workload: str, participant: str, op: str) -> Series | None:
        """The series of an operation, or None if it was not measured."""
        key = workload, participant, op
        return next((one for one in self.series if (one.workload, one.participant, one.op) == key), None)

    @property
    def right(self) -> bool:
        """Whether every participant returned the right bytes in every read."""
        return all(check.right for check in self.checks)

    def save(self, path: Path) -> None:
        """Write the result as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def ratio_of(over: Series, under: Series, *, statistic: str = "median") -> Ratio:
    """``over ÷ under``. With fewer than three measurements on a side, it means nothing."""
    bottom = max(under.median, 1e-12)
    if statistic == "p99":
        # A p99 has no quartiles, so that only the denominator leaves the quotient open.
        value = over.p99 / bottom
        low, high = over.p99 / max(under.q3, 1e-12), over.p99 / max(under.q1, 1e-12)
    else:
        value = over.median / bottom
        low, high = over.q1 / max(under.q3, 1e-12), over.q3 / max(under.q1, 1e-12)
    too_few = min(len(over.values), len(under.values)) < 3
    return Ratio(value, low, high, too_few or high > MEANINGLESS_BEYOND * low)


def describe_machine(torch: str, torch_threads: int, load_before: float, load_after: float) -> Machine:
    """The machine as this process sees it. What torch says comes from a process that has imported it."""
    packages = {}
    for name in ("rlplane", "tensordict", "numpy", "pyzmq", "msgspec", "ray", "redis", "TransferQueue"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return Machine(
        cpu=_first_value(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shm_bytes=shm.f_blocks * shm.f_frsize if shm else 0,
        kernel=platform.release(),
        python=platform.python_version(),
        torch=torch,
        torch_threads=torch_threads,
        packages=packages,
        load_before=load_before,
        load_after=load_after,
    )


def notes_about(machine: Machine, scale: float) -> list[str]:
    """What readers of the figures have to know about how they came about."""
    notes = []
    if machine.load_before > machine.cores / 2:
        notes.append(
            f"the machine was busy before the run began (load {machine.load_before:.1f} on {machine.cores}"
            " cores), so that an idle machine has other figures"
        )
    if scale != 1:
        notes.append(f"at scale {scale:g} batches and counts are smaller than their titles say")
    return notes


def _first_value(path: Path, key: str) -> str:
    lines: Iterable[Any] = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
