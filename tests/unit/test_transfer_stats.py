"""TransferStats: recording, failing, handing over, merging and reducing."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import astuple

from rlplane.errors import InvalidRequestError
from rlplane.transfer_stats import TransferRecord, TransferStats

EIGHT = [
    "Num successful transfers",
    "Avg xfer time (ms)",
    "P90 xfer time (ms)",
    "Avg post time (ms)",
    "P90 post time (ms)",
    "Avg MB per transfer",
    "Throughput (MB/s)",
    "Avg number of descriptors",
]
DATA_KEYS = {
    "transfer_duration",
    "post_duration",
    "bytes_transferred",
    "num_descriptors",
    "num_failed_transfers",
    "num_failed_notifications",
    "num_kv_expired_reqs",
}

records = st.builds(
    TransferRecord,
    bytes=st.integers(0, 2**40),
    descriptors=st.integers(0, 10_000),
    post_s=st.floats(0, 10),
    transfer_s=st.floats(1e-6, 100),
)


def filled(rows: list[TransferRecord], **kwargs: Any) -> TransferStats:
    stats = TransferStats(**kwargs)
    for row in rows:
        stats.record_transfer(row)
    return stats


def record(
    mb: float = 1.0, descriptors: int = 4, post_s: float = 0.001, transfer_s: float = 0.01
) -> TransferRecord:
    return TransferRecord(int(mb * 2**20), descriptors, post_s, transfer_s)


def test_a_new_container_has_the_seven_keys_and_is_empty() -> None:
    stats = TransferStats()
    assert set(stats.data) == DATA_KEYS
    assert stats.is_empty()
    assert stats.num_successful_transfers == 0


def test_nixl_telemetry_is_microseconds_and_becomes_seconds() -> None:
    stats = TransferStats()
    telemetry = SimpleNamespace(xferDuration=2_500, postDuration=40, totalBytes=4096, descCount=3)
    stats.record_transfer(telemetry)
    assert stats.data["transfer_duration"] == [0.0025]
    assert stats.data["post_duration"] == [0.00004]
    assert stats.data["bytes_transferred"] == [4096]
    assert stats.data["num_descriptors"] == [3]


@pytest.mark.parametrize("kind", ["failed_transfer", "failed_notification", "kv_expired_req"])
def test_failures_alone_are_not_empty_and_reduce_to_zeros_with_their_count(kind: str) -> None:
    stats = TransferStats()
    getattr(stats, f"record_{kind}")()
    assert not stats.is_empty()
    figures = stats.reduce()
    assert [figures[key] for key in EIGHT] == [0] * 8
    assert sum(value for key, value in figures.items() if key not in EIGHT) == 1


def test_reduce_gives_the_documented_figures() -> None:
    stats = filled(
        [record(mb=1, transfer_s=0.010), record(mb=3, transfer_s=0.030, post_s=0.002, descriptors=9)]
    )
    figures = stats.reduce()
    assert list(figures)[:8] == EIGHT
    assert figures["Num successful transfers"] == 2
    assert figures["Avg xfer time (ms)"] == 20.0
    assert figures["P90 xfer time (ms)"] == 28.0
    assert figures["Avg post time (ms)"] == 1.5
    assert figures["P90 post time (ms)"] == 1.9
    assert figures["Avg MB per transfer"] == 2.0
    assert figures["Throughput (MB/s)"] == 100.0
    assert figures["Avg number of descriptors"] == 6.5


@example([record(descriptors=44)] * 11 + [record(descriptors=45)] * 9)
@given(st.lists(records, min_size=1, max_size=40))
def test_reduce_agrees_with_the_documented_formulas(rows: list[TransferRecord]) -> None:
    figures = filled(rows).reduce()
    size, descriptors, post, transfer = (
        np.asarray(column) for column in zip(*map(astuple, rows), strict=True)
    )
    mb = size / 2**20
    expected = [
        len(rows),
        round(transfer.mean() * 1e3, 3),
        round(np.percentile(transfer, 90).item() * 1e3, 3),
        round(post.mean() * 1e3, 3),
        round(np.percentile(post, 90).item() * 1e3, 3),
        round(mb.sum() / len(rows), 3),
        round(mb.sum() / transfer.sum(), 3),
        round(float(descriptors.mean()), 1),  # numpy's own rounds 44.45 to 44.4
    ]
    assert [figures[key] for key in EIGHT] == pytest.approx(expected, rel=1e-9, abs=2e-3)


def test_a_transfer_that_took_no_time_divides_by_nothing() -> None:
    figures = filled([record(transfer_s=0.0)]).reduce()
    assert figures["Throughput (MB/s)"] == 0.0
    assert figures["Avg MB per transfer"] == 1.0


def test_figures_are_plain_numbers_that_json_takes() -> None:
    figures = filled([record(), record()]).reduce()
    assert {type(value) for value in figures.values()} <= {int, float}
    json.dumps(figures)


def test_clone_and_reset_hands_over_everything_and_starts_anew() -> None:
    stats = filled([record()])
    stats.record_failed_transfer()
    clone = stats.clone_and_reset()
    assert stats.is_empty()
    assert clone.num_successful_transfers == 1
    stats.record_transfer(record())
    assert clone.num_successful_transfers == 1
    assert clone.failures()["num_failed_transfers"] == 1


def test_a_clone_under_concurrent_writers_loses_nothing() -> None:
    stats, per_thread = TransferStats(max_samples=64), 3_000
    total = TransferStats(max_samples=64)

    def write() -> None:
        for _ in range(per_thread):
            stats.record_transfer(TransferRecord(3, 1, 0.0, 0.5))
            stats.record_failed_notification()

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        total.aggregate(stats.clone_and_reset())
    total.aggregate(stats.clone_and_reset())
    assert total.num_successful_transfers == 4 * per_thread
    assert total.failures()["num_failed_notifications"] == 4 * per_thread
    assert total.reduce()["Avg MB per transfer"] == round(3 / 2**20, 3)
    beyond = total.to_dict()["beyond_sample"]
    assert beyond["bytes_transferred"] + sum(total.data["bytes_transferred"]) == 3 * 4 * per_thread


def test_past_its_bound_memory_stays_and_totals_are_exact() -> None:
    stats = TransferStats(max_samples=100)
    for index in range(5_000):
        stats.record_transfer(TransferRecord(index, 2, 0.001, 0.002))
        stats.record_kv_expired_req()
    assert {len(values) for key, values in stats.data.items() if key in DATA_KEYS} <= {0, 100}
    assert stats.num_successful_transfers == 5_000
    assert stats.failures()["num_kv_expired_reqs"] == 5_000
    figures = stats.reduce()
    assert figures["Avg MB per transfer"] == round(sum(range(5_000)) / 5_000 / 2**20, 3)
    assert figures["Avg xfer time (ms)"] == 2.0
    wire = stats.to_dict()
    assert wire["beyond_sample"]["bytes_transferred"] + sum(wire["bytes_transferred"]) == sum(range(5_000))


def test_the_sample_past_the_bound_is_fair() -> None:
    # Each of 10 tenths of the stream should hold about a tenth of the sample. 400 containers of 50 give
    # 2,000 expected per tenth, so a bias of 15 % is seven standard deviations.
    tenths = [0] * 10
    for _ in range(400):
        stats = filled([TransferRecord(i, 1, 0.0, 1.0) for i in range(500)], max_samples=50)
        for size in stats.data["bytes_transferred"]:
            tenths[int(size) // 50] += 1
    assert all(1_700 < count < 2_300 for count in tenths), tenths


def test_merging_samples_of_different_rates_stays_fair() -> None:
    # 900 transfers of one rank, of which 30 are kept, and 100 of another, all kept: nine to one.
    from_first = 0
    for _ in range(300):
        first = filled([TransferRecord(1, 1, 0.0, 1.0)] * 900, max_samples=30)
        second = filled([TransferRecord(2, 1, 0.0, 1.0)] * 100)
        merged = TransferStats(max_samples=30).aggregate(first).aggregate(second)
        from_first += merged.data["bytes_transferred"].count(1)
        assert merged.num_successful_transfers == 1_000
        wire = merged.to_dict()
        assert wire["beyond_sample"]["bytes_transferred"] + sum(wire["bytes_transferred"]) == 1_100
    assert 0.85 < from_first / (300 * 30) < 0.95


@given(st.lists(st.lists(records, max_size=20), max_size=4))
def test_aggregate_equals_one_container_that_saw_everything(ranks: list[list[TransferRecord]]) -> None:
    merged = TransferStats()
    for rows in ranks:
        merged.aggregate(filled(rows))
    everything = filled([row for rows in ranks for row in rows])
    assert merged.data == everything.data
    eight = {key: merged.reduce()[key] for key in EIGHT}
    assert eight == {key: everything.reduce()[key] for key in EIGHT}


def test_aggregate_returns_itself_and_takes_itself() -> None:
    stats = filled([record()])
    assert stats.aggregate(stats) is stats
    assert stats.num_successful_transfers == 2


@given(st.lists(records, max_size=30), st.integers(0, 5))
def test_msgpack_and_pickle_round_trips_keep_everything(rows: list[TransferRecord], failed: int) -> None:
    stats = filled(rows, max_samples=10)
    for _ in range(failed):
        stats.record_failed_transfer()
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    for copy in (TransferStats.from_dict(wire, max_samples=10), pickle.loads(pickle.dumps(stats))):
        ours, theirs = copy.to_dict(), stats.to_dict()
        ours.pop("window"), theirs.pop("window")
        assert ours == theirs
        assert copy.failures() == stats.failures()


def test_a_bare_data_dict_that_crossed_a_wire_merges() -> None:
    data = json.loads(json.dumps(filled([record(), record()]).data))
    assert TransferStats().aggregate(data).num_successful_transfers == 2
    assert TransferStats(data).data == data


def test_unknown_keys_are_refused_by_name_and_nothing_is_added() -> None:
    stats = filled([record()])
    with pytest.raises(InvalidRequestError, match="bytes_transfered"):
        stats.aggregate({**stats.data, "bytes_transfered": [1]})
    with pytest.raises(ValueError, match="beyond_sample"):
        stats.aggregate({**stats.data, "beyond_sample": {"surprise": 1}})
    assert stats.num_successful_transfers == 1


def test_series_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="'post_duration': 0"):
        TransferStats({"transfer_duration": [1.0], "post_duration": [], "bytes_transferred": [1]})


def test_wall_clock_throughput_is_bytes_of_all_ranks_by_elapsed_time() -> None:
    ranks = []
    for start in (100.0, 101.0):
        wire = filled([record(mb=10, transfer_s=1.0)]).to_dict()
        ranks.append({**wire, "window": [start, start + 4.0]})
    merged = TransferStats()
    for wire in ranks:
        merged.aggregate(wire)
    figures = merged.reduce()
    assert figures["Throughput (MB/s)"] == 10.0
    assert figures["Wall-clock throughput (MB/s)"] == 4.0  # 20 MB from 100.0 to 105.0


def test_the_log_line_says_how_long_and_what() -> None:
    line = filled([record()]).describe(10)
    assert line.startswith(
        "TransferStats over the last 10 s: Num successful transfers=1, Avg xfer time (ms)=10.0"
    )


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_samples is 0"):
        TransferStats(max_samples=0)


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, rlplane.transfer_stats; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("max_samples", [2, 100])
def test_a_record_that_was_interrupted_spoils_no_later_one(max_samples: int) -> None:
    stats = filled([record()] * 2 if max_samples == 100 else [record()], max_samples=max_samples)
    stats.data["transfer_duration"].append(9.0)  # and Ctrl-C before the others
    for _ in range(200):
        stats.record_transfer(record())
    lengths = {len(stats.data[key]) for key in list(stats.data)[:4]}
    assert lengths == {max_samples} and 9.0 not in stats.data["transfer_duration"]
