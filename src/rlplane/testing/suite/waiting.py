"""What a claim promises while it waits: what wakes it, who is served first, and what a timeout does."""

from __future__ import annotations

from rlplane.errors import ClaimTimeoutError
from rlplane.testing.expectations import equal, expect, has_samples, refuses, times_out
from rlplane.testing.plane_under_test import PlaneUnderTest
from rlplane.testing.promises import promise

WAITS = "`blocking=True` waits for `batch_size` samples"
TIMEOUT = (
    "At `timeout_s` it raises `ClaimTimeoutError` with `ready`, the number that was ready, and claims "
    "nothing."
)


@promise(WAITS)
def a_waiting_claim_is_woken_by_the_write_that_completes_its_batch(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"])
    claim = part.waiting_claim(3, required=["x", "y"])
    part.put_numbers("abcd")
    part.put_numbers("ba", field="y")
    expect(not claim.is_done_within(plane.short), "a claim of three samples ended when two were ready")
    part.put_numbers("dc", field="y")
    has_samples("the claim", claim.result("a claim of three samples that are ready"), "bad")
    has_samples("what is left", part.claim_ready(required=["x", "y"]), "c")


@promise(WAITS, feature="where")
def a_waiting_claim_is_woken_by_tags_that_make_samples_match(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("abc")
    claim = part.waiting_claim(2, where={"v": {">=": 2}})
    part.put("ab", None, [{"v": 1}, {"v": 2}])
    part.put("c", None, [{"v": 3}])
    has_samples("the claim", claim.result("a claim whose samples match by now"), "bc")


@promise(WAITS)
def a_waiting_claim_is_woken_by_the_write_of_another_client(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    other = part.on(plane.worker())
    claim = other.claim_in_thread(2)
    part.wait_until_claims_wait(1)
    part.put_numbers("ab", start=4)
    meta = claim.result("a claim of two samples that another client wrote")
    has_samples("the claim", meta, "ab")
    equal("what the other client wrote", [float(x) for x in other.client.get_data(meta).get("x")], [4.0, 5.0])


@promise(WAITS)
def a_waiting_claim_holds_up_nobody_else(plane: PlaneUnderTest) -> None:
    part = plane.partition(tasks=["train", "eval"])
    claim = part.waiting_claim(2)
    part.put_numbers("a")
    has_samples("a claim of another task", part.claim(1, task="eval"), "a")
    equal("a read", part.numbers("a"), [0.0])
    part.put_numbers("b")
    has_samples("the claim", claim.result("a claim of two samples that are ready"), "ab")


@promise(TIMEOUT)
def a_claim_that_times_out_says_how_many_were_ready_and_claims_nothing(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    times_out("a claim of 3 when nothing was written", part, 3, ready=0)
    part.put_numbers("ab")
    times_out("a claim of 3 when 2 are ready", part, 3, ready=2)
    times_out("the same claim again", part, 3, ready=2)
    has_samples("a claim after the timeouts", part.claim_ready(), "ab")


@promise(TIMEOUT, feature="where")
def a_timeout_counts_only_samples_that_match(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put("abc", None, [{"v": 1}, {"v": 2}, {"v": 1}])
    part.put_numbers("ab")
    times_out("a claim with a condition", part, 3, ready=1, where={"v": 1})


@promise(TIMEOUT)
def a_claim_that_timed_out_is_not_served_later(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    times_out("a claim of 2", part, 2, ready=0)
    part.put_numbers("abc")
    has_samples("a claim after the timeout", part.claim(3), "abc")


@promise(TIMEOUT)
def a_claim_without_patience_takes_a_full_batch_or_times_out(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("ab")
    has_samples("a claim of what is ready, with timeout_s=0", part.claim(2, timeout_s=0), "ab")
    part.put_numbers("c")
    claim = part.claim_in_thread(2, timeout_s=0)
    error = refuses(ClaimTimeoutError, "a claim with timeout_s=0", claim.result, "a claim with timeout_s=0")
    equal("the number that was ready", error.ready, 1)


@promise("Waiting claims of one task are served first come, first served.", method="partition_status")
def waiting_claims_are_served_first_come_first_served(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    claims = [part.waiting_claim(2, among=count) for count in range(1, 5)]
    for ids in ("ab", "cd", "ef", "gh"):
        part.put_numbers(ids)
    for ids, claim in zip(("ab", "cd", "ef", "gh"), claims, strict=True):
        has_samples("a waiting claim", claim.result("a claim of two samples that are ready"), ids)


@promise("Waiting claims of one task are served first come, first served.", method="partition_status")
def one_write_serves_several_waiting_claims(plane: PlaneUnderTest) -> None:
    part = plane.partition(num_samples=5)
    claims = [part.waiting_claim(2, among=count) for count in range(1, 4)]
    part.put_numbers("abcde")
    for ids, claim in zip(("ab", "cd", "e"), claims, strict=True):
        has_samples("a waiting claim", claim.result("a claim that one write serves"), ids)
