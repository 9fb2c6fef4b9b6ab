"""What a plane that is full promises. Needs a factory that can make a small plane."""

from __future__ import annotations

from functools import partial

import torch

from rlplane.errors import CapacityError, CapacityTimeoutError
from rlplane.testing.expectations import equal, expect, refuses
from rlplane.testing.plane_under_test import PartitionUnderTest, PlaneUnderTest
from rlplane.testing.promises import BrokenPromise, promise

promise = partial(promise, feature="capacity")

FULL = (
    "A plane that is full (`storage_capacity` samples, or bytes) makes a put wait up to `timeout_s` for"
    " a clear, then raises `CapacityTimeoutError`, which is a `MemoryError` and a `TimeoutError`; "
    "nothing is written."
)
MEGABYTE = 1 << 20


@promise(FULL)
def a_write_to_a_full_plane_waits_for_a_clear(plane: PlaneUnderTest) -> None:
    part = plane.partition(client=plane.configured(storage_capacity=4))
    part.put_numbers("abcd")
    write = plane.start(lambda: part.put_numbers("e", start=7))
    expect(not write.is_done_within(plane.short), "a fifth sample was taken by a plane for four")
    part.clear("b")
    write.result("a write after a clear made room")
    equal("the sample that had to wait", part.numbers("e"), [7.0])


@promise(FULL)
def a_write_that_finds_no_room_in_time_writes_nothing(plane: PlaneUnderTest) -> None:
    part = plane.partition(client=plane.configured(storage_capacity=4))
    part.put_numbers("abc")
    columns = {"x": torch.tensor([9.0, 9.0, 9.0])}
    tags = [{"v": 9}, {"v": 9}, {"v": 9}]
    write = plane.start(lambda: part.put("ade", columns, tags, timeout_s=plane.short))
    error = refuses(CapacityTimeoutError, "a write without room", write.result, "a write without room")
    expect(isinstance(error, MemoryError), f"{error!r} is not a MemoryError")
    expect(isinstance(error, TimeoutError), f"{error!r} is not a TimeoutError")
    equal("the row that was there", part.numbers("a"), [0.0])
    refuses(KeyError, "reading a row of the write that timed out", part.get, "d")
    meta = part.claim_ready(required=[])
    equal("the samples afterwards", meta.sample_ids, ["a", "b", "c"])
    equal("their tags", [tag for tag in meta.tags or [] if tag], [])
    part.put_numbers("d", start=4)
    equal("a write that does fit", part.numbers("d"), [4.0])


@promise("Only a put that makes new samples (or needs new bytes) waits.")
def a_write_without_new_samples_does_not_wait(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"], client=plane.configured(storage_capacity=2))
    part.put_numbers("ab")
    part.put_numbers("ab", start=5, field="y")
    part.put("ab", {"x": torch.tensor([7.0, 8.0])})
    part.put("b", None, [{"v": 1}])
    equal("a field that was written again", part.numbers("ab"), [7.0, 8.0])
    equal("a field that was added", part.numbers("ab", "y"), [5.0, 6.0])


@promise("One that could never fit raises `CapacityError` at once.")
def a_write_that_could_never_fit_is_refused_at_once(plane: PlaneUnderTest) -> None:
    part = plane.partition(client=plane.configured(storage_capacity=3))
    _never_fits("a write of four samples to a plane for three", part, list("abcd"), torch.zeros(4))
    refuses(KeyError, "reading what was refused", part.get, "a")


@promise(FULL, "One that could never fit raises `CapacityError` at once.", feature="byte capacity")
def bytes_are_a_capacity_too(plane: PlaneUnderTest) -> None:
    client = plane.configured(global_segment_size=8 * MEGABYTE, local_buffer_size=MEGABYTE)
    part = plane.partition(client=client)
    row = torch.zeros(1, MEGABYTE // 4)
    written, refused = _fill(part, row, "1 MiB")
    refuses(KeyError, "reading the row that found no room", part.get, [refused])
    part.clear(written)
    part.put([refused], {"x": row + 7})
    equal("a row that had to wait for bytes", float(part.get([refused]).get("x").max()), 7.0)
    _never_fits("a write of 64 MiB to a plane of 8 MiB", part, ["huge"], torch.zeros(1, 16 * MEGABYTE))


@promise(
    "Puts that wait get room in the order in which they came, but one that fits is not held up for ever by a"
    " larger one that does not."
)
def a_write_that_fits_is_not_held_up_for_ever_by_a_larger_one(plane: PlaneUnderTest) -> None:
    part = plane.partition(client=plane.configured(storage_capacity=4))
    part.put_numbers("abc")
    large = plane.start(lambda: part.put_numbers("de", start=4))
    expect(not large.is_done_within(plane.short), "five samples were taken by a plane for four")
    small = plane.start(lambda: part.put_numbers("f", start=9))
    small.result("a write of one sample behind one of two, in a plane with room for one")
    equal("the sample that fits", part.numbers("f"), [9.0])
    part.clear("ab")
    large.result("the larger write, after a clear made room")
    equal("the samples of the larger write", part.numbers("de"), [4.0, 5.0])


@promise(
    "Columns of samples that exist come before new samples, and the share `reserve_for_live` of the bytes is"
    " theirs alone, so that a full plane can finish its samples.",
    feature="byte capacity",
)
def a_plane_that_is_full_of_new_samples_can_finish_them(plane: PlaneUnderTest) -> None:
    client = plane.configured(global_segment_size=8 * MEGABYTE, local_buffer_size=MEGABYTE)
    part = plane.partition(fields=["x", "y"], client=client)
    row = torch.zeros(1, MEGABYTE // 8)
    written, _ = _fill(part, row, "half a MiB")
    new = plane.start(lambda: part.put(["new"], {"x": row + 1}))
    expect(not new.is_done_within(plane.short), "a row that had found no room was written all the same")
    for sample_id in written:
        finish = plane.start(partial(part.put, [sample_id], {"y": torch.full((1, 4096), 5.0)}))
        finish.result("a small column for a sample of a full plane")
    equal(
        "a column that was written to a full plane", float(part.get(written[:1], ["y"]).get("y").max()), 5.0
    )
    expect(not new.is_done_within(plane.short), "a new row was written before anything was cleared")
    part.clear(written)
    new.result("a new row after a clear")


def _fill(part: PartitionUnderTest, row: torch.Tensor, size: str) -> tuple[list[str], str]:
    """Write such rows until one finds no room; the ids of those that did, and its own."""
    ids = [f"row-{i}" for i in range(64)]
    for index, sample_id in enumerate(ids):
        try:
            part.put([sample_id], {"x": row}, timeout_s=part.plane.short)
        except CapacityTimeoutError:
            expect(index, f"a plane of 8 MiB took no row of {size}")
            return ids[:index], sample_id
    raise BrokenPromise(f"a plane of 8 MiB took {len(ids)} rows of {size}")


def _never_fits(what: str, part: PartitionUnderTest, ids: list[str], column: torch.Tensor) -> None:
    deadline = part.plane.deadline
    refuses(CapacityError, what, part.put, ids, {"x": column}, timeout_s=2 * deadline, within_s=deadline)
