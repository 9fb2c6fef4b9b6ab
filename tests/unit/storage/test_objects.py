"""What may travel in columns and tags comes back equal; what may not is refused by name."""

from __future__ import annotations

import datetime
import decimal
import enum
import math
import re
import uuid
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlplane.errors import InvalidRequestError, UnsupportedValueError
from rlplane.storage.objects import decode_object, encode_objects, open_tags, plain_tags

atoms = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)
arrays = hnp.arrays(
    hnp.boolean_dtypes()
    | hnp.integer_dtypes()
    | hnp.unsigned_integer_dtypes()
    | hnp.floating_dtypes()
    | hnp.complex_number_dtypes()
    | hnp.byte_string_dtypes(min_len=1)
    | hnp.unicode_string_dtypes(min_len=1),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
values: st.SearchStrategy[Any] = st.recursive(
    atoms | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
quick = settings(max_examples=80, deadline=None)


def equal(left: Any, right: Any) -> bool:
    """Equal in type and value, NaNs too."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        same_kind = left.dtype == right.dtype and left.shape == right.shape
        return same_kind and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(equal(left[key], right[key]) for key in left)
    return bool(left == right)


def there_and_back(value: Any, **options: Any) -> Any:
    (encoded,) = encode_objects([value], field="f", **options)
    return decode_object(memoryview(encoded), **options)


def over_the_wire(tags: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(tags), type=list[dict[str, Any]])


def tag_there_and_back(value: Any, **options: bool) -> Any:
    sealed = over_the_wire(plain_tags([{"t": value}], **options))
    return open_tags(sealed, **options)[0]["t"]


@quick
@given(values)
def test_every_object_that_may_travel_comes_back_equal(value: Any) -> None:
    assert equal(there_and_back(value), value)
    assert equal(there_and_back(value, allow_pickle=True), value)


def is_scalar(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 0


tag_values = values.filter(lambda value: not (is_scalar(value) and value.dtype.kind == "c"))


@quick
@given(st.lists(st.dictionaries(names, tag_values, max_size=3), max_size=3))
def test_tags_come_back_equal_through_the_wire(tags: list[dict[str, Any]]) -> None:
    there = open_tags(over_the_wire(plain_tags(tags)))
    # A 0-d array in a tag stands for its value.
    plain = [{key: v.item() if is_scalar(v) else v for key, v in tag.items()} for tag in tags]
    assert equal(there, plain)


@pytest.mark.parametrize(
    ("given_", "comes_back"),
    [
        ((1, (2, 3)), [1, [2, 3]]),
        (np.float32(0.5), 0.5),
        (np.int8(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.str_("text"), "text"),
        (np.bytes_(b"bytes"), b"bytes"),
        (np.float16("nan"), math.nan),
    ],
)
def test_tuples_and_numpy_scalars_come_back_as_what_python_has_for_them(given_: Any, comes_back: Any) -> None:
    assert equal(there_and_back(given_), comes_back)
    assert equal(tag_there_and_back(given_), comes_back)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::-3],
        np.broadcast_to(np.float32(2), (2, 2)),
        np.array(7),
        np.zeros((0, 3), np.float16),
        np.array(["a", "bcd"]),
        np.array([1 + 2j]),
    ],
)
def test_an_array_keeps_its_dtype_shape_and_values_and_is_the_readers_own(array: Any) -> None:
    back = there_and_back(array)
    assert back.dtype == array.dtype and back.shape == array.shape
    assert back.flags.writeable and back.flags.c_contiguous
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("scalar", [torch.tensor(2.5), np.array(2.5), np.float32(2.5)])
def test_a_scalar_tensor_in_a_tag_is_its_value_so_that_conditions_can_compare_it(scalar: Any) -> None:
    assert plain_tags([{"t": scalar}]) == [{"t": 2.5}]


class Colour(enum.IntEnum):
    RED = 1


class Words(str):
    pass


@dataclass
class Point:
    x: int


Pair = namedtuple("Pair", "a b")

REFUSED: list[tuple[Any, str]] = [
    ({1, 2}, "builtins.set"),
    (1j, "builtins.complex"),
    (np.complex64(1j), "numpy.complex64"),
    (object, "builtins.type"),
    (Point(1), "Point"),
    (Pair(1, 2), "Pair"),
    (Colour.RED, "Colour"),
    (Words("x"), "Words"),
    (OrderedDict(a=1), "OrderedDict"),
    (bytearray(b"x"), "bytearray"),
    (range(3), "builtins.range"),
    (datetime.date(2024, 1, 1), "datetime.date"),
    (decimal.Decimal("1.5"), "decimal.Decimal"),
    (uuid.UUID(int=1), "uuid.UUID"),
    (torch.ones(2), "torch.Tensor"),
    (np.datetime64("2024-01-01", "ns"), "numpy.datetime64"),
    (np.datetime64("2024-01-01"), "numpy.datetime64"),
    (np.timedelta64(3, "ns"), "numpy.timedelta64"),
    (np.longdouble(1), "numpy.longdouble"),
    (np.void(b"ab"), "numpy.void"),
    (np.array([None, 1], object), "a numpy array of dtype object"),
    (np.zeros(2, [("a", "i4")]), "a numpy array of dtype [('a', '<i4')]"),
    (np.array(["2024"], "datetime64[D]"), "a numpy array of dtype datetime64[D]"),
    (np.ma.masked_array([1], [True]), "MaskedArray"),
    ({1: "a"}, "a dict with keys that are not strings"),
    (msgspec.msgpack.Ext(1, b"x"), "Ext"),
]


@pytest.mark.parametrize(("value", "named"), REFUSED, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("inside", [lambda v: v, lambda v: [v], lambda v: {"a": [1, v]}])
def test_what_may_not_travel_is_refused_by_field_and_type(value: Any, named: str, inside: Any) -> None:
    with pytest.raises(UnsupportedValueError, match=r"^field 'pic' holds ") as error:
        encode_objects(["fine", inside(value)], field="pic")
    assert named in str(error.value) and "allow_pickle" in str(error.value)
    with pytest.raises(UnsupportedValueError, match=r"^tag 'when' holds ") as error:
        plain_tags([{"fine": 1}, {"when": inside(value)}])
    assert named in str(error.value)


@pytest.mark.parametrize(("value", "named"), REFUSED[:8], ids=lambda value: str(value)[:30])
def test_what_pickles_travels_when_the_config_says_so(value: Any, named: str) -> None:
    for back in (there_and_back(value, allow_pickle=True), tag_there_and_back(value, allow_pickle=True)):
        assert type(back) is type(value) and back == value
    nested = {"list": [1, value], "array": np.arange(2)}
    back = there_and_back(nested, allow_pickle=True)
    assert back["list"] == [1, value] and back["array"].tolist() == [0, 1]


def test_what_was_pickled_is_not_unpickled_unless_the_config_says_so() -> None:
    (encoded,) = encode_objects([{1, 2}], field="f", allow_pickle=True)
    with pytest.raises(UnsupportedValueError, match="allow_pickle: true"):
        decode_object(encoded)
    sealed = plain_tags([{"t": {1, 2}}], allow_pickle=True)
    assert isinstance(sealed[0]["t"], msgspec.msgpack.Ext), "the controller keeps it sealed"
    with pytest.raises(UnsupportedValueError, match="allow_pickle: true"):
        open_tags(sealed)


def test_what_does_not_pickle_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedValueError, match=r"field 'f' .* cannot be pickled: .*lambda"):
        encode_objects([lambda: None], field="f", allow_pickle=True)


def test_an_unknown_extension_is_refused() -> None:
    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(77, b""))
    with pytest.raises(UnsupportedValueError, match="extension 77 is not one of ours"):
        decode_object(data)


@pytest.mark.parametrize(
    "value", [2**64, -(2**63) - 1, [2**64], {"a": 10**30}, "\ud800", ["\ud800"], {"\ud800": 1}]
)
def test_numbers_and_text_that_msgpack_does_not_have_are_refused_by_name(value: Any) -> None:
    with pytest.raises(UnsupportedValueError, match="field 'f' holds"):
        encode_objects([value], field="f")
    with pytest.raises(UnsupportedValueError, match="tag 't' holds"):
        plain_tags([{"ok": 1, "t": value}])


def test_a_tags_name_is_text() -> None:
    with pytest.raises(InvalidRequestError, match="a tag's name is a string, not 3"):
        plain_tags([{"a": 1}, {3: 1}])  # type: ignore[dict-item]
    with pytest.raises(InvalidRequestError, match=re.escape(r"a tag's name is valid Unicode, not '\ud800'")):
        plain_tags([{"\ud800": 1}])


@pytest.mark.parametrize("tag", [None, ["a"], "abc", OrderedDict(a=1)])
def test_a_tag_is_a_dict(tag: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"a tag is a dict per sample, not {type(tag).__name__}"):
        plain_tags([{}, tag])


def test_what_is_nested_without_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnsupportedValueError, match=r"field 'f' holds .* nested too"):
        encode_objects([endless], field="f")
    with pytest.raises(UnsupportedValueError, match=r"tag 't' holds .* nested too"):
        plain_tags([{"t": endless}])


def test_sealed_and_opened_tags_share_nothing_that_the_caller_can_change() -> None:
    mine: list[dict[str, Any]] = [{"list": [1, [2]], "array": np.zeros(2)}]
    sealed = plain_tags(mine)
    mine[0]["list"][1].append(3)
    mine[0]["array"][0] = 9
    first, second = open_tags(sealed)[0], open_tags(sealed)[0]
    assert first["list"] == [1, [2]] and first["array"].tolist() == [0, 0]
    first["list"].append("mine")
    first["array"][1] = 1
    first["new"] = True
    assert second["list"] == [1, [2]] and second["array"].tolist() == [0, 0] and "new" not in second
    simple = plain_tags([{"v": 1}])
    open_tags(simple)[0]["v"] = 2
    assert simple == [{"v": 1}]
