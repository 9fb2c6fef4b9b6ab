"""What a claim promises: each sample once per task, in the order of readiness, and who may ask for what."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import Any

import torch

from rlplane.testing.expectations import equal, expect, has_samples, refuses
from rlplane.testing.plane_under_test import PartitionUnderTest, PlaneUnderTest
from rlplane.testing.promises import promise

ONCE = "Never hands the same sample to the same task twice, unless its claims say `max_uses`."
ORDER = (
    "The order is: first ready, first claimed; rows that become ready in one write keep the order of "
    "that write."
)
AT_ONCE = (
    "An unknown partition or task, or a required field that is neither declared nor ever written: "
    "`KeyError` at once."
)
META = (
    "The meta has `task_name`, `fields` = the required fields, the samples' tags, and "
    "`sequence_lengths` from the tag `input_lengths` when every sample has it."
)


@promise(ONCE)
def a_sample_is_handed_to_a_task_once(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"])
    part.put("abc", {"x": torch.zeros(3), "y": torch.zeros(3)})
    has_samples("the first claim", part.claim_ready(2), "ab")
    has_samples("the second claim", part.claim_ready(2), "c")
    has_samples("the third claim", part.claim_ready(2), [])
    has_samples("a claim on another field", part.claim_ready(2, required=["y"]), [])
    has_samples("a claim on no field", part.claim_ready(2, required=[]), [])


@promise(ONCE)
def every_task_has_a_cursor_of_its_own(plane: PlaneUnderTest) -> None:
    part = plane.partition(tasks=["train", "eval"])
    part.put_numbers("abc")
    has_samples("a claim of one task", part.claim_ready(2), "ab")
    has_samples("a claim of the other", part.claim_ready(3, task="eval"), "abc")
    has_samples("the next claim of the first", part.claim_ready(2), "c")


@promise(ONCE)
def many_threads_claim_every_sample_exactly_once(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    ids = [f"row-{i}" for i in range(240)]
    _claim_from_everywhere(plane, [part] * 8, ids)


@promise(ONCE)
def two_clients_claim_every_sample_exactly_once(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    other = part.on(plane.worker())
    ids = [f"row-{i}" for i in range(120)]
    _claim_from_everywhere(plane, [part, other, part, other], ids)
    other.put_numbers(["last"])
    has_samples("a claim of what another client wrote", part.claim(1), ["last"])


@promise(ORDER)
def what_is_ready_first_is_claimed_first(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"], tasks=["train", "late"])
    part.put_numbers("dacb")
    part.put_numbers("c", field="y")
    part.put_numbers("ba", field="y")
    has_samples("a claim on the field of one write", part.claim_ready(3), "dac")
    part.put_numbers("d", field="y")
    has_samples("a claim on both fields", part.claim_ready(task="late", required=["x", "y"]), "cbad")
    part.register(fields=["x", "y"], tasks=["train", "new"])
    has_samples("a claim of a task that came later", part.claim_ready(task="new", required=["y"]), "cbad")
    part.put_numbers("fe")
    has_samples("the rest of the first task", part.claim_ready(), "bfe")


@promise(ORDER)
def the_order_does_not_depend_on_names(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    order = [f"row-{(7 * i) % 40}" for i in range(40)]
    for start in range(0, 40, 10):
        part.put_numbers(order[start : start + 10])
    claimed = [sample_id for _ in range(8) for sample_id in part.claim(5).sample_ids]
    equal("the order of eight claims", claimed, order)


@promise("`blocking=False` returns what is ready, up to `batch_size`, perhaps none.")
def a_claim_that_does_not_wait_returns_what_is_ready(plane: PlaneUnderTest) -> None:
    part = plane.partition(num_samples=100)
    has_samples("a claim of nothing", part.claim_ready(4), [])
    part.put_numbers("abcde")
    has_samples("a claim of less than there is", part.claim_ready(4), "abcd")
    has_samples("a claim of more than there is", part.claim_ready(4), "e")
    empty = part.claim_ready(4)
    has_samples("a claim of nothing", empty, [])
    equal("the size of an empty claim", empty.size, 0)
    equal("the rows of an empty claim", list(part.client.get_data(empty).batch_size), [0])


@promise(AT_ONCE)
def a_claim_on_what_does_not_exist_is_refused_at_once(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("a")
    nowhere = plane.unregistered()
    wrong: dict[str, tuple[PartitionUnderTest, dict[str, Any]]] = {
        "an unknown partition": (nowhere, {}),
        "an unknown task": (part, {"task": "nobody"}),
        "an unknown field": (part, {"required": ["x", "nowhere"]}),
    }
    patience: dict[str, Any] = {"timeout_s": 2 * plane.deadline, "within_s": plane.deadline}
    for what, (where, how) in wrong.items():
        refuses(KeyError, f"a claim that waits, on {what},", where.claim, 4, **how, **patience)
        refuses(KeyError, f"a claim on {what}", where.claim_ready, **how)
    has_samples("a claim afterwards", part.claim_ready(), "a")


@promise(AT_ONCE)
def a_field_that_was_ever_written_may_be_required(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"])
    part.put_numbers("a", field="y")
    part.clear("a")
    part.register(fields=["x"])
    has_samples("a claim on a field that was written once", part.claim_ready(required=["y"]), [])


@promise("`batch_size` below 1: `ValueError`.")
def a_batch_size_below_one_is_refused(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("a")
    for size in (0, -1):
        refuses(ValueError, f"a claim with batch_size={size}", part.claim_ready, size)
        refuses(ValueError, f"a claim that waits, with batch_size={size}", part.claim, size)


@promise("No required fields: any live sample is ready.")
def without_required_fields_any_live_sample_is_ready(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"])
    part.put_numbers("a")
    part.put("b", None, [{"v": 1}])
    part.put_numbers("c", field="y")
    meta = part.claim(3, required=[])
    has_samples("a claim without required fields", meta, "abc")
    equal("its fields", meta.fields, [])


@promise(META)
def a_claim_returns_the_tags_and_lengths_of_its_samples(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"])
    part.put("ab", {"x": torch.zeros(2)}, [{"input_lengths": 5, "v": 1}, {"input_lengths": 3}])
    part.put("ab", {"y": torch.ones(2)}, [{"w": "later"}, {"input_lengths": 4}])
    part.put("c", {"x": torch.zeros(1), "y": torch.zeros(1)})
    meta = part.claim(2, required=["y", "x"])
    equal("partition_id", meta.partition_id, part.name)
    equal("task_name", meta.task_name, "train")
    has_samples("the claim", meta, "ab")
    equal("fields", meta.fields, ["y", "x"])
    equal("tags", meta.tags, [{"input_lengths": 5, "v": 1, "w": "later"}, {"input_lengths": 4}])
    equal("sequence_lengths", meta.sequence_lengths, [5, 4])
    equal("get_data of the meta", list(part.client.get_data(meta).keys()), ["y", "x"])
    rest = part.claim_ready()
    equal("sequence_lengths of a sample without the tag", rest.sequence_lengths, None)
    equal("tags of a sample without tags", rest.tags, [{}])


@promise("Alone it changes nothing.")
def a_rank_does_not_change_what_is_claimed(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("abc")
    meta = part.client.claim_meta(part.name, "train", ["x"], 2, dp_rank=1, timeout_s=plane.deadline)
    has_samples("a claim with dp_rank=1", meta, "ab")


def _claim_from_everywhere(plane: PlaneUnderTest, parts: list[PartitionUnderTest], ids: list[str]) -> None:
    """Claims while writes come, from all of ``parts`` at once; every id must be claimed once."""
    written = threading.Event()

    def drain(part: PartitionUnderTest) -> list[str]:
        mine: list[str] = []
        while True:
            last_turn = written.is_set()
            claimed = part.claim_ready(7).sample_ids
            mine += claimed
            if last_turn and not claimed:
                return mine

    claims = [plane.start(partial(drain, part)) for part in parts]
    try:
        for start in range(0, len(ids), 12):
            parts[0].put_numbers(ids[start : start + 12])
    finally:
        written.set()
    claimed = [
        sample_id for claim in claims for sample_id in claim.result("a thread that claims", plane.deadline)
    ]
    twice = [sample_id for sample_id, count in Counter(claimed).items() if count > 1]
    expect(not twice, f"{len(twice)} samples were claimed more than once, such as {twice[:3]}")
    equal("the number of claimed samples", len(claimed), len(ids))
