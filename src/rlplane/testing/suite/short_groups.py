"""What is promised for groups that end short: nobody waits for ever for a member that never comes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rlplane.testing.expectations import equal, has_samples, refuses, times_out
from rlplane.testing.plane_under_test import PartitionUnderTest, PlaneUnderTest
from rlplane.testing.promises import promise

promise = partial(promise, feature="short_groups")

CLOSE = (
    "`close_group` ends a group with its finished members: they are the whole group, the others are "
    "cleared, counted under the reason and told by `evicted_meta`; with none finished, all of them."
)
FINISHED = (
    "A member is finished that has `fields`, or else the policy's `finished_fields`, or else all fields "
    "that one of the members has."
)
FULL = "A claim counts a short group as one of full size."
TIMEOUT = (
    "`group_timeout_s` after its first member was finished, a group that has `min_group_size` of them is "
    "closed with the reason `timeout`, and any other is given up."
)
SIZES = (
    "The tag `group_size`, at the first write of a member, is the size of its group; one that does not "
    "fit into `batch_size` is a `ValueError` that names a member when it comes first."
)
TOLD = "`meta.groups()` has the groups of a claim, with the number that was expected and the reason."
TASKS = ["rollout", "train"]


def _groups(plane: PlaneUnderTest, *names: str, flow: dict[str, Any] | None = None) -> PartitionUnderTest:
    part = plane.partition(["prompt", "x"], tasks=TASKS, group_size=3, flow=flow)
    part.put_numbers([f"{name}_g{n}" for name in names for n in range(3)], field="prompt")
    return part


@promise(CLOSE, FINISHED, TOLD)
def a_group_that_is_closed_has_the_members_that_were_finished(plane: PlaneUnderTest) -> None:
    part = _groups(plane, "a", "b")
    part.put_numbers(["a_g0", "a_g2", "b_g0", "b_g1", "b_g2"])
    claim = part.waiting_claim(6)
    equal("the members", part.client.close_group(part.name, "a", reason="failed"), 2)
    meta = claim.result("a claim of a group that was closed")
    has_samples("the claim", meta, ["b_g0", "b_g1", "b_g2", "a_g0", "a_g2"])
    groups = [(group.name, group.size, group.expected, group.reason) for group in meta.groups()]
    equal("the groups", groups, [("b", 3, 3, None), ("a", 2, 3, "failed")])
    equal("what is there", part.client.count(part.name), 5)
    told = part.client.evicted_meta(part.name)
    has_samples("what was given up", told, ["a_g1"])
    equal("why", [tag["evicted"] for tag in told.tags or []], ["failed"])
    refuses(KeyError, "closing an unknown group", part.client.close_group, part.name, "z", reason="?")
    plain = plane.partition()
    refuses(ValueError, "closing without groups", plain.client.close_group, plain.name, "a", reason="?")


@promise(CLOSE, FINISHED)
def a_group_without_a_finished_member_is_given_up(plane: PlaneUnderTest) -> None:
    part = _groups(plane, "a", "b")
    close = part.client.close_group
    equal("the members", close(part.name, "a", reason="cancelled", fields=["x"]), 0)
    equal("what is there", part.client.list_sample_ids(part.name), ["b_g0", "b_g1", "b_g2"])
    part.put_numbers(["b_g0", "b_g1", "b_g2"])
    equal("the members of a whole group", close(part.name, "b", reason="late"), 3)
    has_samples("a claim of a group that was whole", part.claim(3), ["b_g0", "b_g1", "b_g2"])
    equal("its groups", [group.reason for group in part.claim_ready(3).groups()], [])


@promise(FULL)
def a_short_group_takes_the_room_of_a_whole_one(plane: PlaneUnderTest) -> None:
    part = _groups(plane, "a", "b", "c")
    part.put_numbers(["b_g0", "b_g1", "b_g2", "a_g0", "c_g1"])
    part.client.close_group(part.name, "a", reason="failed")
    has_samples("a claim of two groups", part.claim(6), ["b_g0", "b_g1", "b_g2", "a_g0"])
    part.client.close_group(part.name, "c", reason="failed")
    has_samples("a claim of one group", part.claim(3), ["c_g1"])


@promise(TIMEOUT)
def a_group_that_waited_long_enough_ends_by_itself(plane: PlaneUnderTest) -> None:
    flow = {
        "kind": "unbounded",
        "finished_fields": ["x"],
        "min_group_size": 2,
        "group_timeout_s": plane.short,
    }
    part = _groups(plane, "a", "b", "c", flow=flow)
    claim = part.waiting_claim(6)
    part.put_numbers(["c_g0", "c_g1", "c_g2"])
    part.put_numbers(["a_g0", "a_g1", "b_g2"])
    meta = claim.result("a claim of a group that has waited")
    has_samples("the claim", meta, ["c_g0", "c_g1", "c_g2", "a_g0", "a_g1"])
    equal("why it is short", [group.reason for group in meta.groups()], [None, "timeout"])
    times_out("a claim afterwards", part, 3, ready=0)
    equal("what is there", part.client.count(part.name), 5)
    status = part.status()["flow"]
    equal(
        "what the status says", (status["closed_short"], status["evicted"]), ({"timeout": 1}, {"timeout": 4})
    )


@promise(SIZES)
def a_group_may_have_a_size_of_its_own(plane: PlaneUnderTest) -> None:
    part = plane.partition(group_size=2)
    part.put(["a_g0", "b_g0"], {"x": torch.zeros(2)}, [{"group_size": 3}, {"group_size": 1}])
    has_samples("a claim of the small one", part.claim(2), ["b_g0"])
    part.put_numbers(["a_g1"])
    has_samples("a claim before the large one is whole", part.claim_ready(4), [])
    part.put_numbers(["a_g2", "c_g0", "c_g1"])
    refuses(ValueError, "a claim that is too small", part.claim_ready, 2, mentions=["a_g0"])
    has_samples("a claim that is large enough", part.claim_ready(4), ["a_g0", "a_g1", "a_g2"])
    has_samples("a claim of one of the usual size", part.claim_ready(4), ["c_g0", "c_g1"])
    refuses(ValueError, "a size of 0", part.put, ["d_g0"], None, [{"group_size": 0}])
