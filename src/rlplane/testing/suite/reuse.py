"""What is promised for samples that a task claims more than once."""

from __future__ import annotations

from functools import partial
from typing import Any

from rlplane.testing.expectations import equal, has_samples, refuses
from rlplane.testing.plane_under_test import PartitionUnderTest, PlaneUnderTest
from rlplane.testing.promises import promise

promise = partial(promise, feature="reuse")

USES = (
    "With `max_uses` a task may claim a sample so often: it lines up again behind all others, never twice in "
    "one batch, and counts as claimed by the task after its last use."
)
ONLY = "With `repeat_where` only samples (groups: all of whose members) with such tags line up again."


def _ready(part: PartitionUnderTest, count: int = 100, **how: Any) -> list[str]:
    return part.claim_ready(count, max_uses=2, **how).sample_ids


@promise(USES)
def a_sample_is_claimed_again_after_the_others_had_their_turn(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("abc")
    equal("the first claim", _ready(part, 2), ["a", "b"])
    part.put_numbers("d")
    equal("the second claim", _ready(part, 2), ["c", "a"])
    equal("whether all is consumed", part.is_consumed("train"), False)
    equal("never twice in one batch", _ready(part), ["b", "d", "c"])
    equal("the last uses", _ready(part), ["d"])
    equal("whether all is consumed", part.is_consumed("train"), True)
    equal("after the last use", _ready(part), [])
    part.clear(["a"])
    part.put_numbers("a")
    equal("a new sample of the same name", [_ready(part), _ready(part), _ready(part)], [["a"], ["a"], []])
    part = plane.partition()
    part.put_numbers("ab")
    equal("one of two", _ready(part, 1), ["a"])
    equal("a claim on fields that nobody had asked for until then", _ready(part, required=[]), ["b", "a"])


@promise(USES)
def a_waiting_claim_gets_samples_that_line_up_again(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("ab")
    claim = part.waiting_claim(3, max_uses=2)
    equal("what is claimed meanwhile", _ready(part), ["a", "b"])
    part.put_numbers("c")
    has_samples("the claim that waited", claim.result("a claim"), ["a", "b", "c"])
    for wrong in (0, -1, 1.5, "2"):
        refuses(ValueError, f"max_uses={wrong!r}", part.claim_ready, max_uses=wrong)


@promise(ONLY)
def only_samples_with_such_tags_are_used_again(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("abc")
    part.put("abc", tags=[{"reward": 0.0}, {"reward": 1.0}, {"reward": 0.5}])
    again = {"reward": {">": 0.4}}
    equal("the first use", _ready(part, repeat_where=again), ["a", "b", "c"])
    equal("the second use", _ready(part, repeat_where=again), ["b", "c"])
    groups = plane.partition(group_size=2)
    ids = ["p_g0", "p_g1", "q_g0", "q_g1"]
    groups.put_numbers(ids)
    groups.put(ids, tags=[{"reward": r} for r in (1.0, 0.0, 1.0, 1.0)])
    equal("the groups", _ready(groups, repeat_where=again), ids)
    equal("the group that is used again", _ready(groups, repeat_where=again), ids[2:])
