"""The bench of observability: it measures what it says, and says it so that people can read it."""

from __future__ import annotations

import pytest

from rlplane_benchmarks.observability import TARGETS, _compare, _Described, _Nothing, render


@pytest.mark.parametrize("rows", [8, 512])
def test_the_three_clients_are_measured_with_the_same_puts(rows):
    cell = _compare(_Nothing(), rows, puts=20)
    assert set(cell) == {"bare", "observed", "described"}
    assert all(figures["median_us"] > 0 for figures in cell.values())
    assert cell["bare"]["added_us"] == 0
    assert cell["observed"]["background_us"] > 0


def test_the_described_client_has_the_described_cost_model():
    import torch
    from tensordict import TensorDict

    client = _Described(_Nothing())
    fields = TensorDict({"x": torch.zeros(2, 4)}, batch_size=[2])
    client.put_samples(["a", "b"], "p", fields)
    client.put_samples(["a", "b"], "p", fields)
    # The gap that ours closes: an overwrite adds instead of replacing.
    assert client.bytes_outstanding == 64
    client.clear_samples(None, "p")
    assert client.bytes_outstanding == 0


def test_the_table_has_the_figures_and_the_targets():
    cells = {
        rows: {
            "bare": {"median_us": 1000.0 * rows, "added_us": 0.0},
            "observed": {"median_us": 1004.0 * rows, "added_us": 4.0, "background_us": 9.0},
            "described": {"median_us": 1100.0 * rows, "added_us": 100.0},
        }
        for rows in (8, 512)
    }
    verify = {8: {op: {"plain_us": 10.0, "verified_us": 12.5} for op in ("put", "get")}}
    result = {
        "wrapper": cells,
        "shm": cells,
        "verify": verify,
        "put_of_512_rows_percent": 0.25,
        "load_average": 0.5,
        "cpus": 2,
    }
    text = render(result)
    assert "added to a put of 8 rows         4.00 µs  (target ≤ 5 µs; described: 100.0 µs)" in text
    assert "0.25 % of 512.00 ms" in text
    assert "8 rows" + " " * 32 + "     10.0 µs     12.5 µs" * 2 in text
    assert TARGETS == {"put_of_8_rows_us": 5.0, "put_of_512_rows_percent": 1.0}
