"""What a write promises: all of it at once or nothing, replaced fields, merged tags, and its receipt."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict

from rlplane.testing.expectations import equal, expect, has_samples, jagged, objects, refuses
from rlplane.testing.plane_under_test import PartitionUnderTest, PlaneUnderTest
from rlplane.testing.promises import promise

TOGETHER = "All or nothing: fields, tags and readiness of all rows appear together, or none do."
REFUSED = (
    "Duplicate ids in one call, a row count that differs from the ids, tags of another length: `ValueError`, "
    "nothing written."
)
AGAIN = "It does not hand a claimed sample out again, and a sample that was ready keeps its place."
RECEIPT = (
    "The returned meta has `task_name=None`, the `fields` of this write (`None` for `fields=None`), the"
    " tags of this write (an empty one per sample without), and `sequence_lengths` from the tag"
    " `input_lengths` when every row has it."
)


@promise(TOGETHER)
def a_claim_that_sees_a_sample_sees_its_fields_and_tags(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"])
    for turn in range(8):
        claim = part.waiting_claim(4, required=["x", "y"])
        ids = [f"{turn}-{row}" for row in range(4)]
        values = torch.full((4,), float(turn))
        part.put(ids, {"x": values, "y": values}, [{"turn": turn} for _ in ids])
        meta = claim.result("a claim of four samples that have been written")
        has_samples("a claim that was woken by a write", meta, ids, [{"turn": turn}] * 4)
        batch = part.client.get_data(meta)
        equal("its fields", [batch.get("x"), batch.get("y")], [values, values])


@promise(TOGETHER)
def no_reader_sees_a_write_in_part(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"], tasks=["any", "both"])
    turns, rows = 20, 5

    def follow(task: str, required: list[str]) -> int:
        seen, end = 0, time.monotonic() + plane.deadline
        while seen < turns * rows and time.monotonic() < end:
            meta = part.claim_ready(task=task, required=required)
            expect(
                meta.size % rows == 0,
                f"a claim saw {meta.size} samples, and every write has {rows}: a write was visible in part",
            )
            equal(
                "the tags of claimed samples", [set(tag) for tag in meta.tags or []], [{"turn"}] * meta.size
            )
            if meta.size:
                batch = part.get(meta.sample_ids, ["x", "y"])
                equal("two fields of one write", batch.get("x"), batch.get("y"))
            seen += meta.size
        return seen

    readers = [plane.start(lambda: follow("any", [])), plane.start(lambda: follow("both", ["x", "y"]))]
    for turn in range(turns):
        ids = [f"{turn}-{row}" for row in range(rows)]
        values = torch.full((rows, 3), float(turn))
        part.put(ids, {"x": values, "y": values}, [{"turn": turn} for _ in ids])
    for reader in readers:
        equal("the samples that a reader saw", reader.result("a reader", plane.deadline), turns * rows)


@promise("Writing a field again replaces it.")
def writing_a_field_again_replaces_it_and_leaves_the_others(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"])
    part.put("ab", {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([3.0, 4.0])})
    part.put("b", {"x": torch.tensor([20.0])})
    equal("the field that was written again", part.numbers("ab"), [1.0, 20.0])
    equal("the field that was not", part.numbers("ab", "y"), [3.0, 4.0])
    part.put("a", {"x": torch.tensor([[7, 8, 9]])})
    equal("a row of another shape and dtype", part.get("a").get("x"), torch.tensor([[7, 8, 9]]))


@promise(AGAIN)
def a_field_written_again_does_not_hand_a_claimed_sample_out_again(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("ab")
    has_samples("the first claim", part.claim_ready(1), "a")
    part.put_numbers("ab", start=5)
    has_samples("a claim after both were written again", part.claim_ready(), "b")


@promise(AGAIN)
def a_sample_that_is_written_again_keeps_its_place(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("ab")
    part.put_numbers("c")
    part.put_numbers("ba", start=5)
    has_samples("a claim after an overwrite", part.claim_ready(), "abc")


@promise("Tags are merged: a key that is written again is replaced, the others stay.")
def tags_are_merged(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put("ab", {"x": torch.zeros(2)}, [{"v": 1, "w": [1]}, {"v": 2}])
    part.put("a", None, [{"v": 10, "z": "new"}])
    part.put_numbers("ab")
    equal("the tags after two writes", part.claim_ready().tags, [{"v": 10, "w": [1], "z": "new"}, {"v": 2}])


@promise("A sample id is a non-empty string.")
def an_id_that_is_not_a_non_empty_string_is_refused(plane: PlaneUnderTest) -> None:
    part = _with_one_sample(plane)
    for bad in ("", 3, None, b"new"):
        _refused_whole(part, f"an id of {bad!r}", _numbers(3), ids=["old", "new", bad])


@promise(REFUSED, TOGETHER)
def an_id_that_is_there_twice_is_refused_and_nothing_is_written(plane: PlaneUnderTest) -> None:
    part = _with_one_sample(plane)
    _refused_whole(part, "duplicate ids", _numbers(3), ids=["old", "new", "new"])
    _refused_whole(part, "duplicate ids", None, [{"v": 9}] * 3, ids=["new", "old", "old"])


@promise(REFUSED, TOGETHER)
def a_row_count_that_differs_from_the_ids_is_refused_and_nothing_is_written(plane: PlaneUnderTest) -> None:
    part = _with_one_sample(plane)
    for rows in (0, 1, 3):
        _refused_whole(part, f"{rows} rows for 2 ids", _numbers(rows))
    nested = TensorDict({"x": jagged([torch.ones(2)] * 3)}, [3])
    _refused_whole(part, "3 nested rows for 2 ids", nested)


@promise(REFUSED, TOGETHER)
def tags_of_another_length_are_refused_and_nothing_is_written(plane: PlaneUnderTest) -> None:
    part = _with_one_sample(plane)
    for count in (0, 1, 3):
        _refused_whole(part, f"{count} tags for 2 ids", _numbers(2), [{"v": 9}] * count)


@promise(
    "Anything else: `TypeError` that names the field, unless the config says `allow_pickle: true`.", TOGETHER
)
def an_object_that_may_not_travel_is_refused_and_nothing_is_written(plane: PlaneUnderTest) -> None:
    part = _with_one_sample(plane)
    unwelcome: list[Any] = [object(), {1, 2}, 1 + 2j, {1: "an int as a key"}, ["in a list", object()], int]
    for bad in unwelcome:
        columns = {"x": torch.ones(2), "payload": objects([1, bad])}
        what = f"a {type(bad).__name__} in a column"
        _refused_whole(part, what, columns, kind=TypeError, mentions=["payload"])
    for bad in (*unwelcome, torch.zeros(2)):
        what = f"a {type(bad).__name__} in a tag"
        _refused_whole(part, what, _numbers(2), [{"v": 9}, {"v": bad}], kind=TypeError)


@promise(
    "or as `NonTensorData` that holds a list, a tuple, an object array or a `<U` array with one entry "
    "per row",
    TOGETHER,
)
def an_object_column_without_one_entry_per_row_is_refused(plane: PlaneUnderTest) -> None:
    part = _with_one_sample(plane)
    words = ["one", "two", "three"]
    forms = {
        "three objects": objects(words),
        "a list of three objects": NonTensorData(words, batch_size=[2]),
        "a tuple of three objects": NonTensorData(tuple(words), batch_size=[2]),
        "an array of three objects": NonTensorData(np.array(words, object), batch_size=[2]),
        "a <U array of three words": NonTensorData(np.array(words), batch_size=[2]),
    }
    for what, column in forms.items():
        columns = TensorDict({}, [])
        columns["x"], columns["payload"] = torch.ones(2), column
        _refused_whole(part, f"{what} for two rows", columns)


@promise(
    'A single value for all rows, such as `NonTensorData("same")`, is refused with `ValueError` that says '
    "how to write it.",
    TOGETHER,
)
def a_single_object_for_all_rows_is_refused_with_the_way_to_write_it(plane: PlaneUnderTest) -> None:
    part = _with_one_sample(plane)
    # A text with a letter for each row, and a dict with a key for each, are single values all the same.
    for single in ("same", "ab", b"ab", {"a": 1, "b": 2}, 7, None, np.array("same")):
        columns = {"x": torch.ones(2), "payload": NonTensorData(single, batch_size=[2])}
        what = f"the single value {single!r} for two rows"
        _refused_whole(part, what, columns, mentions=["payload", "NonTensorStack"])


@promise("An empty list of ids writes nothing and returns an empty meta.")
def an_empty_write_writes_nothing_and_returns_an_empty_meta(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    for columns, tags in ((_numbers(0), None), (None, []), (TensorDict({}, [0]), None), (None, None)):
        equal("the ids of an empty write", part.put([], columns, tags).sample_ids, [])
    has_samples("a claim after it", part.claim_ready(required=[]), [])
    expect(not part.is_consumed("train"), "an empty write counts as a write: the partition is consumed")


@promise(
    "`fields=None` writes tags alone; for an id that is not there it makes a sample that has tags and "
    "no fields.",
)
def a_write_without_fields_writes_tags_alone(plane: PlaneUnderTest) -> None:
    part = plane.partition(tasks=["train", "any"])
    part.put_numbers("a", start=1)
    part.put("ab", None, [{"v": 1}, {"v": 2}])
    equal("the field that was there", part.numbers("a"), [1.0])
    refuses(KeyError, "reading a field of a sample that has only tags", part.get, "b")
    has_samples("a claim on a field", part.claim_ready(), "a")
    anything = part.claim_ready(task="any", required=[])
    has_samples("a claim without required fields", anything, "ab", [{"v": 1}, {"v": 2}])
    part.put_numbers("b")
    has_samples("a claim when the field was written", part.claim_ready(), "b")


@promise(
    "With `must_exist=True` a write to samples that are not there, such as one that comes after they were "
    "cleared, is a `KeyError` that names them, and nothing is written.",
    feature="must_exist",
)
def a_late_write_does_not_bring_cleared_samples_back(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"])
    part.put_numbers("abc")
    part.clear("b")
    late = {"y": torch.ones(3)}
    refuses(KeyError, "a late write", part.put, "abc", late, must_exist=True, mentions=["'b'", "1 of 3"])
    refuses(KeyError, "late tags", part.put, "ab", None, [{"v": 1}, {}], must_exist=True, mentions=["'b'"])
    has_samples("a claim on what would have been written", part.claim_ready(required=["y"]), [])
    has_samples("a claim of what is there", part.claim_ready(), "ac", [{}, {}])
    part.put("ac", {"y": torch.ones(2)}, must_exist=True)
    equal("what was written in time", part.numbers("ac", "y"), [1.0, 1.0])


@promise("An unregistered partition: `KeyError`.")
def a_write_to_an_unregistered_partition_is_refused(plane: PlaneUnderTest) -> None:
    part = plane.unregistered()
    refuses(KeyError, "a write", part.put_numbers, "a", mentions=[part.name])
    refuses(KeyError, "a write of tags", part.put, "a", None, [{"v": 1}], mentions=[part.name])


@promise(RECEIPT)
def a_write_returns_its_receipt(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"])
    part.put("ba", {"y": torch.zeros(2)}, [{"old": 1}, {"old": 1}])
    tags: list[dict[str, Any]] = [{"input_lengths": 5}, {"input_lengths": 3, "v": [1]}]
    meta = part.put("ba", {"x": torch.tensor([1.0, 2.0])}, tags)
    equal("partition_id", meta.partition_id, part.name)
    equal("task_name", meta.task_name, None)
    has_samples("the receipt", meta, "ba")
    equal("fields", meta.fields, ["x"])
    equal("tags", meta.tags, tags)
    equal("sequence_lengths", meta.sequence_lengths, [5, 3])
    equal("get_data of the receipt", part.client.get_data(meta).get("x"), torch.tensor([1.0, 2.0]))
    meta = part.put("ba", _numbers(2), [{"input_lengths": 5}, {}])
    equal("sequence_lengths when a row has no input_lengths", meta.sequence_lengths, None)
    meta = part.put("ba", None, [{"v": 1}, {"v": 2}])
    equal("fields of a write of tags", meta.fields, None)
    meta = part.put("ba", {"y": torch.zeros(2), "x": torch.zeros(2)})
    equal("fields of a write of two", sorted(meta.fields or []), ["x", "y"])
    equal("tags of a write without tags", meta.tags, [{}, {}])
    equal("sequence_lengths of a write without tags", meta.sequence_lengths, None)


def _numbers(rows: int) -> TensorDict:
    return TensorDict({"x": torch.full((rows,), 9.0)}, [rows])


def _with_one_sample(plane: PlaneUnderTest) -> PartitionUnderTest:
    part = plane.partition(fields=["x", "payload"])
    part.put(["old"], {"x": torch.tensor([1.0])}, [{"v": 1}])
    return part


def _refused_whole(
    part: PartitionUnderTest,
    what: str,
    columns: Any,
    tags: list[dict[str, Any]] | None = None,
    *,
    ids: Sequence[Any] = ("old", "new"),
    kind: type[Exception] = ValueError,
    mentions: Sequence[str] = (),
) -> None:
    """The write must raise ``kind``, and leave the sample ``old`` as it was and ``new`` unwritten."""
    refuses(kind, f"a write with {what}", part.put, ids, columns, tags, mentions=mentions)
    after = f"after a write with {what}"
    equal(f"the sample that was there, {after}", part.numbers(["old"]), [1.0])
    for field in ("x", "payload"):
        refuses(KeyError, f"reading {field!r} of the new row, {after}", part.get, ["new"], [field])
    # A task that was never there before sees everything.
    look = f"look-{uuid.uuid4().hex[:6]}"
    part.register(["x", "payload"], tasks=["train", look])
    has_samples(f"a claim {after}", part.claim_ready(task=look, required=[]), ["old"], [{"v": 1}])
