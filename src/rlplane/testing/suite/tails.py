"""When a blocking claim returns less than a batch: the tail of what was announced, and nothing else."""

from __future__ import annotations

import torch

from rlplane.testing.expectations import has_samples, times_out
from rlplane.testing.plane_under_test import PlaneUnderTest
from rlplane.testing.promises import promise

TAIL = (
    "`blocking=True` waits for `batch_size` samples, or for the tail: exactly the declared "
    "`num_samples` have been written since the registration, and at least one but fewer than "
    "`batch_size` remain for this task (live, not claimed by it, matching `where`), and all of those "
    "are ready."
)
PAST = "A flow that goes on past `num_samples` always gets full batches."


@promise(TAIL)
def the_last_samples_come_as_a_tail(plane: PlaneUnderTest) -> None:
    part = plane.partition(num_samples=5, tasks=["train", "eval"])
    part.put_numbers("abc")
    has_samples("a full batch", part.claim(2), "ab")
    part.put_numbers("de")
    has_samples("a full batch", part.claim(2), "cd")
    has_samples("the tail", part.claim(2), "e")
    has_samples("the tail of another task", part.claim(8, task="eval"), "abcde")


@promise(TAIL)
def there_is_no_tail_before_everything_was_written(plane: PlaneUnderTest) -> None:
    part = plane.partition(num_samples=4)
    part.put_numbers("abc")
    times_out("a claim of 4 when 3 of 4 samples are written", part, 4, ready=3)
    part.put_numbers("d")
    has_samples("the claim of everything", part.claim(4), "abcd")


@promise(TAIL)
def there_is_no_tail_of_nothing(plane: PlaneUnderTest) -> None:
    part = plane.partition(num_samples=2)
    part.put_numbers("ab")
    has_samples("the claim of everything", part.claim(2), "ab")
    times_out("a claim when nothing remains", part, 2, ready=0)
    empty = plane.partition(num_samples=0)
    times_out("a claim from a partition where nothing is expected", empty, 2, ready=0)


@promise(TAIL)
def a_tail_waits_until_all_of_it_is_ready(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"], num_samples=3)
    part.put_numbers("abc")
    part.put_numbers("ac", field="y")
    times_out("a claim when one of three rows is not ready", part, 4, ready=2, required=["y"])
    claim = part.waiting_claim(4, required=["y"])
    part.put_numbers("b", field="y")
    has_samples("the tail", claim.result("a claim whose tail has become ready"), "acb")


@promise(TAIL)
def a_tail_does_not_wait_for_samples_that_were_cleared(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"], num_samples=3)
    part.put_numbers("abc")
    part.put_numbers("ab", field="y")
    claim = part.waiting_claim(4, required=["y"])
    part.clear("c")
    has_samples("the tail", claim.result("a claim whose last missing sample was cleared"), "ab")


@promise(TAIL, feature="where")
def a_tail_does_not_wait_for_samples_that_do_not_match(plane: PlaneUnderTest) -> None:
    part = plane.partition(num_samples=4)
    part.put("abcd", {"x": torch.zeros(4)}, [{"v": 1}, {"v": 2}, {"v": 1}, {}])
    has_samples("the tail with a condition", part.claim(4, where={"v": 1}), "ac")
    times_out("a claim when nothing that matches remains", part, 4, ready=0, where={"v": 1})
    has_samples("the tail without a condition", part.claim(4), "bd")


@promise(PAST, TAIL)
def a_flow_past_the_announced_number_gets_full_batches(plane: PlaneUnderTest) -> None:
    part = plane.partition(num_samples=2)
    part.put_numbers("abc")
    has_samples("a full batch", part.claim(2), "ab")
    times_out("a claim of 2 when 3 samples came and 2 were announced", part, 2, ready=1)
    part.put_numbers("d")
    has_samples("a full batch", part.claim(2), "cd")


@promise(TAIL)
def samples_of_an_earlier_registration_belong_to_the_tail_when_they_are_live(plane: PlaneUnderTest) -> None:
    part = plane.partition(num_samples=8)
    part.put_numbers("ab")
    part.register(num_samples=1)
    times_out("a claim before the expected sample came", part, 4, ready=2)
    part.put_numbers("c")
    has_samples("the tail", part.claim(4), "abc")


@promise(TAIL)
def a_cleared_sample_was_written_all_the_same(plane: PlaneUnderTest) -> None:
    part = plane.partition(num_samples=3)
    part.put_numbers("ab")
    part.clear("a")
    part.put_numbers("c")
    has_samples("the tail", part.claim(4), "bc")
