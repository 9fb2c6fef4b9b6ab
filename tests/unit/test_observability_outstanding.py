"""Outstanding bytes against an exact model: random puts, overwrites, clears, failures, several threads."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tensordict import NonTensorStack, TensorDict

from rlplane.adapters.local.memory import MemoryDataPlaneClient
from rlplane.config import load_config
from rlplane.errors import PlaneConnectionError
from rlplane.observability import MetricsDataPlaneClient
from rlplane.observability.outstanding import OutstandingBytes
from rlplane.observability.sizes import ColumnSize

PARTITIONS = ["p", "q"]
FIELDS = ["a", "b", "c"]
IDS = [f"s{index}" for index in range(9)]
_names = itertools.count()

ids = st.lists(st.sampled_from(IDS), unique=True, max_size=6)
some_ids = st.lists(st.sampled_from(IDS), unique=True, min_size=1, max_size=6)
partitions = st.sampled_from(PARTITIONS)
widths = st.integers(0, 5)


@st.composite
def columns(draw: st.DrawFn, rows: int) -> tuple[Any, list[int]]:
    """A column of any kind, and what each of its rows has in bytes."""
    kind = draw(st.sampled_from(["dense", "view", "jagged", "narrowed", "strided", "text", "objects"]))
    sizes = draw(st.lists(widths, min_size=rows, max_size=rows))
    if kind in ("dense", "view"):
        wide = torch.zeros(rows, 6, dtype=torch.int16)
        return (wide[:, : sizes[0]] if kind == "view" else wide[:, : sizes[0]].clone()), [2 * sizes[0]] * rows
    if kind == "text":
        return NonTensorStack(*["ä" * size for size in sizes]), [2 * size for size in sizes]
    if kind == "objects":
        return NonTensorStack(*[[1.0] * size for size in sizes]), [8 * size for size in sizes]
    if kind == "narrowed":
        values, starts = torch.zeros(rows * 6), torch.arange(0, rows * 6 + 1, 6)
        column = torch.nested.nested_tensor_from_jagged(values, starts, torch.tensor(sizes))
        return column, [4 * size for size in sizes]
    layout = torch.jagged if kind == "jagged" else torch.strided
    column = torch.nested.nested_tensor([torch.zeros(size) for size in sizes], layout=layout)
    return column, [4 * size for size in sizes]


@st.composite
def writes(draw: st.DrawFn) -> tuple[list[str], TensorDict | None, dict[str, list[int]]]:
    """Ids, their fields, and the bytes of each field's rows."""
    chosen = draw(some_ids)
    names = draw(st.lists(st.sampled_from(FIELDS), unique=True, max_size=3))
    if not names:
        return chosen, None, {}
    drawn = {name: draw(columns(len(chosen))) for name in names}
    fields = TensorDict({name: value for name, (value, _) in drawn.items()}, batch_size=[len(chosen)])
    return chosen, fields, {name: sizes for name, (_, sizes) in drawn.items()}


class Unreliable(MemoryDataPlaneClient):
    """The real engine, with a fault to be switched on: the connection breaks before anything is done."""

    broken = False

    def put_samples(self, *args: Any, **kwargs: Any) -> Any:
        if self.broken:
            raise PlaneConnectionError("broken")
        return super().put_samples(*args, **kwargs)

    def clear_samples(self, *args: Any, **kwargs: Any) -> Any:
        if self.broken:
            raise PlaneConnectionError("broken")
        return super().clear_samples(*args, **kwargs)


class BooksMachine(RuleBasedStateMachine):
    """Every operation is done for real and entered into the model; the two must agree after each."""

    @initialize()
    def start(self) -> None:
        cfg = load_config("local", {"controller_address": f"outstanding-{next(_names)}"})
        self.inner = Unreliable(cfg, bootstrap=True)
        self.client = MetricsDataPlaneClient(self.inner)
        self.model: dict[str, dict[str, dict[str, int]]] = {name: {} for name in PARTITIONS}
        self.peak = 0
        for name in PARTITIONS:
            self.client.register_partition(name, FIELDS, 100, ["t"])

    def held(self) -> int:
        return sum(size for rows in self.model.values() for row in rows.values() for size in row.values())

    def enter(
        self, partition: str, chosen: list[str], sizes: dict[str, list[int]], watch_peak: bool = True
    ) -> None:
        for position, key in enumerate(chosen):
            row = self.model[partition].setdefault(key, {})
            row.update({name: values[position] for name, values in sizes.items()})
        if watch_peak:
            self.peak = max(self.peak, self.held())

    @rule(partition=partitions, write=writes())
    def put(self, partition: str, write: tuple[Any, ...]) -> None:
        chosen, fields, sizes = write
        tags: list[dict[str, Any]] | None = None if fields is not None else [{} for _ in chosen]
        self.client.put_samples(chosen, partition, fields, tags)
        self.enter(partition, chosen, sizes)

    @rule(
        partition=partitions, write=writes(), how=st.sampled_from(["broken", "duplicate", "unknown", "rows"])
    )
    def put_that_fails(self, partition: str, write: tuple[Any, ...], how: str) -> None:
        chosen, fields, _ = write
        self.inner.broken = how == "broken"
        chosen = [*chosen, chosen[0]] if how in ("duplicate", "rows") else chosen
        fields = (
            TensorDict({"a": torch.zeros(len(chosen))}, batch_size=[len(chosen)])
            if how == "duplicate"
            else fields
        )
        try:
            self.client.put_samples(chosen, "nowhere" if how == "unknown" else partition, fields)
        except (ConnectionError, ValueError, KeyError):
            pass
        else:
            raise AssertionError(f"a put with {how} should fail")
        finally:
            self.inner.broken = False

    @rule(partition=partitions, chosen=ids)
    def clear(self, partition: str, chosen: list[str]) -> None:
        self.client.clear_samples([*chosen, "not there"], partition)
        for key in chosen:
            self.model[partition].pop(key, None)

    @rule(partition=partitions)
    def clear_all(self, partition: str) -> None:
        if self.model[partition]:
            self.client.clear_samples(None, partition)
            self.model[partition].clear()

    @rule(partition=partitions, chosen=st.none() | ids)
    def clear_that_fails(self, partition: str, chosen: list[str] | None) -> None:
        self.inner.broken = True
        try:
            self.client.clear_samples(chosen, partition)
        except ConnectionError:
            pass
        finally:
            self.inner.broken = False

    @rule(partition=partitions, chosen=ids)
    def somebody_else_clears(self, partition: str, chosen: list[str]) -> None:
        self.inner.clear_samples(chosen, partition)
        self.client.reconcile()
        for key in chosen:
            self.model[partition].pop(key, None)

    @rule(partition=partitions, parts=st.lists(writes(), min_size=2, max_size=4), drop=ids)
    def several_threads(self, partition: str, parts: list[tuple[Any, ...]], drop: list[str]) -> None:
        # Each thread has samples of its own: between threads that share one, no order is defined.
        def work(number: int, chosen: list[str], fields: TensorDict | None) -> None:
            mine = [f"{key}-{number}" for key in chosen]
            self.client.put_samples(mine, partition, fields)
            self.client.put_samples(mine, partition, fields)
            self.client.clear_samples([f"{key}-{number}" for key in drop], partition)

        threads = []
        before = self.held()
        for number, (chosen, fields, sizes) in enumerate(parts):
            threads.append(threading.Thread(target=work, args=(number, chosen, fields)))
            self.enter(partition, [f"{key}-{number}" for key in chosen], sizes, watch_peak=False)
            for key in drop:
                self.model[partition].pop(f"{key}-{number}", None)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # How high it went between the threads depends on who came first: not higher than all of it.
        peak = self.client.snapshot()["peak_bytes_outstanding"]
        most = before + sum(sum(map(sum, sizes.values())) for _, _, sizes in parts)
        assert self.held() <= peak <= max(most, self.peak)
        self.peak = peak

    @invariant()
    def the_books_agree_with_the_model(self) -> None:
        snapshot = self.client.snapshot()
        by_partition = {
            name: sum(size for row in rows.values() for size in row.values())
            for name, rows in self.model.items()
        }
        assert snapshot["bytes_outstanding"] == self.held()
        assert snapshot["peak_bytes_outstanding"] == self.peak
        assert snapshot["keys_outstanding"] == sum(map(len, self.model.values()))
        assert snapshot["unmeasured"] == 0
        assert self.client.bytes_outstanding_by_partition() == {
            name: size for name, size in by_partition.items() if size
        }

    def teardown(self) -> None:
        if hasattr(self, "client"):
            self.client.close()


TestBooks = BooksMachine.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_block_that_is_cleared_bit_by_bit_ends_at_zero() -> None:
    outstanding = OutstandingBytes()
    keys = [f"s{index}" for index in range(100)]
    outstanding.put("p", keys, [ColumnSize("x", 400, 4), ColumnSize("y", 4950, 1, list(range(100)))], 1)
    assert outstanding.stats.bytes_outstanding == 5350
    for index, key in enumerate(keys):
        assert outstanding.clear("p", [key]) == (1, 4 + index)
    assert outstanding.stats.bytes_outstanding == 0
    assert outstanding.clear("p", keys) == (0, 0)


def test_ever_new_sets_of_fields_do_not_pile_up() -> None:
    outstanding = OutstandingBytes()
    for index in range(1000):
        outstanding.put("p", ["a"], [ColumnSize(f"f{index}", 8, 8), ColumnSize("shared", 2, 2)], index)
        outstanding.clear("p", ["a"])
    partition = outstanding._partitions["p"]
    assert len(partition.layers) <= 65
    assert max(len(layer.overlaps) for layer in partition.layers.values()) <= 65


def test_a_prune_spares_what_was_put_since() -> None:
    outstanding = OutstandingBytes()
    outstanding.put("p", ["old", "again", "kept"], [ColumnSize("x", 30, 10)], 1)
    outstanding.put("p", ["new", "again"], [ColumnSize("y", 8, 4)], 5)
    assert outstanding.prune("p", {"kept"}, until=3) == (1, 10)
    assert outstanding.bytes_by_partition() == {"p": 28}
    assert outstanding.prune("nowhere", set(), until=9) == (0, 0)
