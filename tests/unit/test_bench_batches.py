"""The bytes of the bench: the same in every process, and a reader that got others is caught."""

from dataclasses import replace

import pytest
import torch

from rlplane_benchmarks.batches import Batch, Columns, make_batches, scattered_order, touch, words_of
from rlplane_benchmarks.cluster import full_cluster_plan, quick_cluster_plan
from rlplane_benchmarks.cycles import CyclesDone, check_rows
from rlplane_benchmarks.images import ImageBatch
from rlplane_benchmarks.participants.store import check_tiny, columns_of, tiny_rows
from rlplane_benchmarks.plan import Workload, full_plan, quick_plan

GRPO = Workload("grpo", "", rows=32, fields=6, nbytes=100_000, ragged=True)
WIDE = Workload("wide", "", rows=16, fields=4, nbytes=65_536, ragged=False)
IMAGES = Workload("images", "", rows=16, fields=1, nbytes=2_000_000, ragged=False, is_trees=True)


@pytest.fixture(params=[GRPO, WIDE], ids=["ragged", "dense"])
def workload(request: pytest.FixtureRequest) -> Workload:
    return request.param


def batch_of(workload: Workload) -> Batch:
    batch = make_batches([workload])[workload.name]
    assert isinstance(batch, Batch)
    return batch


def read(workload: Workload, number: int, *, scattered: bool = False) -> Columns:
    """What a reader gets that makes no mistake."""
    batch = batch_of(workload)
    batch.stamp(number)
    columns = columns_of(batch.tensordict())
    if not scattered:
        return columns
    order = scattered_order(batch.rows, number)
    lengths = None if batch.lengths is None else [batch.lengths[row] for row in order]
    return {name: ([batch.split(name)[row] for row in order], lengths) for name in columns}


@pytest.mark.parametrize("scattered", [False, True])
def test_what_came_back_right_is_right(workload: Workload, scattered: bool) -> None:
    batch = batch_of(workload)
    batch.stamp(3)
    order = scattered_order(batch.rows, 3) if scattered else None
    assert batch.difference(read(workload, 3, scattered=scattered), order) is None


def test_one_wrong_byte_is_found_wherever_it_is(workload: Workload) -> None:
    batch = batch_of(workload)
    batch.stamp(0)
    for name in batch.fields:
        for at in (0, -1):
            got = read(workload, 0)
            value = got[name][0]
            assert isinstance(value, torch.Tensor)
            value.reshape(-1).view(torch.uint8)[at] ^= 1
            wrong = batch.difference(got, None)
            assert wrong is not None
            assert name in wrong


def test_bytes_of_an_earlier_round_are_wrong(workload: Workload) -> None:
    batch = batch_of(workload)
    batch.stamp(2)
    assert batch.difference(read(workload, 1), None) is not None


def test_rows_in_another_order_are_wrong(workload: Workload) -> None:
    batch = batch_of(workload)
    batch.stamp(1)
    assert batch.difference(read(workload, 1, scattered=True), None) is not None
    assert batch.difference(read(workload, 1), scattered_order(batch.rows, 1)) is not None


def test_a_missing_field_another_dtype_and_a_short_read_are_wrong(workload: Workload) -> None:
    batch = batch_of(workload)
    batch.stamp(0)
    last = batch.fields[-1]
    missing, narrow, short = read(workload, 0), read(workload, 0), read(workload, 0)
    del missing[last]
    value, lengths = narrow[last]
    assert isinstance(value, torch.Tensor)
    narrow[last] = (value.to(torch.int16), lengths)
    short[last] = (short[last][0][:-1], lengths)
    for got, word in ((missing, "fields"), (narrow, "int16"), (short, "elements")):
        assert word in (batch.difference(got, None) or "")


def test_the_batches_have_the_size_that_their_title_says() -> None:
    small = [w for w in full_plan().grpo if w.nbytes <= 13_000_000]
    for name, batch in make_batches(small).items():
        wanted = next(w.nbytes for w in small if w.name == name)
        assert abs(batch.nbytes - wanted) < 30, name


def test_wide_batches_share_their_memory_and_differ_in_the_number_of_fields() -> None:
    batches = make_batches([replace(WIDE, name=f"wide-{n}", fields=n) for n in (1, 4)])
    assert {len(batch.fields) for batch in batches.values()} == {1, 4}
    assert {batch.nbytes for batch in batches.values()} == {65_536}
    addresses = {b.values["field_0"].data_ptr() for b in batches.values() if isinstance(b, Batch)}
    assert len(addresses) == 1


def images(number: int, *, shared_by: int = 1) -> tuple[ImageBatch, Columns]:
    """A batch of images of a round, and what a reader gets that makes no mistake."""
    batch = ImageBatch(replace(IMAGES, shared_by=shared_by))
    batch.stamp(number)
    return batch, columns_of(batch.tensordict())


def test_images_differ_in_size_and_a_wrong_byte_an_old_round_and_another_order_are_found() -> None:
    batch, right = images(3)
    assert abs(batch.nbytes - IMAGES.nbytes) < IMAGES.nbytes / 2
    tensors = list(right["multi_modal_inputs"][0])
    assert len({tensor.shape for tensor in tensors}) > 2
    assert batch.difference(right, None) is None
    assert batch.difference(right, scattered_order(batch.rows, 3)) is not None
    assert batch.difference(images(2)[1], None) is not None
    tensors[0] = tensors[0].clone()
    tensors[0].view(torch.uint8)[-1, -1] ^= 1
    assert "other bytes" in (batch.difference({"multi_modal_inputs": (tensors, None)}, None) or "")
    assert "tensors instead" in (batch.difference({"multi_modal_inputs": (tensors[1:], None)}, None) or "")


def test_rows_of_a_prompt_that_share_an_image_hold_the_same_tensor() -> None:
    batch, right = images(0, shared_by=8)
    assert len({tensor.data_ptr() for tensor in right["multi_modal_inputs"][0]}) == 2 * 16 // 8
    assert batch.nbytes == sum(tensor.nbytes for tensor in right["multi_modal_inputs"][0])


def test_touching_reads_every_word_and_the_odd_bytes_at_the_end() -> None:
    value = torch.zeros(21, dtype=torch.uint8)
    words = words_of({"a": (value, None), "b": ([value[:8], value[1:], value[:0]], None)})
    assert touch(words) == 0
    for at in range(21):
        value[at] = 1
        assert touch(words[:2]) and touch(words[2:])
        value[at] = 0


def test_what_has_to_be_copied_before_it_can_be_touched_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        words_of({"a": (torch.zeros(4, 4).T, None)})


def test_scaling_keeps_every_part_and_changes_its_size() -> None:
    small = quick_plan().scaled(0.01)
    assert [w.name for w in small.grpo + small.wide] == [w.name for w in full_plan().grpo + full_plan().wide]
    assert max(w.nbytes for w in small.wide) < max(w.nbytes for w in quick_plan().wide) / 50
    assert len(small.resident) >= 2
    assert len(small.clients) >= 2
    assert quick_plan().scaled(1) == quick_plan()


def test_claimed_rows_are_checked_by_what_is_in_them() -> None:
    rows = tiny_rows(range(5, 9))
    assert check_tiny(rows[[2, 0, 3, 1]]) is None
    rows[1, 3] += 1
    assert "other numbers" in (check_tiny(rows) or "")
    assert "shape" in (check_tiny(rows.flatten()) or "")


def test_rows_of_other_numbers_or_too_few_of_them_are_wrong() -> None:
    rows = tiny_rows(range(5, 9))
    assert check_rows(rows[[2, 0, 3, 1]], range(5, 9)) is None
    assert check_rows(rows, range(6, 10)) is not None
    assert "3 rows" in (check_rows(rows[:3], range(5, 9)) or "")


def test_the_faults_of_all_clients_are_kept_and_their_cycles_added() -> None:
    fine, faulty = CyclesDone(3, 4, None), CyclesDone(1, 2, "wrong numbers")
    assert CyclesDone.sum([fine, faulty, fine]) == (7, 10, "wrong numbers")


def test_a_cluster_is_measured_with_1_4_and_12_clients_unless_scaled() -> None:
    assert full_cluster_plan().clients == quick_cluster_plan().clients == (1, 4, 12)
    assert quick_cluster_plan().scaled(0.01).clients == (1, 2)
    assert quick_cluster_plan().scaled(1) == quick_cluster_plan()
