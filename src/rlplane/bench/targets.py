"""The targets of the shared-memory engine, judged by one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlplane.bench.contestants import COPY, RLPLANE, ZMQ
from rlplane.bench.results import BenchResult, Ratio, Series, TargetResult, ratio_of

__all__ = ["TARGETS", "Target", "judge"]

_Pair = tuple[Series | None, Series | None]


@dataclass(frozen=True)
class Target:
    """``numerator ÷ denominator`` has to be at most, or at least, ``bound``."""

    what: str
    sense: str
    bound: float
    pair: Callable[[BenchResult], _Pair]
    statistic: str = "median"
    unit: str = ""
    without: str = ""


def _pair(over: tuple[str, str, str], under: tuple[str, str, str]) -> Callable[[BenchResult], _Pair]:
    return lambda result: (result.find(*over), result.find(*under))


def _least_and_most_resident(result: BenchResult) -> _Pair:
    found = [s for s in result.series if s.part == "claims" and s.contestant == RLPLANE]
    found.sort(key=lambda series: int(series.workload))
    return (found[-1], found[0]) if len(found) > 1 else (None, None)


def _most_and_four_clients(result: BenchResult) -> _Pair:
    found = [s for s in result.series if s.part == "clients" and s.contestant == RLPLANE]
    found.sort(key=lambda series: int(series.workload))
    several = [series for series in found if int(series.workload) > 1]
    return (several[-1], several[0]) if len(several) > 1 else (None, None)


TARGETS = (
    Target(
        "put 52 MB, throughput ÷ torch copy of the same bytes into mapped memory",
        "≥",
        0.8,
        _pair(("grpo-52MB", COPY, "put"), ("grpo-52MB", RLPLANE, "put")),
    ),
    Target(
        "put 13 MB ÷ TransferQueue simple",
        "≥",
        40.0,
        _pair(("grpo-13MB", "tq-simple", "put"), ("grpo-13MB", RLPLANE, "put")),
        unit=" ×",
        without="ask for it with --peers tq-simple",
    ),
    Target(
        "get 52 MB neighbouring, time ÷ torch copy of the same bytes",
        "≤",
        0.3,
        _pair(("grpo-52MB", RLPLANE, "get"), ("grpo-52MB", COPY, "put")),
    ),
    Target(
        "get 52 MB scattered over 512 rows, time ÷ torch copy",
        "≤",
        2.5,
        _pair(("grpo-52MB", RLPLANE, "scattered"), ("grpo-52MB", COPY, "put")),
    ),
    Target(
        "put of 256 MB as 32 fields ÷ as 1 field, time",
        "≤",
        1.2,
        _pair(("wide-32", RLPLANE, "put"), ("wide-1", RLPLANE, "put")),
    ),
    Target(
        "get of 256 MB as 32 fields, time ÷ torch copy",
        "≤",
        0.1,
        _pair(("wide-32", RLPLANE, "get"), ("wide-32", COPY, "put")),
    ),
    Target(
        "put of 8 rows, round trips of bare ZMQ",
        "≤",
        4.0,
        _pair(("rows-8", RLPLANE, "put"), ("ping", ZMQ, "round trip")),
    ),
    Target(
        "put → waiting claim returns, p99, in bare ZMQ round trips",
        "≤",
        10.0,
        _pair(("wake", RLPLANE, "put to claim"), ("ping", ZMQ, "round trip")),
        statistic="p99",
    ),
    Target("claim of 64 at 1 million resident ÷ at 1 thousand", "≤", 1.3, _least_and_most_resident),
    Target("64 clients at once, throughput ÷ 4 clients", "≥", 0.8, _most_and_four_clients),
)


def judge(result: BenchResult) -> list[TargetResult]:
    """Every target with what was measured, and whether that met it."""
    return [_judge(target, result) for target in TARGETS]


def _judge(target: Target, result: BenchResult) -> TargetResult:
    wanted = f"{target.sense} {target.bound:g}{target.unit}"
    over, under = target.pair(result)
    if over is None or under is None:
        return TargetResult(target.what, wanted, None, "not measured", target.without)
    ratio = ratio_of(over, under, statistic=target.statistic)
    note = _note(target, ratio, over, under)
    return TargetResult(target.what, wanted, ratio, _verdict(target, ratio), note)


def _verdict(target: Target, ratio: Ratio) -> str:
    return "unclear" if _unclear(target, ratio) else _by_the_median(target, ratio)


def _unclear(target: Target, ratio: Ratio) -> bool:
    return ratio.low < target.bound < ratio.high


def _by_the_median(target: Target, ratio: Ratio) -> str:
    met = ratio.value >= target.bound if target.sense == "≥" else ratio.value <= target.bound
    return "met" if met else "missed"


def _note(target: Target, ratio: Ratio, over: Series, under: Series) -> str:
    note = f"{_named(over)} ÷ {_named(under)}"
    between = f"the quartiles leave it between {ratio.low:.3g} and {ratio.high:.3g}"
    if _unclear(target, ratio):
        return f"{note}; {between}; by the median it is {_by_the_median(target, ratio)}"
    return f"{note}; {between}, so the figure itself means little" if ratio.meaningless else note


def _named(series: Series) -> str:
    return f"{series.contestant} {series.op} ({series.workload})"
