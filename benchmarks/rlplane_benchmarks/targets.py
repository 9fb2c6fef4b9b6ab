"""Targets, which one run judges; those of the shared-memory engine are here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlplane_benchmarks.participants import AS_TRANSFER_QUEUE, COPY, RLPLANE, ZMQ
from rlplane_benchmarks.results import BenchResult, Ratio, Series, TargetResult, ratio_of

__all__ = ["TARGETS", "Target", "judge", "ratio_between", "value_of"]

_Key = tuple[str, str, str]
"""Workload, participant and operation of a series."""


class _Measured(NamedTuple):
    value: Ratio
    source: str


_Measure = Callable[[BenchResult], _Measured | None]


@dataclass(frozen=True)
class Target:
    """What ``measure`` finds in a result has to be at most, or at least, ``bound``."""

    what: str
    sense: str
    bound: float
    measure: _Measure
    unit: str = ""
    without: str = ""
    """What to do so that it is measured."""


def ratio_between(over: _Key, under: _Key, *, statistic: str = "median") -> _Measure:
    """The quotient of two series."""
    return lambda result: _quotient(result.find(*over), result.find(*under), statistic)


def throughput_between(over: _Key, under: _Key) -> _Measure:
    """The quotient of two throughputs."""

    def measure(result: BenchResult) -> _Measured | None:
        first, second = result.find(*over), result.find(*under)
        if first is None or second is None:
            return None
        found = ratio_of(second, first)
        bytes_too = first.nbytes / max(second.nbytes, 1)
        value, low, high = (bytes_too * part for part in (found.value, found.low, found.high))
        return _Measured(Ratio(value, low, high, found.meaningless), f"{_named(first)} ÷ {_named(second)}")

    return measure


def value_of(key: _Key, *, unit_s: float, statistic: str = "median") -> _Measure:
    """The median or the p99 of a series, in units of ``unit_s``."""

    def measure(result: BenchResult) -> _Measured | None:
        series = result.find(*key)
        if series is None:
            return None
        if statistic == "p99":  # which has no quartiles
            found, least = (series.p99, series.p99, series.p99), 100
        else:
            found, least = (series.median, series.q1, series.q3), 3
        value, low, high = (seconds / unit_s for seconds in found)
        return _Measured(Ratio(value, low, high, meaningless=len(series.values) < least), _named(series))

    return measure


def _most_and_least_resident(result: BenchResult) -> _Measured | None:
    found = [s for s in result.series if s.part == "claims" and s.participant == RLPLANE]
    found.sort(key=lambda series: int(series.workload))
    return _quotient(found[-1], found[0]) if len(found) > 1 else None


def _as_transfer_queue(op: str, megabytes: int) -> Target:
    workload = f"grpo-{megabytes}MB"
    return Target(
        f"{op} {megabytes} MB by TransferQueue's interface ÷ TransferQueue simple",
        "≥",
        20.0,
        ratio_between((workload, "tq-simple", op), (workload, AS_TRANSFER_QUEUE, op)),
        unit=" ×",
        without=_ASK_FOR_TRANSFER_QUEUE,
    )


_ASK_FOR_TRANSFER_QUEUE = "ask for it with --peers tq-simple"
TARGETS = (
    Target(
        "put 52 MB, throughput ÷ torch copy of the same bytes into mapped memory",
        "≥",
        0.8,
        ratio_between(("grpo-52MB", COPY, "put"), ("grpo-52MB", RLPLANE, "put")),
    ),
    Target(
        "put 13 MB ÷ TransferQueue simple",
        "≥",
        40.0,
        ratio_between(("grpo-13MB", "tq-simple", "put"), ("grpo-13MB", RLPLANE, "put")),
        unit=" ×",
        without=_ASK_FOR_TRANSFER_QUEUE,
    ),
    Target(
        "get 52 MB neighbouring, time ÷ torch copy of the same bytes",
        "≤",
        0.3,
        ratio_between(("grpo-52MB", RLPLANE, "get"), ("grpo-52MB", COPY, "put")),
    ),
    Target(
        "get 52 MB scattered over 512 rows, time ÷ torch copy",
        "≤",
        2.5,
        ratio_between(("grpo-52MB", RLPLANE, "scattered"), ("grpo-52MB", COPY, "put")),
    ),
    Target(
        "put of 256 MB as 32 fields ÷ as 1 field, time",
        "≤",
        1.2,
        ratio_between(("wide-32", RLPLANE, "put"), ("wide-1", RLPLANE, "put")),
    ),
    Target(
        "get of 256 MB as 32 fields, time ÷ torch copy",
        "≤",
        0.1,
        ratio_between(("wide-32", RLPLANE, "get"), ("wide-32", COPY, "put")),
    ),
    Target(
        "put of 8 rows, round trips of bare ZMQ",
        "≤",
        4.0,
        ratio_between(("rows-8", RLPLANE, "put"), ("ping", ZMQ, "round trip")),
    ),
    Target(
        "put → waiting claim returns, p99, in bare ZMQ round trips",
        "≤",
        10.0,
        ratio_between(("wake", RLPLANE, "put to claim"), ("ping", ZMQ, "round trip"), statistic="p99"),
    ),
    *(
        Target(
            f"{what} of images, throughput ÷ a dense batch of as many bytes",
            "≥",
            0.8,
            throughput_between(("images", RLPLANE, op), ("images-dense", RLPLANE, op)),
        )
        for what, op in (("put", "put"), ("get and use", "get+touch"))
    ),
    Target(
        "bytes held of images that 8 rows share ÷ bytes of the rows",
        "≤",
        1.05 / 8,
        value_of(("images-shared", RLPLANE, "held"), unit_s=1.0),
    ),
    Target(
        "a task wakes too late beside a put of 52 MB on its event loop, p99",
        "≤",
        5.0,
        value_of(("loop", RLPLANE, "beside a put"), unit_s=1e-3, statistic="p99"),
        unit=" ms",
    ),
    *(_as_transfer_queue(op, megabytes) for op in ("put", "get") for megabytes in (13, 52)),
    Target("claim of 64 at 1 million resident ÷ at 1 thousand", "≤", 1.3, _most_and_least_resident),
)


def judge(result: BenchResult, targets: Sequence[Target] = TARGETS) -> list[TargetResult]:
    """Every target with what was measured, and whether that met it."""
    return [_judge(target, result) for target in targets]


def _judge(target: Target, result: BenchResult) -> TargetResult:
    wanted = f"{target.sense} {target.bound:g}{target.unit}"
    measured = target.measure(result)
    if measured is None:
        return TargetResult(target.what, wanted, None, "not measured", target.without)
    value, source = measured
    verdict = "unclear" if _unclear(target, value) else _by_the_median(target, value)
    return TargetResult(target.what, wanted, value, verdict, _note(target, value, source))


def _unclear(target: Target, value: Ratio) -> bool:
    return value.low < target.bound < value.high


def _by_the_median(target: Target, value: Ratio) -> str:
    met = value.value >= target.bound if target.sense == "≥" else value.value <= target.bound
    return "met" if met else "missed"


def _note(target: Target, value: Ratio, source: str) -> str:
    between = f"the quartiles leave it between {value.low:.3g} and {value.high:.3g}"
    if _unclear(target, value):
        return f"{source}; {between}; by the median it is {_by_the_median(target, value)}"
    return f"{source}; {between}, so the figure itself means little" if value.meaningless else source


def _quotient(over: Series | None, under: Series | None, statistic: str = "median") -> _Measured | None:
    if over is None or under is None:
        return None
    return _Measured(ratio_of(over, under, statistic=statistic), f"{_named(over)} ÷ {_named(under)}")


def _named(series: Series) -> str:
    return f"{series.participant} {series.op} ({series.workload})"
