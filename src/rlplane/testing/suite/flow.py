"""What flow policies promise: how old a sample may be, and which prompts may begin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from rlplane.testing.expectations import equal, has_samples, refuses, times_out
from rlplane.testing.plane_under_test import PartitionUnderTest, PlaneUnderTest
from rlplane.testing.promises import promise

promise = partial(promise, feature="flow")

POLICY = (
    "`register_partition(..., flow=…)` takes a `FlowPolicy` or a mapping with its names; one that "
    "contradicts itself or names a task that is not there: `ValueError`."
)
VERSION = (
    "`advance_version` sets the partition's version, which begins at 0 and never goes back: `ValueError`. "
    "A sample's version is its tag `weight_version` (or `version_tag`)."
)
WINDOWED = (
    "`windowed`: a claim of the training task never returns a sample whose version is more than "
    "`max_staleness` below the partition's. What has become too old, or is when it is written, is cleared "
    "with the rest of its group, unless the training task has it already"
)
REPORTED = "counted under `stale` and told once by `evicted_meta`."
FRESHEST = "`freshest_first` claims the newest version first."
GATED = (
    "`ready_first`, `weight_fifo` and `in_order` admit prompts (samples, or groups) by the claims of the "
    "admitting task: at most (version - `first_version` + `max_staleness` + 1) × `batch` in all. A claim "
    "gets what may be admitted, waits when that is nothing, and is woken by `advance_version`."
)
RETURNED = (
    "A prompt that is handed out again is not counted again, and one that is cleared before it was "
    "trained makes room for another."
)
NEVER_EVICTED = "Nothing is evicted."
OLDEST = "`weight_fifo` trains the oldest version first."
STEPS = (
    "`in_order` trains step by step exactly the `batch` prompts that were admitted for it: a claim never "
    "mixes steps, and the last one of a step gets what is left of it."
)
ABORT = (
    "`should_abort`: those samples that were cleared, or whose version (else that at which the admitting "
    "task claimed them) is too old already."
)

TASKS = ["rollout", "train"]


def _flow(
    plane: PlaneUnderTest, kind: str, group_size: int | None = None, **policy: Any
) -> PartitionUnderTest:
    return plane.partition(["prompt", "x"], tasks=TASKS, group_size=group_size, flow={"kind": kind, **policy})


def _prompts(part: PartitionUnderTest, ids: Iterable[str]) -> None:
    part.put_numbers(ids, field="prompt")


def _generate(part: PartitionUnderTest, ids: Iterable[str], version: int) -> None:
    ids = list(ids)
    part.put(ids, {"x": torch.zeros(len(ids))}, [{"weight_version": version} for _ in ids])


def _begin(part: PartitionUnderTest, count: int = 100) -> Sequence[str]:
    return part.claim_ready(count, task="rollout", required=["prompt"]).sample_ids


def _advance(part: PartitionUnderTest, version: int) -> None:
    part.client.advance_version(part.name, version)


def _status(part: PartitionUnderTest) -> Any:
    return part.status()["flow"]


@promise(POLICY)
def a_policy_that_contradicts_itself_is_refused(plane: PlaneUnderTest) -> None:
    bad: list[dict[str, Any]] = [
        {"kind": "newest"},
        {"kind": "windowed", "max_staleness": -1},
        {"kind": "windowed", "max_staleness": "2"},
        {"kind": "windowed", "staleness": 2},
        {"kind": "ready_first", "max_staleness": 1},
        {"kind": "windowed", "training_task": "nobody"},
        {"kind": "ready_first", "batch": 4, "admitting_task": "nobody"},
    ]
    part = plane.partition(tasks=TASKS)
    for flow in bad:
        refuses(ValueError, f"a registration with flow={flow}", part.register, tasks=TASKS, flow=flow)
    part.put_numbers("a")
    has_samples("a claim afterwards", part.claim_ready(), "a")


@promise(VERSION)
def a_version_never_goes_back(plane: PlaneUnderTest) -> None:
    part = _flow(plane, "windowed", max_staleness=1)
    _advance(part, 3)
    _advance(part, 3)
    refuses(ValueError, "a version that goes back", _advance, part, 2, mentions=["3"])
    refuses(ValueError, "a version that is no number", part.client.advance_version, part.name, "4")
    equal("the version", _status(part)["version"], 3)
    part.register(["prompt", "x"], tasks=TASKS, flow={"kind": "windowed", "max_staleness": 5})
    equal("the version after a registration", _status(part)["version"], 3)
    equal("the bound after a registration", _status(part)["max_staleness"], 5)


@promise(WINDOWED, REPORTED)
def no_claim_returns_a_sample_that_is_too_old(plane: PlaneUnderTest) -> None:
    part = _flow(plane, "windowed", max_staleness=1)
    _generate(part, "ab", 0)
    _generate(part, "c", 1)
    has_samples("a claim within the bound", part.claim_ready(1), "a")
    _advance(part, 2)
    _generate(part, "de", 2)
    _generate(part, "f", 0)
    has_samples("a claim after the version went on", part.claim_ready(), "cde")
    equal("the evicted", _status(part)["evicted"], {"stale": 2})
    told = part.client.evicted_meta(part.name)
    has_samples("what was evicted", told, "bf")
    equal("why", [tag["evicted"] for tag in told.tags or []], ["stale", "stale"])
    has_samples("what was evicted, asked again", part.client.evicted_meta(part.name), [])
    equal("what is there", part.client.count(part.name), 4)


@promise(WINDOWED)
def what_is_too_old_takes_the_rest_of_its_group_along(plane: PlaneUnderTest) -> None:
    part = _flow(plane, "windowed", group_size=2, max_staleness=0)
    _prompts(part, ["a_g0", "a_g1", "b_g0", "b_g1"])
    _generate(part, ["a_g0"], 0)
    _generate(part, ["b_g0", "b_g1"], 1)
    _advance(part, 1)
    has_samples("a claim", part.claim_ready(4), ["b_g0", "b_g1"])
    equal("the evicted", _status(part)["evicted"], {"stale": 2})


@promise(WINDOWED)
def what_is_being_trained_is_not_evicted(plane: PlaneUnderTest) -> None:
    part = _flow(plane, "windowed", max_staleness=0)
    _generate(part, "ab", 0)
    part.claim_ready()
    _advance(part, 1)
    equal("what is being trained", part.client.count(part.name), 2)
    _generate(part, "a", 0)
    has_samples("a claim of what was trained", part.claim_ready(), [])


@promise(FRESHEST)
def the_freshest_come_first_when_the_policy_says_so(plane: PlaneUnderTest) -> None:
    part = _flow(plane, "windowed", max_staleness=5, freshest_first=True)
    _generate(part, "a", 1)
    _generate(part, "bc", 2)
    _generate(part, "d", 0)
    has_samples("a claim", part.claim(3), "bca")


@promise(GATED, NEVER_EVICTED)
def only_what_can_be_trained_in_time_is_admitted(plane: PlaneUnderTest) -> None:
    part = _flow(plane, "ready_first", max_staleness=1, batch=2)
    _prompts(part, "abcdefgh")
    equal("the prompts that may begin", _begin(part), list("abcd"))
    equal("the prompts that may begin then", _begin(part), [])
    claim = part.waiting_claim(3, task="rollout", required=["prompt"])
    equal("what the status says", (_status(part)["admitted"], _status(part)["waiting_for_admission"]), (4, 4))
    _advance(part, 1)
    has_samples("the claim that waited", claim.result("a claim that the version lets through"), "ef")
    _generate(part, "dcba", 0)
    _advance(part, 9)
    has_samples("a claim of what is late", part.claim_ready(), "dcba")
    equal("the evicted", _status(part)["evicted"], {})


@promise(GATED)
def admission_counts_groups(plane: PlaneUnderTest) -> None:
    part = _flow(plane, "ready_first", group_size=2, max_staleness=0, batch=1)
    _prompts(part, ["a_g0", "a_g1", "b_g0", "b_g1"])
    equal("the prompts that may begin", _begin(part), ["a_g0", "a_g1"])
    times_out("a claim that is held back", part, 2, ready=2, task="rollout", required=["prompt"])
    _advance(part, 1)
    equal("the prompts that may begin then", _begin(part), ["b_g0", "b_g1"])


@promise(GATED)
def admission_counts_from_the_first_version(plane: PlaneUnderTest) -> None:
    part = _flow(plane, "ready_first", max_staleness=0, batch=2, first_version=100)
    _prompts(part, "abcdef")
    equal("the prompts that may begin too early", _begin(part), [])
    _advance(part, 100)
    equal("the prompts that may begin", _begin(part), ["a", "b"])


@promise(RETURNED)
def a_prompt_that_is_cleared_makes_room_for_another(plane: PlaneUnderTest) -> None:
    part = _flow(plane, "ready_first", max_staleness=0, batch=2)
    _prompts(part, "abcd")
    equal("the prompts that may begin", _begin(part), ["a", "b"])
    part.clear("a")
    equal("what may begin when one has failed", _begin(part), ["c"])
    _generate(part, "bc", 0)
    has_samples("the batch", part.claim(2), "bc")
    part.clear("bc")
    equal("what may begin when two were trained", _begin(part), [])


@promise(OLDEST, GATED)
def the_oldest_version_is_trained_first(plane: PlaneUnderTest) -> None:
    part = _flow(plane, "weight_fifo", max_staleness=3, batch=2)
    _prompts(part, "abcdef")
    equal("the prompts that may begin", _begin(part, 4), list("abcd"))
    _generate(part, "d", 2)
    _generate(part, "ac", 1)
    _generate(part, "b", 0)
    has_samples("a claim", part.claim(3), "bac")
    has_samples("a claim of the rest", part.claim_ready(), "d")


@promise(STEPS)
def a_step_trains_exactly_the_prompts_that_were_admitted_for_it(plane: PlaneUnderTest) -> None:
    part = _flow(plane, "in_order", lookahead=1, batch=3)
    _prompts(part, "abcdefgh")
    equal("the prompts that may begin", _begin(part), list("abcdef"))
    _generate(part, "fedc", 0)
    has_samples("a claim of what is ready of the first step", part.claim_ready(), "c")
    times_out("a claim of more than is ready of it", part, 2, ready=0)
    part.clear("a")
    _advance(part, 1)
    equal("the prompts that may begin then", _begin(part), list("gh"))
    _generate(part, "gb", 1)
    has_samples("a claim of the rest of the first step", part.claim(3), "gb")
    has_samples("a claim of the second step", part.claim(3), "fed")


@promise(ABORT)
def a_rollout_is_told_what_it_generates_in_vain(plane: PlaneUnderTest) -> None:
    part = _flow(plane, "windowed", max_staleness=1)
    _prompts(part, "abc")
    _begin(part, 2)
    _advance(part, 1)
    _begin(part, 1)
    part.put("b", None, [{"weight_version": 1}])
    abort = part.client.should_abort
    equal("what is in vain at first", abort(["a", "b", "c", "gone"], part.name), ["gone"])
    _advance(part, 2)
    equal("what is in vain then", abort(["a", "b", "c"], part.name), ["a"])
    part.clear("c")
    equal("what is in vain after a clear", abort(["b", "c"], part.name), ["c"])


@promise(
    "Policy, version, admissions and counts are part of a checkpoint: after a load the bound holds from the "
    "first claim on."
)
def a_checkpoint_keeps_the_bound(plane: PlaneUnderTest) -> None:
    import tempfile

    part = _flow(plane, "in_order", lookahead=0, batch=2)
    window = _flow(plane, "windowed", max_staleness=1)
    _prompts(part, "abcd")
    _begin(part)
    _generate(window, "h", 2)
    has_samples("a claim before the save", window.claim_ready(), "h")
    _generate(window, "a", 1)
    _advance(window, 4)
    before = "what was evicted before, which is not what is being trained"
    equal(before, _status(window)["evicted"], {"stale": 1})
    with tempfile.TemporaryDirectory() as directory:
        plane.client.save_checkpoint(f"{directory}/saved")
        _generate(window, "b", 4)
        _advance(part, 1)
        plane.client.load_checkpoint(f"{directory}/saved", release_claims=True)
    equal("the prompts that may begin", _begin(part), ["a", "b"])
    equal("the admitted", _status(part)["admitted"], 2)
    equal("the version", _status(window)["version"], 4)
    equal("what was evicted", _status(window)["evicted"], {"stale": 2})
    _generate(window, "cd", 2)
    _generate(window, "e", 3)
    has_samples("a claim after the load", window.claim_ready(), "e")
