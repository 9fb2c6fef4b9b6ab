"""What may be written as a column of tensors, and how it comes back: dtype, shape, layout and values."""

from __future__ import annotations

import torch

from rlplane.testing.expectations import equal, expect, has_column, has_columns, jagged, strided
from rlplane.testing.plane_under_test import PlaneUnderTest
from rlplane.testing.promises import NotApplicable, promise

DENSE = (
    "Columns: a dense tensor with one row per sample (any dtype, any number of dimensions, also "
    "`(N,)`); a nested tensor (jagged or strided, with rows that may differ in every dimension); "
    "objects"
)
AS_WRITTEN = "dtype, shape and values come back as they went in."
LAYOUT = (
    "Rows that were written dense come back dense when the rows asked for have one shape, else jagged; "
    "rows that were written nested come back `torch.jagged`."
)
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.complex64,
)


@promise(DENSE, AS_WRITTEN)
def dense_columns_of_every_dtype_come_back_as_they_went_in(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=[str(dtype) for dtype in DTYPES])
    numbers = torch.tensor([[0, 1, 2], [1, 0, 4], [0, 0, 8]])
    columns = {str(dtype): numbers.to(dtype) for dtype in DTYPES}
    part.put("abc", columns)
    has_columns("a read", part.get("abc", columns), columns, "dense")


@promise(DENSE, AS_WRITTEN)
def nested_columns_of_every_dtype_come_back_as_they_went_in(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=[str(dtype) for dtype in DTYPES])
    rows = {str(dtype): [torch.tensor([0, 1, 1]).to(dtype), torch.tensor([1]).to(dtype)] for dtype in DTYPES}
    part.put("ab", {name: jagged(column) for name, column in rows.items()})
    backwards = {name: column[::-1] for name, column in rows.items()}
    has_columns("a read", part.get("ba", rows), backwards, "jagged")


@promise(DENSE, AS_WRITTEN)
def special_values_survive_bit_by_bit(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45], dtype=torch.float32)
    part.put("abcde", {"x": values})
    equal("NaN, infinities, -0.0 and a denormal", part.get("abcde").get("x"), values)


@promise(DENSE, AS_WRITTEN)
def a_column_of_scalars_stays_a_column_of_scalars(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["flat", "tall"])
    part.put("abc", {"flat": torch.arange(3), "tall": torch.arange(3).unsqueeze(1)})
    batch = part.get("cab", ["flat", "tall"])
    equal("a column of shape (3,)", batch.get("flat"), torch.tensor([2, 0, 1]))
    equal("a column of shape (3, 1)", batch.get("tall"), torch.tensor([[2], [0], [1]]))
    one = part.get("b", ["flat", "tall"])
    equal("one row of a column of shape (3,)", one.get("flat"), torch.tensor([1]))
    equal("one row of a column of shape (3, 1)", one.get("tall"), torch.tensor([[1]]))


@promise(DENSE, AS_WRITTEN)
def rows_of_many_dimensions_keep_their_shape(plane: PlaneUnderTest) -> None:
    shapes = {"2d": (3, 2, 4), "4d": (3, 2, 1, 3, 2), "empty": (3, 0), "empty in front": (3, 0, 4)}
    part = plane.partition(fields=list(shapes))
    columns = {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
        for name, shape in shapes.items()
    }
    part.put("abc", columns)
    backwards = {name: column.flip(0) for name, column in columns.items()}
    has_columns("a read", part.get("cba", columns), backwards, "dense")


@promise(DENSE, LAYOUT)
def nested_rows_come_back_jagged(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["flat", "wide", "uniform"])
    flat = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0]), torch.tensor([5.0, 6.0])]
    wide = [torch.arange(n * 6).reshape(n, 2, 3) for n in (2, 1, 4)]
    uniform = [torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5, 6])]
    part.put("abc", {"flat": jagged(flat), "wide": jagged(wide), "uniform": jagged(uniform)})
    batch = part.get("abc", ["flat", "wide", "uniform"])
    has_column("rows of several lengths", batch, "flat", flat, "jagged")
    has_column("rows of several lengths and more dimensions", batch, "wide", wide, "jagged")
    has_column("nested rows of one length", batch, "uniform", uniform, "jagged")
    has_column("one nested row", part.get("c", ["flat"]), "flat", flat[2:], "jagged")
    # torch pads to the length of all rows together unless the tensor knows its longest.
    for ids, padded in (("abc", [[1, 2, 3], [4, 0, 0], [5, 6, 0]]), ("cb", [[5, 6], [4, 0]])):
        column = torch.nested.to_padded_tensor(part.get(ids, ["flat"]).get("flat"), 0)
        equal(f"the rows of {ids!r}, padded by torch", column, torch.tensor(padded, dtype=torch.float32))


@promise(DENSE, LAYOUT)
def nested_rows_in_the_strided_layout_come_back_jagged(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["flat", "wide"])
    flat = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])]
    wide = [torch.arange(6).reshape(3, 2), torch.arange(2).reshape(1, 2)]
    part.put("ab", {"flat": strided(flat), "wide": strided(wide)})
    wanted = {"flat": flat[::-1], "wide": wide[::-1]}
    has_columns("strided rows", part.get("ba", wanted), wanted, "jagged")


@promise(DENSE, AS_WRITTEN)
def empty_rows_stay_empty_rows(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["some", "all", "wide"])
    rows = {
        "some": [torch.ones(0), torch.ones(3), torch.ones(0)],
        "all": [torch.ones(0), torch.ones(0), torch.ones(0)],
        "wide": [torch.ones(2, 3), torch.ones(0, 3), torch.ones(1, 3)],
    }
    part.put("abc", {name: jagged(column) for name, column in rows.items()})
    has_columns("rows of which some are empty", part.get("abc", rows), rows, "jagged")
    has_column("one empty row", part.get("a", ["some"]), "some", [torch.ones(0)], "jagged")


@promise(LAYOUT)
def dense_rows_of_several_shapes_come_back_jagged_and_of_one_shape_dense(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "wide"])
    short, long = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0, 7.0]])
    narrow, tall = torch.ones(2, 1, 3), torch.ones(1, 4, 3)
    part.put("ab", {"x": short, "wide": narrow})
    part.put("c", {"x": long, "wide": tall})
    mixed = {"x": [short[0], long[0], short[1]], "wide": [narrow[0], tall[0], narrow[1]]}
    has_columns("rows of two shapes", part.get("acb", mixed), mixed, "jagged")
    alike = {"x": [short[1], short[0]], "wide": [narrow[1], narrow[0]]}
    has_columns("the rows of one shape", part.get("ba", alike), alike, "dense")
    other = {"x": [long[0]], "wide": [tall[0]]}
    has_columns("the row of the other shape", part.get("c", other), other, "dense")


@promise(LAYOUT)
def dense_and_nested_rows_of_one_field_come_back_jagged(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put("a", {"x": torch.tensor([[1.0, 2.0]])})
    part.put("b", {"x": jagged([torch.tensor([3.0, 4.0])])})
    rows = [torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0])]
    has_column("a dense row and a nested one", part.get("ba"), "x", rows, "jagged")


@promise(AS_WRITTEN)
def columns_that_are_views_are_written_as_they_look(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["transposed", "stepped", "expanded", "narrowed"])
    base = torch.arange(24, dtype=torch.int64).reshape(4, 6)
    narrowed = torch.nested.narrow(
        base[:3].clone(), 1, torch.tensor([0, 2, 1]), torch.tensor([6, 2, 0]), layout=torch.jagged
    )
    columns = {
        "transposed": base[:, :3].t(),
        "stepped": base[::2, ::3].flip(0).repeat(2, 1)[:3],
        "expanded": torch.tensor([7]).expand(3, 5),
    }
    part.put("abc", {**columns, "narrowed": narrowed})
    has_columns("a view", part.get("abc", columns), columns, "dense")
    rows = [base[0], base[1, 2:4], base[2, :0]]
    has_column("a jagged view with gaps", part.get("abc", ["narrowed"]), "narrowed", rows, "jagged")


@promise("Gradients are detached; what is on a device is moved to the host.")
def gradients_are_detached(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["dense", "nested"])
    leaf = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    nested = torch.nested.as_nested_tensor([leaf[0] * 2, leaf[1, :1] * 2], layout=torch.jagged)
    part.put("ab", {"dense": leaf * 2, "nested": nested})
    batch = part.get("ab", ["dense", "nested"])
    for name in ("dense", "nested"):
        expect(not batch.get(name).requires_grad, f"field {name!r} came back with requires_grad")
    has_column("a read", batch, "dense", list(leaf.detach() * 2), "dense")
    has_column("a read", batch, "nested", [torch.tensor([2.0, 4.0]), torch.tensor([6.0])], "jagged")


@promise("Gradients are detached; what is on a device is moved to the host.")
def what_is_on_a_device_is_moved_to_the_host(plane: PlaneUnderTest) -> None:
    if not torch.accelerator.is_available():
        raise NotApplicable("this machine has no accelerator")
    device = torch.accelerator.current_accelerator()
    part = plane.partition(fields=["dense", "nested"])
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    part.put("ab", {"dense": torch.arange(2).to(device), "nested": jagged(rows).to(device)})
    batch = part.get("ab", ["dense", "nested"])
    for name in ("dense", "nested"):
        equal(f"the device of {name!r}", batch.get(name).device.type, "cpu")
    has_column("a read", batch, "dense", list(torch.arange(2)), "dense")
    has_column("a read", batch, "nested", rows, "jagged")
