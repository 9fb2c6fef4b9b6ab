"""What is promised for fields that grow turn by turn."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from rlplane.testing.expectations import equal, has_column, has_samples, refuses
from rlplane.testing.plane_under_test import PartitionUnderTest, PlaneUnderTest
from rlplane.testing.promises import promise

promise = partial(promise, feature="append_samples")

APPENDS = (
    "`append_samples` puts a turn behind what each sample has in these fields, and merges its tags; a sample "
    "that is not there yet begins with it."
)
WHOLE = "A reader sees the turns that there are, each of them whole, as one nested tensor."
FINISH = "The fields count as written, for claims and for the claims of their writer, with `finish=True`."
CLOSED = (
    "Appending to a field that is finished, or tokens of another dtype or shape, is a `ValueError`, and "
    "nothing is written; a put replaces all turns of a field."
)


def _append(part: PartitionUnderTest, turns: dict[str, list[int]], *, field: str = "x", **how: Any) -> None:
    part.written.update(turns)
    rows = [torch.tensor(turn, dtype=torch.int64) for turn in turns.values()]
    column = torch.nested.nested_tensor(rows, layout=torch.jagged)
    part.client.append_samples(
        list(turns), part.name, TensorDict({field: column}, batch_size=[len(rows)]), **how
    )


def _reads(part: PartitionUnderTest, rows: dict[str, list[int]]) -> None:
    expected = [torch.tensor(row, dtype=torch.int64) for row in rows.values()]
    has_column("a read", part.get(rows), "x", expected, "jagged")


@promise(APPENDS, WHOLE)
def turns_are_read_one_behind_the_other(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    _append(part, {"a": [1, 2], "b": [3]}, tags=[{"turns": 1}, {"turns": 1, "user": "u"}])
    _append(part, {"b": [4, 5, 6], "c": []})
    _reads(part, {"b": [3, 4, 5, 6], "a": [1, 2]})
    _append(part, {"a": [7], "b": [8]}, tags=[{"turns": 2}, {"turns": 3}])
    _reads(part, {"c": [], "b": [3, 4, 5, 6, 8], "a": [1, 2, 7]})
    part.put("d", {"x": torch.nested.nested_tensor([torch.tensor([9, 9])], layout=torch.jagged)})
    _reads(part, {"d": [9, 9], "a": [1, 2, 7]})
    tags = part.client.peek_meta(part.name).tags or []
    equal("the tags", [tag.get("turns") for tag in tags], [2, 3, None, None])


@promise(FINISH)
def a_claim_gets_a_sample_when_its_last_turn_is_there(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    claim = part.waiting_claim(2)
    _append(part, {"a": [1], "b": [2]})
    equal("what is ready before", part.status()["fields"]["x"]["produced"], 0)
    _append(part, {"b": [3]}, finish=True)
    _append(part, {"a": [4, 5]}, finish=True)
    meta = claim.result("a claim of finished samples")
    has_samples("the claim", meta, ["b", "a"])
    _reads(part, {"a": [1, 4, 5], "b": [2, 3]})


@promise(FINISH, method="unclaim")
def a_turn_alone_does_not_finish_the_claim_of_its_writer(plane: PlaneUnderTest) -> None:
    part = plane.partition(["prompt", "x"], tasks=["rollout"])
    part.put_numbers(["a", "b"], field="prompt")
    meta = part.claim(2, task="rollout", required=["prompt"])
    _append(part, {"a": [1]})
    _append(part, {"b": [1]}, finish=True)
    part.client.unclaim(meta)
    again = part.claim_ready(task="rollout", required=["prompt"])
    has_samples("what is handed out again", again, ["a"])


@promise(CLOSED)
def what_cannot_be_appended_is_refused_and_changes_nothing(plane: PlaneUnderTest) -> None:
    part = plane.partition(["x", "score", "note"])
    _append(part, {"a": [1], "b": [2]})
    _append(part, {"b": [3]}, finish=True)
    refuses(ValueError, "appending to what is finished", lambda: _append(part, {"a": [9], "b": [9]}))
    append = part.client.append_samples
    for name, column in {
        "floats behind integers": torch.zeros(1, 2),
        "vectors behind scalars": torch.zeros(1, 2, 3, dtype=torch.int64),
        "a number": torch.zeros(1, dtype=torch.int64),
    }.items():
        refuses(ValueError, name, append, ["a"], part.name, TensorDict({"x": column}, [1]))
    refuses(ValueError, "no fields", append, ["a"], part.name, None)
    _reads(part, {"a": [1], "b": [2, 3]})
    part.put("a", {"x": torch.nested.nested_tensor([torch.tensor([7, 8])], layout=torch.jagged)})
    _reads(part, {"a": [7, 8], "b": [2, 3]})


@promise(APPENDS, method="partition_status")
def turns_that_are_cleared_give_their_bytes_back(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    for turn in range(5):
        _append(part, {"a": [turn] * 1000, "b": [turn] * 1000})
    held = part.status()["bytes"]
    equal("bytes for ten turns of a thousand tokens", 80_000 <= held < 90_000, True)
    part.clear(["a", "b"])
    equal("bytes of nothing", part.status()["bytes"], 0)
    _append(part, {"a": [1]})
    _reads(part, {"a": [1]})
