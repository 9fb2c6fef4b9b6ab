"""What claims of data-parallel ranks promise: equal parts of one batch, the same ones when asked again."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rlplane.errors import StepOverError
from rlplane.interfaces import KVBatchMeta
from rlplane.testing.expectations import equal, has_samples, refuses, times_out
from rlplane.testing.plane_under_test import PartitionUnderTest, PlaneUnderTest
from rlplane.testing.promises import promise

promise = partial(promise, feature="ranks")

STEP = (
    "With `dp_rank`, `dp_world` and `step`, the first rank that asks claims the batch of the step, and "
    "every rank gets its part: equally many samples (whole groups), balanced by `input_lengths`."
)
SPLIT = "With `split_groups` they are equally many samples also of short groups, which it takes apart."
AGAIN = (
    "Asking again for the same step and rank returns the same part, whoever asks, until all samples of "
    "that part have been cleared; after that it is a `ValueError` (`StepOverError`)."
)
END = "At the end the ranks share what is left as far as it can be divided, and then all get an empty meta."
BAD = "A `batch_size` that the ranks cannot share, or a step that was divided otherwise: `ValueError`."
FINISH = (
    "`finish_partition`: nothing new is to come, until the next registration. A claim that waits gets "
    "what is left and ready, and when nothing is left, an empty meta."
)
FOR_EVER = "With `timeout_s=None` a claim waits for ever."


def _ask(
    part: PartitionUnderTest, rank: int, step: Any, size: int, world: int = 2, **how: Any
) -> KVBatchMeta:
    return part.claim_ready(size, dp_rank=rank, dp_world=world, step=step, **how)


def _write(part: PartitionUnderTest, lengths: dict[str, int]) -> None:
    part.put(lengths, {"x": torch.zeros(len(lengths))}, [{"input_lengths": n} for n in lengths.values()])


@promise(STEP, AGAIN)
def ranks_get_equal_parts_of_one_batch(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    _write(part, {"a": 9, "b": 8, "c": 1, "d": 2, "e": 5, "f": 5, "g": 5, "h": 5})
    has_samples("the part of rank 1", _ask(part, 1, "one", 4), "bd")
    has_samples("the part of rank 0", _ask(part, 0, "one", 4), "ac")
    has_samples("the part of rank 1, asked again", _ask(part, 1, "one", 4), "bd")
    has_samples("the part of rank 0 of another step", _ask(part, 0, 2, 4), "eg")
    has_samples("a claim of the next step, which is not there yet", _ask(part, 0, 3, 4), [])
    has_samples("the part of rank 1 of the other step", _ask(part, 1, 2, 4), "fh")
    has_samples("a claim without ranks", part.claim_ready(), [])


@promise(STEP)
def ranks_wait_for_their_batch_together(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("abc")
    times_out("a rank whose batch is not there", part, 4, ready=3, dp_rank=0, dp_world=2, step="s")
    claims = [part.claim_in_thread(4, dp_rank=r, dp_world=2, step="s") for r in (1, 0, 1)]
    part.wait_until_claims_wait(3)
    part.put_numbers("d")
    got = [claim.result("a rank whose batch is there").sample_ids for claim in claims]
    equal("the part of a rank that asked twice", got[0], got[2])
    equal("the parts", sorted(got[0] + got[1]), list("abcd"))


@promise(STEP, feature=("ranks", "groups"))
def ranks_get_whole_groups(plane: PlaneUnderTest) -> None:
    part = plane.partition(group_size=2)
    _write(part, {"a_g0": 9, "a_g1": 1, "b_g0": 1, "b_g1": 1, "c_g0": 3, "c_g1": 3, "d_g0": 8, "d_g1": 8})
    has_samples("the part of rank 0", _ask(part, 0, 1, 8), ["b_g0", "b_g1", "d_g0", "d_g1"])
    has_samples("the part of rank 1", _ask(part, 1, 1, 8), ["a_g0", "a_g1", "c_g0", "c_g1"])


@promise(SPLIT, feature=("ranks", "groups", "short_groups"))
def ranks_get_equally_many_samples_of_short_groups_when_asked(plane: PlaneUnderTest) -> None:
    part = plane.partition(group_size=2)
    _write(part, {"a_g0": 1, "b_g0": 1, "b_g1": 1, "c_g0": 1, "c_g1": 1})
    part.client.close_group(part.name, "a", reason="failed")
    parts = [_ask(part, rank, 1, 6, split_groups=True).sample_ids for rank in range(2)]
    equal("the numbers of samples", [len(ids) for ids in parts], [2, 2])
    rest = part.claim_ready(6).sample_ids
    equal("all of them", sorted([*parts[0], *parts[1], *rest]), ["a_g0", "b_g0", "b_g1", "c_g0", "c_g1"])


@promise(AGAIN)
def a_step_is_over_when_its_samples_are_cleared(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("abcd")
    first = _ask(part, 0, "s", 2)
    other = _ask(part, 1, "s", 2)
    part.clear(first.sample_ids)
    refuses(StepOverError, "asking for a part that is over", _ask, part, 0, "s", 2, mentions=["over"])
    has_samples("the part of a rank that is not done", _ask(part, 1, "s", 2), other.sample_ids)
    part.clear(other.sample_ids)
    refuses(StepOverError, "asking for a step that is over", _ask, part, 1, "s", 2, mentions=["over"])
    has_samples("the next step", _ask(part, 0, "t", 2), "c")


@promise(AGAIN)
def a_rank_that_comes_back_gets_its_part_again(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("abcd")
    worker = plane.worker()
    mine = _ask(part.on(worker), 0, "s", 4)
    worker.close()
    has_samples(
        "the part of a rank that came back", _ask(part.on(plane.worker()), 0, "s", 4), mine.sample_ids
    )


@promise(END, FINISH)
def all_ranks_get_the_same_end(plane: PlaneUnderTest) -> None:
    part = plane.partition(num_samples=7)
    part.put_numbers("abcdefg")
    parts = [[part.claim(4, dp_rank=r, dp_world=2, step=n).size for n in range(3)] for r in range(2)]
    equal("the sizes of the parts", parts, [[2, 1, 0], [2, 1, 0]])
    endless = plane.partition()
    endless.put_numbers("abc")
    claims = [endless.claim_in_thread(4, dp_rank=r, dp_world=2, step="s") for r in range(2)]
    endless.wait_until_claims_wait(2)
    endless.client.finish_partition(endless.name)
    equal("the sizes of the tail", [claim.result("a rank at the end").size for claim in claims], [1, 1])
    ends = [endless.claim(4, dp_rank=r, dp_world=2, step="t").size for r in range(2)]
    equal("the sizes after the tail", ends, [0, 0])


@promise(BAD)
def what_cannot_be_divided_is_refused(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("abcd")
    refuses(ValueError, "a batch that two ranks cannot share", _ask, part, 0, "s", 3)
    refuses(ValueError, "a rank that is not there", _ask, part, 2, "s", 4)
    refuses(ValueError, "a step without ranks", part.claim_ready, 4, step="s")
    _ask(part, 0, "s", 4)
    refuses(
        ValueError, "a step that was divided otherwise", _ask, part, 0, "s", 4, world=4, mentions=["2 ranks"]
    )


@promise(FINISH, FOR_EVER, feature="finish_partition")
def a_flow_that_is_finished_ends_for_whoever_waits(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"])
    part.put_numbers("abc")
    waits = plane.start(lambda: part.client.claim_meta(part.name, "train", ["x"], 8, timeout_s=None))
    part.wait_until_claims_wait(1)
    part.client.finish_partition(part.name)
    has_samples("the tail", waits.result("a claim at the end of the flow"), "abc")
    has_samples("a claim after the tail", part.claim(8), [])
    part.put_numbers("d", field="y")
    times_out("a claim of what is there and not ready", part, 1, ready=0)
    part.put_numbers("d")
    has_samples("a claim of what is ready now", part.claim(8), "d")
    part.register(["x", "y"])
    times_out("a claim after a registration", part, 1, ready=0)
