"""Medians, ratios and targets: what a run says about itself, and when it says nothing."""

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlplane_benchmarks.cluster.targets import CLUSTER_TARGETS
from rlplane_benchmarks.plot import svg_plot
from rlplane_benchmarks.results import (
    CLUSTER_SCHEMA,
    SCHEMA,
    SCHEMA_VERSION,
    BenchResult,
    Check,
    Machine,
    Series,
    ratio_of,
)
from rlplane_benchmarks.table import format_result, format_seconds
from rlplane_benchmarks.targets import TARGETS, judge

MACHINE = Machine("a <CPU>", 2, 2**34, 2**33, "6.1", "3.11", "2.13", 2, {}, 0.1, 0.2)


DATA = ("data", "images")


def series(
    participant: str, op: str, *values: float, workload: str = "grpo-52MB", part: str = "data"
) -> Series:
    return Series.of(part, workload, participant, op, list(values))


def result(*found: Series, checks: list[Check] | None = None) -> BenchResult:
    names = dict.fromkeys(one.participant for one in found)
    workloads = {one.workload: f"the batch {one.workload}" for one in found if one.part in DATA}
    return BenchResult(
        schema=SCHEMA,
        schema_version=SCHEMA_VERSION,
        started_at=0.0,
        elapsed_s=1.0,
        quick=True,
        scale=1.0,
        peers=[],
        machine=MACHINE,
        workloads=workloads,
        participants={name: name for name in names},
        series=list(found),
        checks=checks or [],
        targets=[],
        notes=["a note"],
    )


def test_a_series_keeps_its_values_and_says_how_far_they_spread() -> None:
    found = series("rlplane", "put", 4.0, 1.0, 3.0, 2.0, 5.0)
    assert found.values == [4.0, 1.0, 3.0, 2.0, 5.0]
    assert (found.median, found.q1, found.q3) == (3.0, 2.0, 4.0)
    assert found.spread == pytest.approx(2 / 3)


def test_a_ratio_of_steady_series_means_something() -> None:
    ratio = ratio_of(series("a", "put", 2.0, 2.1, 2.2), series("b", "put", 1.0, 1.0, 1.1))
    assert ratio.value == pytest.approx(2.1)
    assert ratio.low < ratio.value < ratio.high
    assert not ratio.meaningless


def test_a_ratio_that_the_spread_leaves_open_says_that_it_is_meaningless() -> None:
    wild = series("a", "put", 1.0, 2.0, 9.0)
    assert ratio_of(wild, series("b", "put", 1.0, 1.0, 1.0)).meaningless
    shown = format_result(result(wild, series("rlplane", "put", 1.0, 1.0, 1.0)))
    assert "2.00?" in shown


def test_a_ratio_of_two_measurements_is_meaningless() -> None:
    assert ratio_of(series("a", "put", 1.0, 1.0), series("b", "put", 1.0, 1.0, 1.0)).meaningless


@pytest.mark.parametrize(
    ("copy", "plane", "verdict"),
    [
        ((0.9, 0.9, 0.9), (1.0, 1.0, 1.0), "met"),
        ((0.5, 0.5, 0.5), (1.0, 1.0, 1.0), "missed"),
        ((0.7, 0.85, 1.0), (1.0, 1.0, 1.0), "unclear"),
    ],
)
def test_a_target_is_met_missed_or_left_unclear_by_the_spread(
    copy: tuple[float, ...], plane: tuple[float, ...], verdict: str
) -> None:
    target = judge(result(series("copy", "put", *copy), series("rlplane", "put", *plane)))[0]
    assert target.verdict == verdict
    assert target.measured is not None
    if verdict == "unclear":
        assert "by the median it is met" in target.note


def test_an_upper_bound_is_met_from_below() -> None:
    found = result(
        series("copy", "put", 1.0, 1.0, 1.0),
        series("rlplane", "get", 0.2, 0.2, 0.2),
        series("rlplane", "scattered", 3.0, 3.0, 3.0),
    )
    verdicts = {target.what: target.verdict for target in judge(found)}
    assert verdicts["get 52 MB neighbouring, time ÷ torch copy of the same bytes"] == "met"
    assert verdicts["get 52 MB scattered over 512 rows, time ÷ torch copy"] == "missed"


def test_the_throughput_of_images_counts_bytes_and_the_lag_of_a_loop_its_tail() -> None:
    images = Series.of("images", "images", "rlplane", "put", [1.0] * 3, nbytes=900)
    dense = Series.of("images", "images-dense", "rlplane", "put", [1.0] * 3, nbytes=1000)
    lag = Series.of("loop", "loop", "rlplane", "beside a put", [0.001] * 95 + [0.006] * 5)
    held = Series.of("images", "images-shared", "rlplane", "held", [0.126] * 3, unit="share")
    found = result(images, dense, lag, held)
    judged = {target.what: target for target in judge(found) if target.measured is not None}
    by_words = {word: target for what, target in judged.items() for word in what.split() if word in what}
    assert by_words["images,"].measured is not None
    assert by_words["images,"].measured.value == 0.9
    assert (by_words["images,"].verdict, by_words["held"].verdict) == ("met", "met")
    assert by_words["wakes"].verdict == "missed"
    assert "12.6%" in format_result(result(held, *found.series))


def test_what_was_not_measured_is_not_judged() -> None:
    judged = judge(result())
    assert len(judged) == len(TARGETS) == 17
    assert {target.verdict for target in judged} == {"not measured"}
    assert "--peers tq-simple" in judged[1].note


def test_claims_are_compared_over_the_numbers_of_resident_samples() -> None:
    levels = [
        series("rlplane", "claim", *([seconds] * 3), workload=str(resident), part="claims")
        for resident, seconds in ((1_000_000, 1.2), (1_000, 1.0), (10_000, 9.0))
    ]
    claims = judge(result(*levels))[-1]
    assert claims.measured is not None
    assert claims.measured.value == pytest.approx(1.2) and claims.verdict == "met"


MS = 1e-3


def cluster_result(
    ours: float = 400.0, theirs: float = 90.0, cpu: float = 0.5 * MS, wake: float = 2 * MS
) -> BenchResult:
    def level(participant: str, op: str, value: float, part: str) -> Series:
        return series(participant, op, *([value] * 3), workload="4", part=part)

    found = result(
        series("rlplane", "put", 1.0, 1.0, 1.0, workload="grpo-13MB"),
        series("transfer-queue", "put", 2.0, 2.0, 2.0, workload="grpo-13MB"),
        series("rlplane", "put to claim", wake, wake, wake, workload="wake", part="wake"),
        level("rlplane", "cycles", ours, "clients"),
        level("transfer-queue", "cycles", theirs, "clients"),
        level("rlplane", "CPU per cycle", cpu, "control"),
    )
    return msgspec.structs.replace(found, schema=CLUSTER_SCHEMA, backend="simple")


def test_the_targets_of_a_cluster_are_a_ratio_of_cycles_and_times_in_milliseconds() -> None:
    cycles, cpu, wake, put, *others = judge(cluster_result(), CLUSTER_TARGETS)
    assert [target.target for target in (cycles, cpu, wake, put)] == ["≥ 4 ×", "≤ 0.6 ms", "≤ 3 ms", "≤ 1.1"]
    measured = [target.measured.value for target in (cycles, cpu, wake, put) if target.measured is not None]
    assert measured == [pytest.approx(400 / 90), pytest.approx(0.5), pytest.approx(2.0), pytest.approx(0.5)]
    assert {target.verdict for target in (cycles, cpu, wake, put)} == {"met"}
    assert {target.verdict for target in others} == {"not measured"}


@pytest.mark.parametrize(
    ("found", "place"),
    [
        (cluster_result(theirs=101.0), 0),
        (cluster_result(cpu=0.7 * MS), 1),
        (cluster_result(wake=3.1 * MS), 2),
    ],
    ids=["cycles", "control CPU", "put to claim"],
)
def test_a_target_of_a_cluster_can_be_missed(found: BenchResult, place: int) -> None:
    judged = judge(found, CLUSTER_TARGETS)
    assert [target.what for target in judged if target.verdict == "missed"] == [judged[place].what]


def test_a_time_whose_quartiles_lie_on_both_sides_of_its_target_is_unclear() -> None:
    wake = series("rlplane", "put to claim", 1 * MS, 2 * MS, 5 * MS, 6 * MS, workload="wake", part="wake")
    target = judge(result(wake), CLUSTER_TARGETS)[2]
    assert target.verdict == "unclear"
    assert "by the median it is missed" in target.note


def test_the_table_of_a_cluster_says_so_and_shows_only_what_was_measured() -> None:
    shown = format_result(cluster_result())
    assert shown.startswith("rlplane cluster quick bench on simple")
    assert "CPU time of the control service" in shown
    assert "500 µs" in shown
    assert "scattered" not in shown
    assert "round trips" not in shown
    assert "÷ copy" not in shown


def test_the_tail_of_waking_is_counted_in_round_trips() -> None:
    wake = series("rlplane", "put to claim", *([1.0] * 99), 50.0, workload="wake", part="wake")
    trips = series("zmq", "round trip", *([1.0] * 100), workload="ping", part="ping")
    target = judge(result(wake, trips))[7]
    assert target.measured is not None
    assert target.measured.value == pytest.approx(wake.p99)
    assert target.measured.value < 10


def test_a_saved_result_is_read_back_as_it_was(tmp_path: Path) -> None:
    saved = result(series("rlplane", "put", 1.0, 2.0, 3.0), checks=[Check("rlplane", 3, [])])
    saved.targets.extend(judge(saved))
    saved.save(tmp_path / "bench.json")
    assert msgspec.json.decode((tmp_path / "bench.json").read_bytes(), type=BenchResult) == saved


def test_wrong_bytes_are_shouted_in_the_table() -> None:
    wrong = result(series("faulty", "put", 1.0), checks=[Check("faulty", 2, ["wide-1, get: other bytes"])])
    assert not wrong.right
    assert "faulty RETURNED WRONG BYTES: wide-1, get: other bytes" in format_result(wrong)
    assert "right." not in format_result(wrong)


def test_the_picture_is_xml_with_a_bar_for_every_time() -> None:
    found = result(
        series("copy", "put", 0.001, 0.0011, 0.0012),
        series("rlplane", "put", 0.002, 0.0021, 0.0022),
        series("rlplane", "get+touch", 0.002, 0.0021, 0.0022),
    )
    root = ET.fromstring(svg_plot(found))
    name = "{http://www.w3.org/2000/svg}"
    bars = [rect for rect in root.iter(f"{name}rect") if rect.get("height") == "11"]
    assert len(bars) == 3
    assert all(float(bar.get("width", "0")) > 0 for bar in bars)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5, "2.50 s"), (0.0123, "12.3 ms"), (0.000456, "456 µs"), (5e-8, "50 ns"), (0.0, "0 ns")],
)
def test_a_time_is_shown_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_the_snippets_of_the_documentation_run() -> None:
    text = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    snippets = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    assert snippets
    for snippet in snippets:
        names: dict[str, Any] = {}
        exec(compile(snippet, "docs/bench.md", "exec"), names)
        saved = result(series("rlplane", "put", 0.5, 0.5, 0.5))
        assert names["put_seconds"](msgspec.json.encode(saved)) == 0.5
