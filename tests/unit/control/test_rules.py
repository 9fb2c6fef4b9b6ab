"""What a request may say: each rule with values that are right, values that are wrong, and the message."""

from __future__ import annotations

import math
import operator
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplane.control.rules import (
    PartitionSpec,
    check_claim,
    check_ids,
    check_names,
    check_timeout,
    compile_where,
    group_of,
)
from rlplane.errors import InvalidRequestError, UnknownFieldError


def refused(message: str) -> Any:
    return pytest.raises(InvalidRequestError, match=re.escape(message))


RIGHT: dict[str, Any] = {
    "partition_id": "p",
    "fields": ["x", "y"],
    "num_samples": 8,
    "consumer_tasks": ["train"],
    "grpo_group_size": 2,
    "enums": {"y": ["good", "bad", ""]},
}


def test_a_registration_becomes_a_spec_that_survives_the_wire_and_shares_nothing() -> None:
    words = ["good", "bad"]
    fields = ("x", "y")
    spec = PartitionSpec.checked("p", fields, 0, ["a"], None, {"y": words})
    words.append("ugly")
    assert spec.fields == ["x", "y"] and spec.enums == {"y": ["good", "bad"]}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=PartitionSpec) == spec


@pytest.mark.parametrize(
    "changes", [{}, {"fields": [], "enums": {}}, {"consumer_tasks": []}, {"num_samples": 0}, {"enums": None}]
)
def test_what_a_registration_may_leave_empty(changes: dict[str, Any]) -> None:
    assert PartitionSpec.checked(**(RIGHT | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition_id": ""}, "partition_id must be a non-empty string, not ''"),
        ({"partition_id": 3}, "partition_id must be a non-empty string, not 3"),
        ({"partition_id": None}, "partition_id must be a non-empty string, not None"),
        ({"partition_id": "\ud800"}, r"partition_id is not valid Unicode: '\ud800'"),
        ({"fields": "xy"}, "fields must be a list of strings, not 'xy'"),
        ({"fields": {"x"}}, "fields must be a list of strings, not {'x'}"),
        ({"fields": None}, "fields must be a list of strings, not None"),
        ({"fields": ["x", ""]}, "fields must hold non-empty strings, not ''"),
        ({"fields": ["x", 1]}, "fields must hold non-empty strings, not 1"),
        ({"fields": ["x", "y", "x"]}, "fields names 'x' twice"),
        ({"fields": ["y", "\ud800"]}, r"fields holds '\ud800', which is not valid Unicode"),
        ({"consumer_tasks": ["a", "a"]}, "consumer_tasks names 'a' twice"),
        ({"consumer_tasks": [None]}, "consumer_tasks must hold non-empty strings, not None"),
        ({"num_samples": -1}, "num_samples must be an integer of at least 0, not -1"),
        ({"num_samples": 1.0}, "num_samples must be an integer of at least 0, not 1.0"),
        ({"num_samples": True}, "num_samples must be an integer of at least 0, not True"),
        ({"num_samples": None}, "num_samples must be an integer of at least 0, not None"),
        ({"grpo_group_size": 0}, "grpo_group_size must be an integer of at least 1, or None, not 0"),
        ({"grpo_group_size": "4"}, "grpo_group_size must be an integer of at least 1, or None, not '4'"),
        ({"enums": {"z": ["a"]}}, "enums names 'z', which is not one of the fields ['x', 'y']"),
        ({"enums": {"y": ["a", "a"]}}, "enums['y'] names 'a' twice"),
        ({"enums": {"y": "words"}}, "enums['y'] must be a list of strings, not 'words'"),
        ({"enums": {"y": [1]}}, "enums['y'] must hold strings, not 1"),
        ({"enums": ["y"]}, "enums must map fields to lists of strings, not ['y']"),
    ],
)
def test_what_a_registration_may_not_say(changes: dict[str, Any], message: str) -> None:
    with refused(message):
        PartitionSpec.checked(**(RIGHT | changes))


def test_ids_are_non_empty_strings_and_the_first_wrong_one_is_named() -> None:
    assert check_ids(("a", "ü", " ")) == ["a", "ü", " "]
    assert check_ids([]) == []
    assert check_ids(["a", "a"], distinct=False) == ["a", "a"]
    for ids, message in [
        (["a", "b", "b", "a"], "sample id 'a' is given twice in one call"),
        (["a", ""], "a sample id is a non-empty string, not ''"),
        (["a", 7, None], "a sample id is a non-empty string, not 7"),
        (["a", np.str_("b")], "a sample id is a non-empty string, not np.str_('b')"),
        ("abc", "sample_ids must be a list of strings, not 'abc'"),
        (None, "sample_ids must be a list of strings, not None"),
        (iter("ab"), "sample_ids must be a list of strings, not <"),
        (["a", "x\udfff"], r"sample id 'x\udfff' is not valid Unicode"),
    ]:
        with refused(message):
            check_ids(ids)  # type: ignore[arg-type]


def test_long_values_are_cut_short_in_messages() -> None:
    with pytest.raises(InvalidRequestError) as error:
        check_names("fields", "x" * 1000)
    assert len(str(error.value)) < 150


def test_a_claim_asks_for_at_least_one_and_for_whole_groups_and_known_fields() -> None:
    spec = PartitionSpec.checked(**RIGHT)
    check_claim(spec, 4, {"x", "y"}, ["y"])
    for size in (0, -1, 2.0, True, None, "2"):
        with refused(f"batch_size must be an integer of at least 1, not {size!r}"):
            check_claim(spec, size, {"x"}, [])  # type: ignore[arg-type]
    with refused("batch_size 3 must be a multiple of grpo_group_size 2 of partition 'p'"):
        check_claim(spec, 3, {"x"}, [])
    with pytest.raises(UnknownFieldError, match=r"partition 'p' has no field 'z'; it has \['x', 'y'\]"):
        check_claim(spec, 2, {"y", "x"}, ["x", "z"])


@pytest.mark.parametrize("timeout_s", [0, 0.0, 1, 2.5, math.inf])
def test_a_timeout_is_a_number_of_seconds(timeout_s: float) -> None:
    assert check_timeout(timeout_s) == timeout_s


@pytest.mark.parametrize("timeout_s", [-1, -0.1, math.nan, None, "1", -math.inf])
def test_what_is_no_timeout(timeout_s: Any) -> None:
    with refused(f"timeout_s must be a number of seconds of at least 0, not {timeout_s!r}"):
        check_timeout(timeout_s)


# Groups


@pytest.mark.parametrize(
    ("sample_id", "tag", "group"),
    [
        ("prompt_g0", None, "prompt"),
        ("prompt_g12", {}, "prompt"),
        ("a_g1_g2", None, "a_g1"),
        ("_g3", None, ""),
        ("two\nlines_g3", None, "two\nlines"),
        ("prompt_g0", {"group": None}, "prompt"),
        ("prompt_g0", {"group": "other"}, "other"),
        ("anything", {"group": "other"}, "other"),
    ],
)
def test_a_samples_group_is_its_tag_or_the_head_of_its_id(
    sample_id: str, tag: dict[str, Any] | None, group: str
) -> None:
    assert group_of(sample_id, tag) == group_of(f"{group}_g0", None)


def test_groups_named_by_a_number_and_by_its_digits_are_not_the_same() -> None:
    assert group_of("a", {"group": 7}) != group_of("a", {"group": "7"}) == group_of("7_g1", None)


@pytest.mark.parametrize("sample_id", ["loner", "a_g", "a_gx", "a_g1x", "g1", "a-g1"])
def test_a_sample_of_no_group_is_named(sample_id: str) -> None:
    with refused(f"sample {sample_id!r} is in a partition with grpo_group_size and belongs to no group"):
        group_of(sample_id, {"other": 1})


@pytest.mark.parametrize("group", [1.5, True, ["a"], b"a"])
def test_a_group_that_is_neither_text_nor_a_number_is_named(group: Any) -> None:
    with refused(f"tag 'group' of sample 'a_g0' must be a string or an integer, not {group!r}"):
        group_of("a_g0", {"group": group})


# Conditions

scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-3, 3) | st.text(max_size=2)
comparisons = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(list(comparisons)), scalars, scalars)
def test_a_comparison_is_pythons_and_what_cannot_be_compared_does_not_match(
    name: str, tag: Any, operand: Any
) -> None:
    condition = compile_where({"t": {name: operand}})
    assert condition is not None
    try:
        expected = bool(comparisons[name](tag, operand))
    except TypeError:
        expected = False
    assert condition({"t": tag}) is expected
    assert condition({}) is False, "a sample without the tag never matches"


@settings(max_examples=100, deadline=None)
@given(scalars, st.lists(scalars, max_size=4))
def test_in_and_not_in_are_each_others_opposite(tag: Any, options: list[Any]) -> None:
    inside, outside = compile_where({"t": {"in": options}}), compile_where({"t": {"not in": options}})
    assert inside is not None and outside is not None
    assert inside({"t": tag}) is (tag in options) is not outside({"t": tag})
    assert not inside({}) and not outside({})


def test_all_conditions_must_hold() -> None:
    condition = compile_where({"v": {">=": 2, "<": 5}, "kind": "good"})
    assert condition is not None
    assert condition({"v": 2, "kind": "good"})
    for tags in ({"v": 5, "kind": "good"}, {"v": 1, "kind": "good"}, {"v": 2, "kind": "bad"}, {"v": 2}):
        assert not condition(tags)


@pytest.mark.parametrize("where", [None, {}])
def test_no_condition_is_none(where: Any) -> None:
    assert compile_where(where) is None


def test_a_list_is_compared_with_a_list_and_lists_may_be_options() -> None:
    condition = compile_where({"t": [1, 2]})
    assert condition is not None and condition({"t": [1, 2]}) and not condition({"t": 1})
    among = compile_where({"t": {"in": ([1, 2], "a")}})
    assert among is not None and among({"t": [1, 2]}) and among({"t": "a"}) and not among({"t": 1})


def test_a_tag_that_cannot_be_told_true_or_false_does_not_match() -> None:
    condition = compile_where({"t": {"==": np.zeros(2)}})
    assert condition is not None and not condition({"t": np.zeros(2)})


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (["v"], "where must map tags to conditions, not ['v']"),
        ("v", "where must map tags to conditions, not 'v'"),
        ([], "where must map tags to conditions, not []"),
        ({3: 1}, "where names the tag 3; a tag's name is a string"),
        (
            {"v": {"=>": 1}},
            "where['v'] has the operator '=>'; known ones are ==, !=, <, <=, >, >=, in, not in",
        ),
        ({"v": {"==": 1, "like": 1}}, "where['v'] has the operator 'like'"),
        ({"v": {"in": 3}}, "where['v']['in'] needs a list, not 3"),
        ({"v": {"not in": "abc"}}, "where['v']['not in'] needs a list, not 'abc'"),
    ],
)
def test_a_condition_that_means_nothing_is_refused(where: Any, message: str) -> None:
    with refused(message):
        compile_where(where)


@given(
    value=st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(-3, 3), st.just(float("nan")),
                    st.text(max_size=1), st.lists(st.integers(0, 1), max_size=1)),
    options=st.lists(
        st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(-3, 3), st.just(float("nan")),
                  st.text(max_size=1), st.lists(st.integers(0, 1), max_size=1)),
        max_size=5,
    ),
)  # fmt: skip
def test_membership_is_equality_with_one_of_the_options(value: Any, options: list[Any]) -> None:
    inside, outside = compile_where({"t": {"in": options}}), compile_where({"t": {"not in": options}})
    assert inside is not None and outside is not None
    expected = any(value == option for option in options)
    assert inside({"t": value}) is expected
    assert outside({"t": value}) is not expected
