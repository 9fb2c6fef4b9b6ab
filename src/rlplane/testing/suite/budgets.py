"""What claims with ``max_tokens`` promise: as much as fits, in order, and never a batch that is too large."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rlplane.testing.expectations import has_samples, refuses, times_out
from rlplane.testing.plane_under_test import PartitionUnderTest, PlaneUnderTest
from rlplane.testing.promises import promise

promise = partial(promise, feature="max_tokens")

BUDGET = (
    "`max_tokens` bounds a claim by the tag `input_lengths`: it takes samples (with groups, whole groups) in "
    "order until the next one does not fit any more, and at most `batch_size`."
)
TOO_LONG = (
    "A sample or group that alone has more tokens than that, or has no `input_lengths`, is a `ValueError` "
    "that names it when it comes first; nothing is claimed."
)


def _write(part: PartitionUnderTest, lengths: dict[str, int | None]) -> None:
    tags: list[dict[str, Any]] = [{} if n is None else {"input_lengths": n} for n in lengths.values()]
    part.put(lengths, {"x": torch.zeros(len(lengths))}, tags)


@promise(BUDGET)
def a_claim_takes_as_many_samples_as_fit_into_its_tokens(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    _write(part, {"a": 3, "b": 4, "c": 4, "d": 1, "e": 10, "f": 0})
    has_samples("a claim of 10 tokens", part.claim_ready(max_tokens=10), "ab")
    has_samples("a claim of 10 tokens that waits", part.claim(9, max_tokens=10), "cd")
    has_samples("a claim of two samples", part.claim_ready(2, max_tokens=10), "ef")


@promise(BUDGET)
def a_claim_of_tokens_waits_until_it_is_full(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    _write(part, {"a": 3, "b": 4})
    times_out("a claim of more tokens than are there", part, 9, ready=2, max_tokens=10)
    claim = part.waiting_claim(9, max_tokens=10)
    _write(part, {"c": 4})
    has_samples("the claim", claim.result("a claim whose tokens are there"), "ab")


@promise(BUDGET, feature=("max_tokens", "groups"))
def a_claim_of_tokens_takes_whole_groups(plane: PlaneUnderTest) -> None:
    part = plane.partition(group_size=2)
    _write(part, {"a_g0": 3, "a_g1": 3, "b_g0": 1, "b_g1": 3, "c_g0": 1, "c_g1": 1})
    has_samples("a claim of 11 tokens", part.claim_ready(6, max_tokens=11), ["a_g0", "a_g1", "b_g0", "b_g1"])
    has_samples("a claim of the rest", part.claim_ready(6, max_tokens=11), ["c_g0", "c_g1"])


@promise(TOO_LONG)
def what_alone_exceeds_the_tokens_is_named(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    _write(part, {"a": 3, "long": 11, "unknown": None, "b": 1})
    has_samples("a claim before the long one", part.claim_ready(max_tokens=10), "a")
    refuses(ValueError, "a claim of too few tokens", part.claim_ready, max_tokens=10, mentions=["'long'"])
    refuses(ValueError, "a claim that waits", part.claim, 1, max_tokens=10, mentions=["'long'", "11"])
    has_samples("a claim of more tokens", part.claim_ready(max_tokens=11), ["long"])
    refuses(ValueError, "a claim of no length", part.claim_ready, max_tokens=10, mentions=["'unknown'"])
    has_samples("a claim without max_tokens", part.claim_ready(), ["unknown", "b"])
    refuses(ValueError, "a claim of no tokens", part.claim_ready, max_tokens=0)
