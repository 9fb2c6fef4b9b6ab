"""What claims promise with ``grpo_group_size``: whole groups, in the order of their completion."""

from __future__ import annotations

from functools import partial

import torch

from rlplane.testing.expectations import has_samples, refuses, times_out
from rlplane.testing.plane_under_test import PlaneUnderTest
from rlplane.testing.promises import promise

promise = partial(promise, feature="groups")

WHOLE = (
    "With `grpo_group_size` only whole groups are handed out, the members together and in the order in "
    "which they became ready, groups in the order in which they became whole."
)
MEMBERS = (
    "A group is the samples that share the tag `group`, else the part of the id before its last "
    "`_g<number>`; a sample with neither is refused by the put (`ValueError`)."
)


@promise(WHOLE)
def only_whole_groups_are_handed_out(plane: PlaneUnderTest) -> None:
    part = plane.partition(group_size=3)
    part.put_numbers(["a_g0", "b_g0", "a_g1"])
    has_samples("a claim when no group is whole", part.claim_ready(6), [])
    times_out("a claim that waits when no group is whole", part, 3, ready=0)
    part.put_numbers(["a_g2", "b_g1"])
    has_samples("a claim when one group is whole", part.claim_ready(6), ["a_g0", "a_g1", "a_g2"])
    part.put_numbers(["b_g2"])
    has_samples("a claim when the other is whole", part.claim(3), ["b_g0", "b_g1", "b_g2"])


@promise(WHOLE)
def groups_come_in_the_order_in_which_they_became_whole(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"], group_size=2)
    part.put_numbers(["a_g0", "b_g0", "c_g0"])
    part.put_numbers(["c_g1", "a_g1", "b_g1"])
    part.put_numbers(["b_g1", "a_g0", "c_g0"], field="y")
    part.put_numbers(["b_g0", "c_g1"], field="y")
    part.put_numbers(["a_g1"], field="y")
    has_samples("a claim of two groups", part.claim(4, required=["x", "y"]), ["b_g1", "b_g0", "c_g0", "c_g1"])
    has_samples("a claim of the rest", part.claim_ready(4, required=["x", "y"]), ["a_g0", "a_g1"])


@promise(WHOLE)
def a_claim_takes_no_more_groups_than_fit_its_batch(plane: PlaneUnderTest) -> None:
    part = plane.partition(group_size=2)
    part.put_numbers([f"{name}_g{n}" for name in "abc" for n in range(2)])
    has_samples("a claim of one group", part.claim(2), ["a_g0", "a_g1"])
    has_samples("a claim of two groups", part.claim(4), ["b_g0", "b_g1", "c_g0", "c_g1"])
    times_out("a claim when nothing is left", part, 2, ready=0)


@promise(WHOLE)
def a_waiting_claim_is_woken_by_the_last_member_of_a_group(plane: PlaneUnderTest) -> None:
    part = plane.partition(group_size=2)
    claim = part.waiting_claim(4)
    part.put_numbers(["a_g0", "b_g0"])
    part.put_numbers(["b_g1"])
    part.put_numbers(["a_g1"])
    has_samples(
        "the claim", claim.result("a claim of two groups that are whole"), ["b_g0", "b_g1", "a_g0", "a_g1"]
    )


@promise(WHOLE)
def a_tail_of_groups_is_whole_too(plane: PlaneUnderTest) -> None:
    part = plane.partition(num_samples=6, group_size=2)
    part.put_numbers(["a_g0", "a_g1", "b_g0", "b_g1", "c_g0", "c_g1"])
    has_samples("a full batch", part.claim(4), ["a_g0", "a_g1", "b_g0", "b_g1"])
    has_samples("the tail", part.claim(4), ["c_g0", "c_g1"])
    torn = plane.partition(num_samples=3, group_size=2)
    torn.put_numbers(["a_g0", "b_g0", "a_g1"])
    # Nothing more is expected, so a group that lacks a member remains for nobody.
    has_samples("the tail beside a group that lacks a member", torn.claim(4), ["a_g0", "a_g1"])
    times_out("a claim when only a group that lacks a member is left", torn, 2, ready=0)
    late = plane.partition(fields=["x", "y"], num_samples=4, group_size=2)
    late.put_numbers(["a_g0", "a_g1", "b_g0", "b_g1"])
    late.put_numbers(["a_g0", "a_g1", "b_g0"], field="y")
    times_out("a claim when a group is not ready", late, 6, ready=2, required=["y"])


@promise(MEMBERS)
def the_tag_makes_the_group_and_else_the_id_does(plane: PlaneUnderTest) -> None:
    part = plane.partition(group_size=2)
    part.put(["p", "q"], {"x": torch.zeros(2)}, [{"group": "one"}, {"group": "two"}])
    part.put(["r_g0", "s"], {"x": torch.zeros(2)}, [{"group": "two"}, {"group": "one"}])
    has_samples("groups by tag", part.claim(4), ["q", "r_g0", "p", "s"])
    part.put_numbers(["prompt_g1_g0", "prompt_g1_g10", "prompt_g2_g0"])
    has_samples("groups by id", part.claim_ready(4), ["prompt_g1_g0", "prompt_g1_g10"])


@promise(MEMBERS)
def a_sample_without_a_group_is_refused_and_nothing_is_written(plane: PlaneUnderTest) -> None:
    part = plane.partition(group_size=2)
    for bad in ("plain", "a_g", "a_gx", "a_g1b"):
        refuses(ValueError, f"writing {bad!r}", part.put_numbers, ["a_g0", "a_g1", bad])
    has_samples("a claim afterwards", part.claim_ready(2, required=[]), [])


@promise("A sample keeps the group of its first write.")
def a_sample_keeps_the_group_of_its_first_write(plane: PlaneUnderTest) -> None:
    part = plane.partition(group_size=2)
    part.put(["p", "q"], {"x": torch.zeros(2)}, [{"group": "one"}, {"group": "two"}])
    part.put(["q"], None, [{"group": "one"}])
    has_samples("a claim after a tag was changed", part.claim_ready(2), [])
    part.put(["p"], {"x": torch.ones(1)})
    part.put(["r"], {"x": torch.zeros(1)}, [{"group": "two"}])
    has_samples("a claim of the group that is whole", part.claim_ready(4), ["q", "r"])


@promise("`batch_size` must be a multiple of the group size: `ValueError`.")
def a_batch_that_would_split_a_group_is_refused(plane: PlaneUnderTest) -> None:
    part = plane.partition(group_size=2)
    part.put_numbers(["a_g0", "a_g1"])
    for size in (1, 3):
        refuses(ValueError, f"a claim with batch_size={size} of groups of 2", part.claim_ready, size)
        refuses(ValueError, f"a claim that waits, with batch_size={size},", part.claim, size)
    has_samples("a claim afterwards", part.claim_ready(2), ["a_g0", "a_g1"])


@promise("With groups, every member must match.", feature=("groups", "where"))
def every_member_of_a_group_must_match(plane: PlaneUnderTest) -> None:
    part = plane.partition(group_size=2)
    ids = ["a_g0", "a_g1", "b_g0", "b_g1"]
    part.put(ids, {"x": torch.zeros(4)}, [{"v": 1}, {"v": 2}, {"v": 2}, {"v": 3}])
    has_samples("a claim with a condition", part.claim_ready(4, where={"v": {">=": 2}}), ["b_g0", "b_g1"])
    part.put(["a_g0"], None, [{"v": 5}])
    has_samples(
        "a claim when the tag has changed", part.claim_ready(4, where={"v": {">=": 2}}), ["a_g0", "a_g1"]
    )
