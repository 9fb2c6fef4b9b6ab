"""What claims with an ``order`` promise."""

from __future__ import annotations

from functools import partial

import torch

from rlplane.testing.expectations import equal, has_samples, refuses
from rlplane.testing.plane_under_test import PlaneUnderTest
from rlplane.testing.promises import promise

promise = partial(promise, feature="order")

ORDER = (
    "`order` changes which samples a claim takes: `lifo` those that became ready last, `priority:<tag>` "
    "those with the highest number there (of equal ones the first; what has none comes last; a group "
    "counts as its highest member), `random:<seed>` any; the tag counts as it is at the claim. Another "
    "order: `ValueError`."
)


@promise(ORDER)
def the_newest_come_first_when_asked(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("abc")
    has_samples("a claim of the newest", part.claim_ready(1, order="lifo"), "c")
    part.put_numbers("d")
    has_samples("a claim of the newest two", part.claim(2, order="lifo"), "db")
    has_samples("a claim of the oldest", part.claim_ready(order="fifo"), "a")
    refuses(ValueError, "a claim in an unknown order", part.claim_ready, order="best")


@promise(ORDER)
def the_highest_priority_comes_first_and_may_change_while_it_waits(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put("abcde", {"x": torch.zeros(5)}, [{"p": 1}, {"p": 3}, {}, {"p": 3.5}, {"p": 1}])
    has_samples("a claim of the highest", part.claim_ready(1, order="priority:p"), "d")
    part.put("ce", None, [{"p": 9}, {"p": 2}])
    has_samples("a claim after tags have changed", part.claim(3, order="priority:p"), "cbe")
    part.put("f", {"x": torch.zeros(1)}, [{"p": "high"}])
    has_samples("a claim of the rest", part.claim_ready(order="priority:p"), "af")


@promise(ORDER, feature=("order", "groups"))
def groups_have_an_order_too(plane: PlaneUnderTest) -> None:
    part = plane.partition(group_size=2)
    ids = ["a_g0", "a_g1", "b_g0", "b_g1", "c_g0", "c_g1"]
    part.put(ids, {"x": torch.zeros(6)}, [{"p": p} for p in (1, 1, 0, 5, 2, 2)])
    has_samples("a claim of two groups", part.claim(4, order="priority:p"), ["b_g0", "b_g1", "c_g0", "c_g1"])
    part.put_numbers(["d_g0", "d_g1"])
    has_samples("a claim of the newest group", part.claim_ready(2, order="lifo"), ["d_g0", "d_g1"])


@promise(ORDER)
def a_random_order_is_the_same_for_the_same_seed(plane: PlaneUnderTest) -> None:
    ids = [f"s{n}" for n in range(30)]
    part = plane.partition(tasks=["train", "again", "other"])
    part.put_numbers(ids)
    first = part.claim_ready(order="random:1").sample_ids
    equal("the samples of a claim in random order", sorted(first), sorted(ids))
    has_samples("a claim with the same seed", part.claim_ready(task="again", order="random:1"), first)
    other = part.claim_ready(task="other", order="random:2").sample_ids
    equal("whether another seed gives another order", other == first or first == ids, False)
