"""What a read promises: the rows and fields that were asked for, all of them, in that order."""

from __future__ import annotations

import random

import torch

from rlplane.interfaces import KVBatchMeta
from rlplane.testing.expectations import equal, has_column, has_samples, jagged, objects, refuses
from rlplane.testing.plane_under_test import PlaneUnderTest
from rlplane.testing.promises import promise

ORDER = (
    "Rows in the order asked, also when an id is asked for twice; fields exactly those named, in that order."
)
MISSING = "A missing sample or an unproduced field: `KeyError` that names the first few. Never a short read."


@promise(ORDER)
def rows_come_in_the_order_asked_also_twice(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["dense", "nested", "object"])
    ids = [f"row-{i}" for i in range(60)]
    rows = [torch.arange(i % 7) + i for i in range(60)]
    for start in range(0, 60, 7):
        mine = slice(start, start + 7)
        columns = {
            "dense": torch.arange(60)[mine],
            "nested": jagged(rows[mine]),
            "object": objects([{"i": i} for i in range(60)[mine]]),
        }
        part.put(ids[mine], columns)
    chance = random.Random(7)
    orders = [list(range(60)), list(range(59, -1, -1)), [5, 5, 5], [59, 0, 59, 30, 0]]
    orders += [chance.sample(range(60), 25), chance.choices(range(60), k=90)]
    for order in orders:
        batch = part.get([ids[i] for i in order], ["dense", "nested", "object"])
        what = f"a read of rows {order[:5]}…"
        equal(f"the batch size of {what}", list(batch.batch_size), [len(order)])
        has_column(what, batch, "dense", [torch.tensor(i) for i in order], "dense")
        has_column(what, batch, "nested", [rows[i] for i in order], "jagged")
        has_column(what, batch, "object", [{"i": i} for i in order], "objects")


@promise(ORDER)
def fields_are_exactly_those_named_in_that_order(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y", "z"])
    part.put("a", {name: torch.zeros(1) for name in "xyz"})
    for names in (["z", "x"], ["y"], ["x", "y", "z"]):
        equal("the fields of a read", list(part.get("a", names).keys()), names)
        meta = KVBatchMeta(part.name, None, ["a"], fields=names)
        equal("the fields of get_data", list(part.client.get_data(meta).keys()), names)


@promise(ORDER)
def the_same_id_in_two_partitions_is_two_samples(plane: PlaneUnderTest) -> None:
    one, two = plane.partition(), plane.partition()
    one.put_numbers("ab", start=1)
    two.put_numbers("ba", start=5)
    equal("the first partition", one.numbers("ab"), [1.0, 2.0])
    equal("the second partition", two.numbers("ab"), [6.0, 5.0])
    two.clear("a")
    equal("the first partition after a clear of the second", one.numbers("ab"), [1.0, 2.0])
    has_samples("a claim of the second", two.claim_ready(), "b")
    has_samples("a claim of the first", one.claim_ready(), "ab")


@promise(MISSING)
def a_missing_sample_is_an_error_that_names_it(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("abc")
    part.clear("b")
    refuses(KeyError, "reading a sample that never was", part.get, ["a", "nobody"], mentions=["nobody"])
    refuses(KeyError, "reading a sample that was cleared", part.get, ["c", "b"], mentions=["b"])
    meta = KVBatchMeta(part.name, None, ["a", "gone"], fields=["x"])
    refuses(KeyError, "get_data of a missing sample", part.client.get_data, meta, mentions=["gone"])
    many = [f"missing-{i}" for i in range(1000)]
    error = refuses(KeyError, "reading 1000 missing samples", part.get, many, mentions=["missing-0"])
    equal("whether an error about 1000 samples stays readable", len(str(error)) < 5000, True)


@promise(MISSING)
def an_unproduced_field_is_an_error_that_names_it(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "reward"])
    part.put_numbers("ab")
    part.put_numbers("a", field="reward")
    what = "reading a field that one row does not have"
    refuses(KeyError, what, part.get, "ab", ["x", "reward"], mentions=["reward"])
    refuses(KeyError, "reading a field that is not known", part.get, "a", ["nowhere"], mentions=["nowhere"])
    meta = KVBatchMeta(part.name, None, ["b"], fields=["reward"])
    refuses(KeyError, "get_data of an unproduced field", part.client.get_data, meta, mentions=["reward"])


@promise(MISSING)
def a_read_from_an_unregistered_partition_is_an_error(plane: PlaneUnderTest) -> None:
    refuses(KeyError, "a read", plane.unregistered().get, "a")


@promise(
    "`get_data` without `select_fields` and without `meta.fields`: `ValueError`. An empty list of fields: "
    "`ValueError`."
)
def a_read_that_names_no_field_is_refused(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("a")
    meta = KVBatchMeta(part.name, None, ["a"])
    refuses(ValueError, "get_data without fields", part.client.get_data, meta)
    refuses(ValueError, "get_data with an empty list of fields", part.client.get_data, meta, [])
    refuses(ValueError, "get_samples with an empty list of fields", part.get, "a", [])


@promise("Read the samples of ``meta``: ``select_fields``, else ``meta.fields``, else ``ValueError``.")
def selected_fields_win_over_those_of_the_meta(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"])
    meta = part.put("ab", {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([3.0, 4.0])})
    equal("the fields of get_data", list(part.client.get_data(meta, ["y"]).keys()), ["y"])
    batch = part.client.get_data(meta.subset([1, 0]).with_fields(["x"]))
    equal("the rows of a subset", batch.get("x"), torch.tensor([2.0, 1.0]))


@promise("An empty list of ids gives an empty `TensorDict` with batch size 0.")
def a_read_of_no_ids_is_empty(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    equal("the batch size before any write", list(part.get([]).batch_size), [0])
    part.put_numbers("a")
    equal("the batch size of get_samples", list(part.get([]).batch_size), [0])
    meta = KVBatchMeta(part.name, "train", [], fields=["x"])
    equal("the batch size of get_data", list(part.client.get_data(meta).batch_size), [0])


@promise("Rows of one field with different dtypes cannot be one tensor: `ValueError` that names them.")
def rows_of_several_dtypes_are_not_read_as_one_tensor(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put("a", {"x": torch.tensor([[1.5]], dtype=torch.float16)})
    part.put("b", {"x": torch.tensor([[2]], dtype=torch.int32)})
    names = ["float16", "int32"]
    refuses(ValueError, "reading rows of float16 and of int32", part.get, "ab", mentions=names)
    equal("the row of float16", part.get("a").get("x"), torch.tensor([[1.5]], dtype=torch.float16))
    equal("the row of int32", part.get("b").get("x"), torch.tensor([[2]], dtype=torch.int32))


@promise("Never moves a cursor.")
def a_read_never_moves_a_cursor(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    meta = part.put_numbers("abc")
    part.get("abc")
    part.client.get_data(meta)
    has_samples("a claim after reads", part.claim_ready(2), "ab")
    part.get("c")
    has_samples("the next claim", part.claim_ready(2), "c")
