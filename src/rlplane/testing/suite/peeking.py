"""What ``peek_meta`` and ``count`` promise: a look that moves nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rlplane.testing.expectations import equal, has_samples, refuses
from rlplane.testing.plane_under_test import PartitionUnderTest, PlaneUnderTest
from rlplane.testing.promises import promise

promise = partial(promise, method="peek_meta")

PEEK = (
    "`peek_meta`: ids and tags of the live samples, claimed or not, that match `where` and have all of "
    "`fields`, in the order of their first write; it never moves a cursor."
)
ORDER = (
    "`order` is `fifo`, `lifo`, `priority:<tag>` (the highest number first, what has none last) or "
    "`random:<seed>` (the same for the same seed), and `limit` the most of them; another order: `ValueError`."
)


def _peek(part: PartitionUnderTest, **how: Any) -> Any:
    return part.client.peek_meta(part.name, **how)


def _filled(plane: PlaneUnderTest) -> PartitionUnderTest:
    part = plane.partition(fields=["x", "y"])
    part.put("abcd", {"x": torch.zeros(4)}, [{"v": 1}, {"v": 3}, {"w": 1}, {"v": 2}])
    part.put_numbers("bd", field="y")
    return part


@promise(PEEK)
def a_look_shows_what_is_there_and_claims_nothing(plane: PlaneUnderTest) -> None:
    part = _filled(plane)
    part.claim_ready(1)
    seen = _peek(part)
    has_samples("a look at everything", seen, "abcd", [{"v": 1}, {"v": 3}, {"w": 1}, {"v": 2}])
    equal("the task of a look", seen.task_name, None)
    has_samples("a look with fields", _peek(part, fields=["x", "y"]), "bd")
    equal("the fields of a look", _peek(part, fields=["y"]).fields, ["y"])
    has_samples("a claim afterwards", part.claim_ready(), "bcd")
    refuses(KeyError, "a look with an unknown field", _peek, part, fields=["nope"], mentions=["nope"])


@promise(PEEK, feature="where")
def a_look_with_conditions_follows_the_tags(plane: PlaneUnderTest) -> None:
    part = _filled(plane)
    has_samples("a look where v is at least 2", _peek(part, where={"v": {">=": 2}}), "bd")
    part.put("ac", None, [{"v": 2}, {"v": [2]}])
    part.put("e", {"x": torch.zeros(1)}, [{"v": 2}])
    has_samples("a look after tags have changed", _peek(part, where={"v": {">=": 2}}), "abde")
    has_samples("a look where v is a list", _peek(part, where={"v": [2]}), "c")
    part.clear("bd")
    has_samples("a look after a clear", _peek(part, where={"v": 2}), "ae")
    has_samples("a look with two conditions", _peek(part, where={"v": {">": 0}, "w": 1}), [])


@promise(ORDER)
def a_look_has_an_order_and_a_limit(plane: PlaneUnderTest) -> None:
    part = _filled(plane)
    has_samples("the newest two", _peek(part, order="lifo", limit=2), "dc")
    has_samples("the highest first", _peek(part, order="priority:v"), "bdac")
    has_samples("the first one", _peek(part, order="fifo", limit=1), "a")
    shuffled = _peek(part, order="random:7").sample_ids
    has_samples("a look in random order", _peek(part, order="random:7"), shuffled)
    equal("the samples of a look in random order", sorted(shuffled), list("abcd"))
    for order in ("best", "priority", "priority:", "fifo:x"):
        refuses(ValueError, f"a look with order={order!r}", _peek, part, order=order)
    refuses(ValueError, "a look with a negative limit", _peek, part, limit=-1)


@promise("`count`: how many live samples match.", method="count")
def samples_are_counted_by_condition(plane: PlaneUnderTest) -> None:
    part = _filled(plane)
    equal("all samples", part.client.count(part.name), 4)
    equal("samples with v", part.client.count(part.name, {"v": {">": 1}}), 2)
    part.clear("b")
    equal("samples with v after a clear", part.client.count(part.name, {"v": {">": 1}}), 1)
    refuses(KeyError, "a count of an unknown partition", part.client.count, "nowhere-at-all")
