"""KVBatchMeta by value, and the shape of DataPlaneClient."""

import copy
import inspect
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlplane.errors import InvalidRequestError
from rlplane.interfaces import DataPlaneClient, KVBatchMeta


def make(size: int = 4, **changes: Any) -> KVBatchMeta:
    values: dict[str, Any] = {
        "partition_id": "train",
        "task_name": "logprob",
        "sample_ids": [f"s{i}" for i in range(size)],
        "fields": ["input_ids"],
        "sequence_lengths": [10 + i for i in range(size)],
        "extra_info": {"step": [1, 2]},
        "tags": [{"version": i, "notes": [i]} for i in range(size)],
    }
    return KVBatchMeta(**{**values, **changes})


def test_the_size_is_the_number_of_samples() -> None:
    assert make(3).size == 3
    assert KVBatchMeta("p", None, []).size == 0


@pytest.mark.parametrize(("name", "column"), [("sequence_lengths", [1]), ("tags", [{}])])
def test_a_column_of_another_length_is_refused(name: str, column: list[Any]) -> None:
    with pytest.raises(ValueError, match=rf"{name} has 1 entries for 4 sample_ids"):
        make(4, **{name: column})


@pytest.mark.parametrize("name", ["sample_ids", "fields"])
def test_text_is_not_a_list_of_names(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is a list of names; got the text 'abcd'"):
        make(4, **{name: "abcd"})


def test_lengths_may_come_as_a_tensor() -> None:
    lengths = make(2, sequence_lengths=torch.tensor([3, 4])).sequence_lengths
    assert lengths == [3, 4]
    assert all(type(n) is int for n in lengths)


# Ownership


def test_a_meta_shares_nothing_mutable_with_the_caller() -> None:
    given_: dict[str, Any] = {
        "sample_ids": ["a"],
        "fields": ["x"],
        "sequence_lengths": [1],
        "extra_info": {"nested": {"list": [1]}},
        "tags": [{"deep": {"list": [1]}, "array": np.zeros(2)}],
    }
    meta = KVBatchMeta("p", None, **given_)
    before = copy.deepcopy(meta)
    given_["sample_ids"].append("b")
    given_["fields"].append("y")
    given_["sequence_lengths"][0] = 9
    given_["extra_info"]["nested"]["list"].append(2)
    given_["tags"][0]["deep"]["list"].append(2)
    given_["tags"][0]["array"] += 1
    assert meta == before


@pytest.mark.parametrize(
    "derive",
    [
        lambda meta: meta.subset([0, 1]),
        lambda meta: meta.slice(0, 2),
        lambda meta: meta.drop([0]),
        lambda meta: meta.with_fields(["x"]),
        lambda meta: meta.concat(),
        lambda meta: meta.concat(make(2)),
        lambda meta: meta._replace(sample_ids=["a"], sequence_lengths=None, tags=meta.tags[:1]),
    ],
)
def test_a_meta_shares_nothing_mutable_with_the_one_it_came_from(derive: Any) -> None:
    meta = make()
    before = copy.deepcopy(meta)
    other = derive(meta)
    other.sample_ids.append("zz")
    other.fields.append("zz")
    other.extra_info["step"].append(3)
    for tag in other.tags:
        tag["notes"].append("zz")
        tag["new"] = 1
    assert meta == before


def test_a_row_taken_twice_has_tags_of_its_own() -> None:
    twice = make().subset([1, 1])
    assert twice.tags is not None
    twice.tags[0]["notes"].append("x")
    assert twice.tags[1]["notes"] == [1]


def test_a_computed_tensor_in_extra_info_is_copied_without_its_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    meta = make(extra_info={"mean": weight * 2})
    assert not meta.extra_info["mean"].requires_grad


# Tags


def test_stamping_makes_tags_of_plain_values() -> None:
    meta = KVBatchMeta("p", None, ["a", "b"])
    columns: dict[str, Any] = {
        "tensor": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "array": np.array([1, 2], dtype=np.int8),
        "list": ["x", None],
        "scalars": [torch.tensor(3), np.float32(4.0)],
    }
    meta.stamp_tags(columns)
    assert meta.tags == [
        {"tensor": 1.5, "array": 1, "list": "x", "scalars": 3},
        {"tensor": 2.5, "array": 2, "list": None, "scalars": 4.0},
    ]
    assert {type(value) for tag in meta.tags for value in tag.values()} == {float, int, str, type(None)}


def test_stamping_keeps_other_tags() -> None:
    meta = make(2)
    meta.stamp_tags({"version": [7, 8]})
    assert meta.tags == [{"version": 7, "notes": [0]}, {"version": 8, "notes": [1]}]


def test_stamping_a_wrong_length_changes_nothing() -> None:
    meta = make(2)
    before = copy.deepcopy(meta)
    with pytest.raises(ValueError, match=r"scalars\['b'\] has 1 entries for 2"):
        meta.stamp_tags({"a": [1, 2], "b": [1]})
    assert meta == before


# Rows


def test_a_subset_takes_rows_in_the_order_asked() -> None:
    meta = make().subset([2, -4])
    assert meta.sample_ids == ["s2", "s0"]
    assert meta.sequence_lengths == [12, 10]
    assert meta.tags == [{"version": 2, "notes": [2]}, {"version": 0, "notes": [0]}]
    assert (meta.partition_id, meta.task_name, meta.fields) == ("train", "logprob", ["input_ids"])
    assert meta.extra_info == {"step": [1, 2]}


@pytest.mark.parametrize("indices", [torch.tensor([1, 3]), np.array([1, 3]), (1, 3), range(1, 4, 2)])
def test_indices_may_be_any_sequence(indices: Any) -> None:
    assert make().subset(indices).sample_ids == ["s1", "s3"]


@pytest.mark.parametrize("index", [4, -5])
def test_a_row_that_is_not_there_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"row {index} of a meta with 4 samples"):
        make().subset([index])
    with pytest.raises(IndexError, match=f"row {index}"):
        make().drop([index])


def test_a_mask_is_not_taken_for_row_numbers() -> None:
    with pytest.raises(ValueError, match="mask"):
        make().subset(torch.tensor([True, False, True, False]))  # type: ignore[arg-type]


def test_a_slice_is_clipped_like_a_list() -> None:
    assert make().slice(1, 3).sample_ids == ["s1", "s2"]
    assert make().slice(2, 99).sample_ids == ["s2", "s3"]
    assert make().slice(3, 1).size == 0


def test_dropping_keeps_the_rest_in_order() -> None:
    rest = make().drop([0, -1])
    assert rest is not None
    assert rest.sample_ids == ["s1", "s2"]


def test_dropping_everything_leaves_none() -> None:
    assert make().drop(range(4)) is None


def test_dropping_nothing_is_a_copy() -> None:
    assert make().drop([]) == make()


def test_with_fields_adds_to_the_fields_alone() -> None:
    """Each once and in order, as NeMo-RL's ``KVBatchMeta.with_fields`` does."""
    meta = make().with_fields(["a", "input_ids", "b", "a"])
    assert meta == make(fields=["input_ids", "a", "b"])
    assert make(fields=None).with_fields(("x", "y", "x")).fields == ["x", "y"]


def test_replace_drops_tags_unless_they_are_given() -> None:
    meta = make()._replace(sample_ids=["x"], sequence_lengths=[3])
    assert (meta.sample_ids, meta.sequence_lengths, meta.tags) == (["x"], [3], None)
    assert meta.fields == ["input_ids"]


# Concat


def test_concat_appends_rows_in_order() -> None:
    parts = [make().slice(0, 1), make().slice(1, 3), make().slice(3, 4)]
    assert parts[0].concat(*parts[1:]) == make()


def test_concat_of_another_partition_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot concat 'eval' to 'train': partition_ids must match"):
        make().concat(make(partition_id="eval"))


def test_concat_keeps_only_what_every_part_has() -> None:
    joined = make(2).concat(make(2, sequence_lengths=None, tags=None, fields=["input_ids", "reward"]))
    assert joined.sequence_lengths is None
    assert joined.tags is None


def test_concat_has_the_fields_of_the_first() -> None:
    """As NeMo-RL's ``KVBatchMeta.concat`` does."""
    assert make(2).concat(make(2, fields=["reward"])).fields == ["input_ids"]
    assert make(2, fields=None).concat(make(2)).fields is None


def test_an_empty_part_takes_nothing_away_from_a_concat() -> None:
    empty = KVBatchMeta("train", "logprob", [])
    assert empty.concat(make()).tags == make().tags
    assert make().concat(empty) == make()


@given(st.lists(st.integers(0, 9), max_size=30))
def test_subset_agrees_with_indexing(indices: list[int]) -> None:
    meta = make(10)
    assert meta.subset(indices).sample_ids == [meta.sample_ids[i] for i in indices]


# By value


def test_metas_compare_by_value() -> None:
    assert make() == make()
    assert make() != make(partition_id="eval")
    assert make() != make(tags=None)
    assert make() != "a meta"


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (np.arange(3), np.arange(3), True),
        (np.arange(3), np.arange(1, 4), False),
        (np.arange(3), np.arange(4), False),
        (np.arange(3), np.arange(3.0), False),
        (np.arange(3), [0, 1, 2], False),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (np.array([{"a": np.arange(2)}, None]), np.array([{"a": np.arange(2)}, None]), True),
        (np.array([{"a": np.arange(2)}, None]), np.array([{"a": np.arange(3)}, None]), False),
        (np.zeros(0), np.zeros(0), True),
        (torch.arange(3), torch.arange(3), True),
        (torch.arange(3), torch.tensor([0, 1, 3]), False),
        ([{"x": np.arange(2)}], [{"x": np.arange(2)}], True),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        ((1, 2), [1, 2], False),
        ({1, 2}, {2, 1}, True),
    ],
)
def test_tags_and_extra_info_with_arrays_compare_by_value(left: Any, right: Any, equal: bool) -> None:
    assert (make(1, tags=[{"x": left}]) == make(1, tags=[{"x": right}])) is equal
    assert (make(1, extra_info={"x": left}) == make(1, extra_info={"x": right})) is equal


def test_a_meta_is_not_hashable_because_it_can_change() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(make())


def test_a_meta_survives_pickling() -> None:
    meta = make(tags=[{"x": np.arange(i), "nan": float("nan")} for i in range(4)])
    assert pickle.loads(pickle.dumps(meta)) == meta


def test_the_repr_of_ten_thousand_samples_is_short() -> None:
    text = repr(make(10_000))
    assert len(text) < 300
    assert "size=10000" in text
    assert "'s0', 's1', … , 's9999'" in text
    assert "sequence_lengths=10..10009" in text
    assert "tags=['notes', 'version']" in text


def test_the_repr_of_a_few_samples_shows_them_all() -> None:
    assert "sample_ids=['s0', 's1', 's2']" in repr(make(3))
    assert (
        repr(KVBatchMeta("p", None, [])) == "KVBatchMeta('p', task=None, size=0, sample_ids=[], fields=None)"
    )


# The client


class OnlyTheContract(DataPlaneClient):
    """Every abstract method and no optional one."""

    closed = 0

    def close(self) -> None:
        self.closed += 1

    def _no(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not called here")

    register_partition = claim_meta = get_data = check_consumption_status = _no
    put_samples = get_samples = clear_samples = _no


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("list_sample_ids", ["p"]),
        ("partition_status", ["p"]),
        ("save_checkpoint", ["x"]),
        ("load_checkpoint", ["x"]),
    ],
)
def test_an_optional_method_that_is_lacking_names_the_adapter(method: str, arguments: list[str]) -> None:
    with pytest.raises(NotImplementedError, match=f"OnlyTheContract does not support {method}"):
        getattr(OnlyTheContract(), method)(*arguments)


def test_a_client_is_closed_at_the_end_of_its_with_block() -> None:
    with OnlyTheContract() as client:
        pass
    assert client.closed == 1


def test_the_abstract_methods_are_those_of_the_contract() -> None:
    assert DataPlaneClient.__abstractmethods__ == {
        "register_partition",
        "claim_meta",
        "get_data",
        "check_consumption_status",
        "put_samples",
        "get_samples",
        "clear_samples",
        "close",
    }


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        (
            "register_partition",
            "partition_id, fields, num_samples, consumer_tasks, grpo_group_size=None, enums=None, *,"
            " flow=None, produces=None",
        ),
        (
            "claim_meta",
            "partition_id, task_name, required_fields, batch_size, dp_rank=None, blocking=True,"
            " timeout_s=60.0, *, where=None, max_tokens=None, order=None, dp_world=None, step=None,"
            " max_uses=1, repeat_where=None, split_groups=False",
        ),
        ("get_data", "meta, select_fields=None"),
        ("check_consumption_status", "partition_id, task_names"),
        (
            "put_samples",
            "sample_ids, partition_id, fields=None, tags=None, *, timeout_s=60.0, must_exist=False",
        ),
        ("get_samples", "sample_ids, partition_id, select_fields"),
        ("clear_samples", "sample_ids, partition_id"),
        ("close", ""),
    ],
)
def test_a_call_has_the_arguments_and_defaults_of_the_contract(method: str, parameters: str) -> None:
    signature = inspect.signature(getattr(DataPlaneClient, method))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    shown = str(inspect.Signature(bare[1:]))
    assert shown == f"({parameters})"
