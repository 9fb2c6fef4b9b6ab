"""What conditions on tags promise, and that tags count as they are when the claim is made."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rlplane.testing.expectations import has_samples, refuses, times_out
from rlplane.testing.plane_under_test import PlaneUnderTest
from rlplane.testing.promises import promise

promise = partial(promise, feature="where")

CONDITIONS = (
    "`where` maps a tag to a value (equality) or to conditions, all of which must hold: `==`, `!=`, "
    "`<`, `<=`, `>`, `>=`, `in`, `not in`."
)
NO_MATCH = "A sample without the tag, or with one that cannot be compared, does not match."
AT_THE_CLAIM = "The tags count as they are at the moment of the claim."


@promise(CONDITIONS)
def every_operator_of_a_condition_works(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    expected: list[tuple[Any, str]] = [
        (2, "b"),
        ({"==": 2}, "b"),
        ({"!=": 2}, "acd"),
        ({"<": 2}, "a"),
        ({"<=": 2}, "ab"),
        ({">": 2}, "cd"),
        ({">=": 2}, "bcd"),
        ({"in": [1, 4, 9]}, "ad"),
        ({"not in": [1, 4, 9]}, "bc"),
        ({">": 1, "<": 4}, "bc"),
        ({">=": 2, "!=": 3, "in": [2, 3]}, "b"),
    ]
    tasks = [f"task-{n}" for n in range(len(expected))]
    part.register(tasks=tasks)
    part.put("abcd", {"x": torch.zeros(4)}, [{"v": v} for v in (1, 2, 3, 4)])
    for task, (condition, ids) in zip(tasks, expected, strict=True):
        has_samples(
            f"a claim where v is {condition}", part.claim_ready(task=task, where={"v": condition}), ids
        )


@promise(CONDITIONS)
def strings_lists_and_none_are_values_too(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    values: list[Any] = ["math", "code", None, ["a", 1], True]
    part.put("abcde", {"x": torch.zeros(5)}, [{"v": value} for value in values])
    has_samples("a claim where v is a list", part.claim_ready(where={"v": ["a", 1]}), "d")
    has_samples("a claim where v is None", part.claim_ready(where={"v": None}), "c")
    has_samples("a claim where v is in a list", part.claim_ready(where={"v": {"in": ["code", None]}}), "b")
    has_samples("a claim where v comes after 'm'", part.claim_ready(where={"v": {">": "m"}}), "a")
    has_samples("a claim where v is true", part.claim_ready(where={"v": True}), "e")


@promise(CONDITIONS)
def all_conditions_must_hold(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put("abc", {"x": torch.zeros(3)}, [{"v": 1, "w": "x"}, {"v": 2, "w": "x"}, {"v": 2, "w": "y"}])
    has_samples("a claim with two conditions", part.claim_ready(where={"v": {">=": 2}, "w": "x"}), "b")
    has_samples("a claim with no conditions", part.claim_ready(where={}), "ac")


@promise(NO_MATCH)
def a_sample_without_the_tag_does_not_match(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put("ab", {"x": torch.zeros(2)}, [{"v": 1}, {"w": 1}])
    part.put_numbers("c")
    conditions: list[Any] = [{"!=": 5}, {"not in": [5]}, {"==": 5}, {"<": 0}, {"in": [None]}, None]
    for condition in conditions:
        claimed = part.claim_ready(where={"v": condition})
        has_samples(f"a claim where v is {condition}", claimed, "a" if condition == {"!=": 5} else [])


@promise(NO_MATCH)
def a_tag_that_cannot_be_compared_does_not_match(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    values: list[Any] = ["text", None, [1], 3, {"a": 1}]
    part.put("abcde", {"x": torch.zeros(5)}, [{"v": value} for value in values])
    has_samples("a claim where v is greater than 2", part.claim(1, where={"v": {">": 2}}), "d")
    has_samples("a claim where v is less than 99", part.claim_ready(where={"v": {"<": 99}}), [])
    has_samples("a claim without a condition", part.claim_ready(), "abce")


@promise("An unknown operator: `ValueError`.")
def an_unknown_operator_is_refused(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put("a", {"x": torch.zeros(1)}, [{"v": 1}])
    for operator in ("=", "~", "contains", ""):
        what = f"a claim with the operator {operator!r}"
        refuses(ValueError, what, part.claim_ready, where={"v": {operator: 1}})
    refuses(ValueError, "a claim that waits, with the operator '=>',", part.claim, 1, where={"v": {"=>": 1}})
    has_samples("a claim afterwards", part.claim_ready(), "a")


@promise(AT_THE_CLAIM)
def tags_count_as_they_are_at_the_claim(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put("abc", {"x": torch.zeros(3)}, [{"v": 1}, {"v": 2}, {}])
    part.put("abc", None, [{"v": 2}, {"v": 1}, {"v": 2}])
    has_samples("a claim where v was changed to 2", part.claim_ready(where={"v": 2}), "ac")
    has_samples("a claim where v was changed to 1", part.claim_ready(where={"v": 1}), "b")


@promise(AT_THE_CLAIM)
def samples_that_do_not_match_stay_for_later(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put("abcd", {"x": torch.zeros(4)}, [{"v": n % 2} for n in range(4)])
    times_out("a claim of more than match", part, 3, ready=2, where={"v": 1})
    has_samples("a claim of what matches", part.claim(2, where={"v": 1}), "bd")
    has_samples("a claim of the rest", part.claim(2), "ac")
