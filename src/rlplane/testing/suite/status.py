"""What the optional ``list_sample_ids`` and ``partition_status`` promise, for adapters that have them."""

from __future__ import annotations

from typing import Any

import torch

from rlplane.testing.expectations import equal, expect, times_out
from rlplane.testing.plane_under_test import PartitionUnderTest, PlaneUnderTest
from rlplane.testing.promises import promise

STATUS = (
    "`partition_status`: a dict with `partition_id`, `num_samples` (declared), `samples` (live), "
    "`written` (new samples since the registration), `bytes`, `oldest_age_s` (None when empty), "
    '`grpo_group_size`, `fields` `{name: {"declared": bool, "produced": int}}`, and `tasks` `{name: '
    '{"claimed": int, "unclaimed": int, "waiting": int}}`, where `waiting` counts the claims that wait.'
)


@promise("`list_sample_ids`: the live samples in the order of their first write.", method="list_sample_ids")
def live_samples_are_listed_in_the_order_of_their_first_write(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    equal("the samples of an empty partition", _listed(part), [])
    part.put("c", None, [{"v": 1}])
    part.put_numbers("ba")
    part.put_numbers("cb")
    equal("the samples", _listed(part), ["c", "b", "a"])
    part.claim_ready(1)
    part.clear("b")
    equal("the samples after a claim and a clear", _listed(part), ["c", "a"])
    part.put_numbers("db")
    equal("the samples after a cleared one came again", _listed(part), ["c", "a", "d", "b"])


@promise(STATUS, method="partition_status")
def the_status_of_a_partition_counts_samples_fields_and_claims(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"], num_samples=12, tasks=["train", "eval"])
    empty = part.status()
    equal("oldest_age_s of an empty partition", empty["oldest_age_s"], None)
    equal("bytes of an empty partition", empty["bytes"], 0)
    equal("samples of an empty partition", empty["samples"], 0)
    part.put("abc", {"x": torch.zeros(3, 100)})
    part.put("ad", {"y": torch.zeros(2)})
    part.claim_ready(2)
    status = part.status()
    wanted = {
        "partition_id": part.name,
        "num_samples": 12,
        "samples": 4,
        "written": 4,
        "grpo_group_size": None,
        "fields": {"x": {"declared": True, "produced": 3}, "y": {"declared": True, "produced": 2}},
        "tasks": {
            "train": {"claimed": 2, "unclaimed": 2, "waiting": 0},
            "eval": {"claimed": 0, "unclaimed": 4, "waiting": 0},
        },
    }
    for name, value in wanted.items():
        equal(name, _known(status[name], value), value)
    expect(status["bytes"] >= 1208, f"bytes is {status['bytes']}, and 302 float32 values are live")
    age = status["oldest_age_s"]
    expect(isinstance(age, float) and age >= 0, f"oldest_age_s is {age!r}, and it should be a float")


@promise(STATUS, method="partition_status")
def the_status_of_a_partition_follows_clears_and_registrations(plane: PlaneUnderTest) -> None:
    part = plane.partition(num_samples=2)
    part.put_numbers("abc")
    part.clear("ab")
    status = part.status()
    equal("samples after a clear", (status["samples"], status["written"]), (1, 3))
    equal("produced after a clear", status["fields"]["x"]["produced"], 1)
    part.register(fields=["y"], num_samples=7, tasks=["new"])
    status = part.status()
    equal("num_samples after a registration", status["num_samples"], 7)
    equal("samples after a registration", (status["samples"], status["written"]), (1, 0))
    equal("tasks after a registration", list(status["tasks"]), ["new"])
    equal("a field that is not declared any more", status["fields"]["x"]["declared"], False)
    equal("a field that is declared now", status["fields"]["y"]["declared"], True)


@promise(STATUS, method="partition_status")
def the_status_of_a_partition_counts_waiting_claims(plane: PlaneUnderTest) -> None:
    part = plane.partition(tasks=["train", "eval"])
    claims = [part.claim_in_thread(1), part.claim_in_thread(1)]
    expect(part.wait_until_claims_wait(2), "partition_status went away")
    equal("the claims of another task that wait", part.status()["tasks"]["eval"]["waiting"], 0)
    part.put_numbers("ab")
    for claim in claims:
        claim.result("a claim of a sample that is ready")
    equal("the claims that wait when all are served", part.status()["tasks"]["train"]["waiting"], 0)
    times_out("a claim of nothing", part, 1, ready=0)
    equal("the claims that wait after a timeout", part.status()["tasks"]["train"]["waiting"], 0)


@promise(STATUS, method="partition_status", feature="groups")
def the_status_of_a_partition_says_its_group_size(plane: PlaneUnderTest) -> None:
    equal("grpo_group_size", plane.partition(group_size=4).status()["grpo_group_size"], 4)


def _listed(part: PartitionUnderTest) -> list[str]:
    return part.client.list_sample_ids(part.name)


def _known(got: Any, wanted: Any) -> Any:
    """``got`` without the keys that an adapter adds to those of the contract."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        return {key: _known(got[key], wanted[key]) for key in wanted if key in got}
    return got
