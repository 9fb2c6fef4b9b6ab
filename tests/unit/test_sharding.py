"""shard_meta_for_dp: nothing lost, nothing doubled, and the ranks alike."""

import pickle
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplane.columns.sharding import shard_meta_for_dp
from rlplane.interfaces import KVBatchMeta


def make(lengths: list[int] | None, size: int | None = None) -> KVBatchMeta:
    count = len(lengths) if lengths is not None else size or 0
    return KVBatchMeta(
        "train",
        "train",
        [f"s{i}" for i in range(count)],
        fields=["input_ids"],
        sequence_lengths=lengths,
        extra_info={"step": 3},
        tags=[{"row": i} for i in range(count)],
    )


def join(metas: list[KVBatchMeta]) -> KVBatchMeta:
    return metas[0].concat(*metas[1:])


def tokens(metas: list[KVBatchMeta]) -> list[int]:
    return [sum(meta.sequence_lengths or []) for meta in metas]


lengths_ = st.lists(st.integers(0, 50), min_size=1, max_size=40)
worlds = st.integers(1, 9)
steps = st.none() | st.integers(1, 45)
LIMIT = 50
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packing": {"sequence_packing_args": {"max_tokens_per_microbatch": LIMIT}},
    "dynamic": {"dynamic_batching_args": {"max_tokens_per_microbatch": LIMIT}},
}
plans = st.sampled_from(sorted(PLANS))
PACK_10: dict[str, Any] = {"sequence_packing_args": {"max_tokens_per_microbatch": 10}}


@given(lengths_, worlds, steps, plans)
@settings(deadline=None)
def test_every_sample_goes_to_exactly_one_rank_unchanged(
    lengths: list[int], dp_world: int, batch_size: int | None, plan: str
) -> None:
    meta = make(lengths)
    metas, inverse = shard_meta_for_dp(meta, dp_world=dp_world, batch_size=batch_size, **PLANS[plan])
    assert len(metas) == dp_world
    back = join(metas).subset(inverse)
    assert back.sample_ids == meta.sample_ids
    assert back.sequence_lengths == meta.sequence_lengths
    assert back.tags == meta.tags
    assert sorted(inverse) == list(range(meta.size))
    assert all((m.partition_id, m.task_name, m.fields) == ("train", "train", ["input_ids"]) for m in metas)
    assert all(m.extra_info["step"] == 3 for m in metas)


@given(lengths_, worlds, steps, plans)
@settings(deadline=None)
def test_the_numbers_of_samples_differ_by_at_most_one(
    lengths: list[int], dp_world: int, batch_size: int | None, plan: str
) -> None:
    metas, _ = shard_meta_for_dp(make(lengths), dp_world=dp_world, batch_size=batch_size, **PLANS[plan])
    sizes = [meta.size for meta in metas]
    assert max(sizes) - min(sizes) <= 1
    if len(lengths) % dp_world == 0:
        assert max(sizes) == min(sizes)


@given(st.data(), worlds, st.integers(1, 6), plans)
@settings(deadline=None)
def test_tokens_are_balanced_to_within_one_sample(
    data: st.DataObject, dp_world: int, per_rank: int, plan: str
) -> None:
    count = dp_world * per_rank
    lengths = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    loads = tokens(shard_meta_for_dp(make(lengths), dp_world=dp_world, **PLANS[plan])[0])
    assert max(loads) - min(loads) <= max(lengths) - min(lengths)


@given(lengths_, worlds, steps, st.sampled_from(["packing", "dynamic"]), st.integers(1, 8))
@settings(deadline=None)
def test_micro_batches_cover_each_rank_fit_the_limit_and_are_equal_in_number(
    lengths: list[int], dp_world: int, batch_size: int | None, plan: str, multiple: int
) -> None:
    limit = LIMIT + 8
    arguments: dict[str, Any] = {"max_tokens_per_microbatch": limit}
    arguments["sequence_length_pad_multiple" if plan == "packing" else "sequence_length_round"] = multiple
    key = "sequence_packing_args" if plan == "packing" else "dynamic_batching_args"
    metas, _ = shard_meta_for_dp(make(lengths), dp_world=dp_world, batch_size=batch_size, **{key: arguments})

    plans_by_rank = [meta.extra_info["micro_batch_indices"] for meta in metas]
    assert len({tuple(len(step) for step in plan_) for plan_ in plans_by_rank}) == 1
    divisible = all(
        len(lengths[start : start + (batch_size or len(lengths))]) % dp_world == 0
        for start in range(0, len(lengths), batch_size or max(1, len(lengths)))
    )
    for meta, plan_ in zip(metas, plans_by_rank, strict=True):
        # Counted from the first row of each step, as in NeMo-RL.
        assert all(
            [0, *(stop for _, stop in step)] == [*(start for start, _ in step), step[-1][1]] for step in plan_
        )
        sizes = [step[-1][1] for step in plan_]
        assert sizes == meta.extra_info["elem_counts_per_gb"]
        assert sum(sizes) == meta.size
        begins = [0, *accumulate(sizes)]
        for begin, step, tokens_ in zip(begins, plan_, meta.extra_info["micro_batch_lengths"], strict=False):
            for (start, stop), length in zip(step, tokens_, strict=True):
                part = meta.slice(begin + start, begin + stop).sequence_lengths or []
                rows = [-(-n // multiple) * multiple for n in part]
                assert length == sum(rows) if plan == "packing" else length >= max(rows, default=0)
                assert length * (1 if plan == "packing" else len(rows)) <= limit
                assert rows or not divisible


@given(st.data(), worlds, st.integers(1, 3), st.integers(1, 5))
@settings(deadline=None)
def test_dynamic_micro_batches_have_the_same_shape_on_every_rank(
    data: st.DataObject, dp_world: int, per_rank: int, steps_: int
) -> None:
    """As in NeMo-RL's dynamic batching: ranks of FSDP compute one shape at a time together."""
    count = dp_world * per_rank * steps_
    lengths = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    batch_size = dp_world * per_rank
    metas, _ = shard_meta_for_dp(make(lengths), dp_world=dp_world, batch_size=batch_size, **PLANS["dynamic"])
    plans_by_rank = [
        {name: meta.extra_info[f"micro_batch_{name}"] for name in ("indices", "lengths")} for meta in metas
    ]
    assert all(plan == plans_by_rank[0] for plan in plans_by_rank)
    for step, share in enumerate(plans_by_rank[0]["lengths"]):
        assert max(share) == max(lengths[step * batch_size : (step + 1) * batch_size])


@given(lengths_, worlds, st.integers(1, 45))
@settings(deadline=None)
def test_each_step_holds_its_own_samples_on_every_rank(
    lengths: list[int], dp_world: int, batch_size: int
) -> None:
    metas, _ = shard_meta_for_dp(make(lengths), dp_world=dp_world, batch_size=batch_size)
    for meta in metas:
        step_of_rows = [tag["row"] // batch_size for tag in meta.tags or []]
        assert step_of_rows == sorted(step_of_rows)


def test_results_of_the_ranks_go_back_into_order() -> None:
    meta = make([5, 1, 4, 2, 3, 6])
    metas, inverse = shard_meta_for_dp(meta, dp_world=3)
    results = torch.cat([torch.tensor(m.sequence_lengths) * 10 for m in metas])
    assert results[inverse].tolist() == [50, 10, 40, 20, 30, 60]


def test_long_samples_are_spread() -> None:
    metas, _ = shard_meta_for_dp(make([100, 100, 1, 1]), dp_world=2)
    assert tokens(metas) == [101, 101]


def test_rows_of_a_rank_keep_their_order() -> None:
    metas, _ = shard_meta_for_dp(make([9, 1, 8, 2, 7, 3]), dp_world=2)
    for meta in metas:
        rows = [tag["row"] for tag in meta.tags or []]
        assert rows == sorted(rows)


@pytest.mark.parametrize(
    ("meta", "message"), [(make(None, size=7), "no sequence_lengths"), (make([]), "empty")]
)
@pytest.mark.parametrize("plan", sorted(PLANS))
def test_a_meta_without_samples_or_lengths_is_refused(meta: KVBatchMeta, message: str, plan: str) -> None:
    """As NeMo-RL's ``shard_meta_for_dp`` does."""
    with pytest.raises(ValueError, match=message):
        shard_meta_for_dp(meta, dp_world=3, **PLANS[plan])


def test_micro_batches_are_counted_anew_in_each_step() -> None:
    """As in NeMo-RL, whose ``SlicedDataDict.get_batch`` reads the three together."""
    (meta,), _ = shard_meta_for_dp(make([6, 5, 4, 9, 9]), dp_world=1, batch_size=3, **PACK_10)
    assert meta.extra_info["micro_batch_indices"] == [[[0, 2], [2, 3]], [[0, 1], [1, 2]]]
    assert meta.extra_info["micro_batch_lengths"] == [[10, 5], [9, 9]]
    assert meta.extra_info["elem_counts_per_gb"] == [3, 2]


@pytest.mark.parametrize(
    ("order", "expected"), [(None, [8, 10]), ("packer", [8, 10]), ("largest_first", [10, 8])]
)
def test_micro_batches_come_in_the_order_that_is_asked_for(order: str | None, expected: list[int]) -> None:
    """NeMo-RL's ``shard_by_batch_size``: the packer's order, unless the largest are to come first."""
    arguments = {"max_tokens_per_microbatch": 10, "microbatch_order": order}
    (meta,), _ = shard_meta_for_dp(make([5, 8, 5]), dp_world=1, sequence_packing_args=arguments)
    assert meta.extra_info["micro_batch_lengths"] == [expected]


@given(lengths_, worlds, steps)
@settings(deadline=None)
def test_the_order_of_micro_batches_changes_nothing_else(
    lengths: list[int], dp_world: int, batch_size: int | None
) -> None:
    def plan(order: str) -> list[KVBatchMeta]:
        arguments = {"max_tokens_per_microbatch": LIMIT, "microbatch_order": order}
        return shard_meta_for_dp(
            make(lengths), dp_world=dp_world, batch_size=batch_size, sequence_packing_args=arguments
        )[0]

    for packed, sorted_ in zip(plan("packer"), plan("largest_first"), strict=True):
        assert sorted(packed.sample_ids) == sorted(sorted_.sample_ids)
        assert packed.extra_info["elem_counts_per_gb"] == sorted_.extra_info["elem_counts_per_gb"]
        for in_order, largest_first in zip(
            packed.extra_info["micro_batch_lengths"],
            sorted_.extra_info["micro_batch_lengths"],
            strict=True,
        ):
            assert sorted(in_order, reverse=True) == largest_first


def test_more_ranks_than_samples_leaves_some_empty() -> None:
    metas, inverse = shard_meta_for_dp(make([3]), dp_world=3)
    assert sorted(meta.size for meta in metas) == [0, 0, 1]
    assert inverse == [0]


def test_a_rank_with_too_few_samples_gets_an_empty_micro_batch() -> None:
    metas, _ = shard_meta_for_dp(make([10, 10, 10]), dp_world=2, **PACK_10)
    counts = [len(meta.extra_info["micro_batch_indices"][0]) for meta in metas]
    assert counts == [2, 2]
    assert sorted(meta.extra_info["micro_batch_lengths"] for meta in metas) == [[[10, 0]], [[10, 10]]]


def test_packing_fills_micro_batches() -> None:
    metas, _ = shard_meta_for_dp(make([7, 3, 6, 4, 5, 5]), dp_world=1, **PACK_10)
    assert metas[0].extra_info["micro_batch_lengths"] == [[10, 10, 10]]


def test_the_plan_is_the_same_every_time() -> None:
    meta = make([5, 5, 5, 1, 1, 9, 9, 2])
    first, second = (shard_meta_for_dp(meta, dp_world=2, **PACK_10) for _ in range(2))
    assert first == second
    assert pickle.loads(pickle.dumps(first)) == first


def test_names_from_nemo_configs_are_accepted() -> None:
    arguments = {
        "algorithm": "modified_first_fit_decreasing",
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "sequence_length_pad_multiple": 4,
        "max_tokens_per_microbatch": 8,
    }
    metas, _ = shard_meta_for_dp(make([5, 3, 3]), dp_world=1, sequence_packing_args=arguments)
    assert metas[0].extra_info["micro_batch_lengths"] == [[8, 8]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dp_world": 0}, "dp_world is a whole number of at least 1; got 0"),
        ({"dp_world": 2.0}, "dp_world"),
        ({"dp_world": 1, "batch_size": 0}, "batch_size"),
        ({"dp_world": 1, **PACK_10, "dynamic_batching_args": {}}, "not both"),
        ({"dp_world": 1, "sequence_packing_args": {}}, "max_tokens_per_microbatch.*got None"),
        (
            {"dp_world": 1, "sequence_packing_args": {"max_tokens": 10}},
            "unknown argument 'max_tokens'; there are .*max_tokens_per_microbatch",
        ),
        (
            {"dp_world": 1, "sequence_packing_args": {"max_tokens_per_microbatch": 10, "algorithm": "best"}},
            "algorithm is one of .*; got 'best'",
        ),
        (
            {
                "dp_world": 1,
                "sequence_packing_args": {"max_tokens_per_microbatch": 10, "microbatch_order": "mine"},
            },
            "microbatch_order is one of largest_first, packer; got 'mine'",
        ),
        (
            {"dp_world": 1, "dynamic_batching_args": {"max_tokens_per_microbatch": 4}},
            "sample 's1' takes 5 tokens, more than max_tokens_per_microbatch=4",
        ),
        (
            {
                "dp_world": 1,
                "dynamic_batching_args": {"max_tokens_per_microbatch": 10, "sequence_length_round": 0},
            },
            "sequence_length_round is a whole number",
        ),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_meta_for_dp(make([3, 5]), **arguments)
