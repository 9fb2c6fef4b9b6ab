"""What ``check_consumption_status`` promises."""

from __future__ import annotations

from rlplane.testing.expectations import equal, refuses
from rlplane.testing.plane_under_test import PlaneUnderTest
from rlplane.testing.promises import promise

STATUS = (
    "`check_consumption_status`: False while nothing has been written since the registration and "
    "nothing is live; then True iff every live sample has been claimed by every named task."
)


@promise(STATUS)
def nothing_is_consumed_before_anything_was_written(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    equal("the status of a new partition", part.is_consumed("train"), False)
    part.put_numbers("a")
    part.claim_ready()
    part.clear("a")
    equal("the status when what was written has been claimed and cleared", part.is_consumed("train"), True)
    part.register()
    equal("the status when it was registered again and is empty", part.is_consumed("train"), False)


@promise(STATUS)
def a_partition_is_consumed_when_every_task_has_claimed_every_live_sample(plane: PlaneUnderTest) -> None:
    part = plane.partition(tasks=["train", "eval"])
    part.put_numbers("ab")
    equal("the status before a claim", part.is_consumed("train"), False)
    part.claim_ready(1)
    equal("the status when one of two is claimed", part.is_consumed("train"), False)
    part.claim_ready(1)
    equal("the status when both are claimed", part.is_consumed("train"), True)
    equal("the status with a task that has claimed nothing", part.is_consumed("train", "eval"), False)
    part.claim_ready(task="eval")
    equal("the status when both tasks have claimed both", part.is_consumed("train", "eval"), True)
    part.put("c", None, [{"v": 1}])
    equal("the status when a sample without fields came", part.is_consumed("train"), False)
    part.clear("c")
    equal("the status when it was cleared", part.is_consumed("train"), True)


@promise(STATUS)
def live_samples_count_after_a_registration(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("ab")
    part.claim_ready(1)
    part.register()
    equal("the status with an unclaimed sample", part.is_consumed("train"), False)
    part.claim_ready()
    equal("the status when it was claimed", part.is_consumed("train"), True)


@promise("An unknown partition or task: `KeyError`.")
def the_status_of_what_does_not_exist_is_an_error(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    refuses(KeyError, "the status of an unknown partition", plane.unregistered().is_consumed, "train")
    refuses(KeyError, "the status of an unknown task", part.is_consumed, "train", "nobody")


@promise("Authoritative across processes.")
def the_status_counts_the_claims_of_other_clients(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    other = part.on(plane.worker())
    part.put_numbers("ab")
    other.claim_ready(1)
    equal("the status at the other client", other.is_consumed("train"), False)
    part.claim_ready()
    equal("the status at the other client", other.is_consumed("train"), True)
    equal("the status at this client", part.is_consumed("train"), True)
