"""kv_first_write, read_columns and write_columns, through the memory engine."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rlplane import build_data_plane_client, load_config, shard_meta_for_dp
from rlplane.columns.io import kv_first_write, read_columns, write_columns
from rlplane.interfaces import DataPlaneClient, KVBatchMeta
from rlplane.testing.expectations import is_same

IDS = torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 0, 0]])
LENGTHS = [3, 1, 2]
NAMES = ["a", "b", "c"]


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[DataPlaneClient]:
    cfg = load_config("local", {"controller_address": request.node.name})
    with build_data_plane_client(cfg) as plane:
        plane.register_partition("train", ["input_ids", "reward", "note", "logprobs"], 3, ["work"])
        yield plane


def first_write(client: DataPlaneClient, **changes: Any) -> KVBatchMeta:
    arguments: dict[str, Any] = {
        "dp_client": client,
        "partition_id": "train",
        "sample_ids": NAMES,
        "final_batch_cpu": {
            "input_ids": IDS,
            "reward": torch.tensor([0.1, 0.2, 0.3]),
            "note": ["x", "y", {"z": 1}],
        },
        "lengths": LENGTHS,
    }
    return kv_first_write(**{**arguments, **changes})


def test_the_first_write_travels_without_its_padding(client: DataPlaneClient) -> None:
    meta = first_write(client)
    assert meta.fields == ["input_ids", "reward", "note"]
    stored = client.get_data(meta)["input_ids"]
    assert [row.tolist() for row in stored.unbind()] == [[1, 2, 3], [4], [5, 6]]


def test_lengths_are_known_to_the_writer_and_to_a_later_claim(client: DataPlaneClient) -> None:
    assert first_write(client, lengths=torch.tensor(LENGTHS)).sequence_lengths == LENGTHS
    claimed = client.claim_meta("train", "work", ["input_ids"], 3)
    assert claimed.sequence_lengths == LENGTHS
    assert claimed.tags == [{"input_lengths": n} for n in LENGTHS]


def test_lengths_join_the_tags_that_are_given(client: DataPlaneClient) -> None:
    tags = [{"version": i} for i in range(3)]
    assert first_write(client, tags=tags).tags == [
        {"version": i, "input_lengths": n} for i, n in enumerate(LENGTHS)
    ]
    assert tags == [{"version": i} for i in range(3)]


def test_without_lengths_columns_are_written_as_they_are(client: DataPlaneClient) -> None:
    meta = first_write(client, lengths=None)
    assert meta.sequence_lengths is None
    assert torch.equal(client.get_data(meta, ["input_ids"])["input_ids"], IDS)


def test_columns_are_read_back_padded(client: DataPlaneClient) -> None:
    columns = read_columns(client, first_write(client), pad_value_dict={"input_ids": -1})
    assert columns["input_ids"].tolist() == [[1, 2, 3], [4, -1, -1], [5, 6, -1]]
    assert columns["reward"].tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert columns["note"].tolist() == ["x", "y", {"z": 1}]


def test_columns_are_read_back_jagged(client: DataPlaneClient) -> None:
    columns = read_columns(client, first_write(client), ["input_ids"], layout="jagged")
    assert list(columns) == ["input_ids"]
    assert [row.tolist() for row in columns["input_ids"].unbind()] == [[1, 2, 3], [4], [5, 6]]


def test_columns_are_padded_to_a_length_that_all_ranks_share(client: DataPlaneClient) -> None:
    columns = read_columns(client, first_write(client).subset([1]), ["input_ids"], pad_to_seqlen=4)
    assert columns["input_ids"].tolist() == [[4, 0, 0, 0]]


def test_every_rank_writes_its_shard_and_the_whole_is_read_in_order(client: DataPlaneClient) -> None:
    whole = first_write(client)
    for meta in shard_meta_for_dp(whole, dp_world=2)[0]:
        padded = read_columns(client, meta, ["input_ids"])["input_ids"]
        after = write_columns(client, meta, {"logprobs": padded * -0.5}, token_aligned_fields=["logprobs"])
        assert after.fields == ["input_ids", "reward", "note", "logprobs"]
        assert after.sample_ids == meta.sample_ids
    result = read_columns(client, whole, ["logprobs"])["logprobs"]
    assert result.tolist() == [[-0.5, -1.0, -1.5], [-2.0, 0.0, 0.0], [-2.5, -3.0, 0.0]]


def test_written_columns_are_packed_by_the_lengths_of_the_meta(client: DataPlaneClient) -> None:
    meta = first_write(client)
    write_columns(client, meta, {"logprobs": torch.full((3, 7), 0.5)}, token_aligned_fields=["logprobs"])
    stored = client.get_data(meta, ["logprobs"])["logprobs"]
    assert [row.shape[0] for row in stored.unbind()] == LENGTHS


@pytest.mark.parametrize(
    ("columns", "token_aligned_fields", "message"),
    [
        ({"logprobs": torch.zeros(2)}, None, "field 'logprobs': a column of 3 rows is needed"),
        ({"logprobs": torch.zeros(2, 4)}, ["logprobs"], "field 'logprobs': a column of 3 rows is needed"),
        ({"logprobs": [torch.zeros(2)] * 3}, ["logprobs"], "row 0 has a tensor of shape"),
    ],
)
def test_columns_that_do_not_fit_are_refused_and_not_written(
    client: DataPlaneClient, columns: dict[str, Any], token_aligned_fields: Any, message: str
) -> None:
    meta = first_write(client)
    with pytest.raises(ValueError, match=message):
        write_columns(client, meta, columns, token_aligned_fields=token_aligned_fields)
    with pytest.raises(KeyError, match="logprobs"):
        client.get_data(meta, ["logprobs"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [1, 2]}, "lengths has 2 entries for 3 samples"),
        ({"lengths": None, "token_aligned_fields": ["input_ids"]}, "no lengths to pack by"),
        ({"tags": [{}]}, "tags has 1 entries for 3 sample_ids"),
        ({"sample_ids": ["a", "a", "b"]}, "a"),
        (
            {"lengths": None, "final_batch_cpu": {"note": ["x"]}},
            "1 rows for 3 samples.*must match batch size",
        ),
        ({"sample_ids": ["a", "b"]}, "sample_ids must match batch size"),
    ],
)
def test_a_first_write_that_does_not_fit_writes_nothing(
    client: DataPlaneClient, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        first_write(client, **changes)
    assert client.list_sample_ids("train") == []


def test_a_stage_that_comes_too_late_does_not_bring_cleared_samples_back(client: DataPlaneClient) -> None:
    meta = first_write(client)
    client.clear_samples(["a"], "train")
    late = {"reward": torch.ones(3)}
    with pytest.raises(KeyError, match="'a'"):
        write_columns(client, meta, late)
    assert client.list_sample_ids("train") == ["b", "c"]
    write_columns(client, meta, late, must_exist=False)
    assert client.list_sample_ids("train") == ["b", "c", "a"]


def test_rows_that_are_no_single_tensor_are_written_as_they_are(client: DataPlaneClient) -> None:
    images = [torch.ones(2, 3), torch.ones(1, 4), torch.zeros(3, 1)]
    trees = [{"pixels": image, "n": row} for row, image in enumerate(images)]
    dicts = TensorDict({"x": torch.arange(3)}, batch_size=[3])
    meta = first_write(client, final_batch_cpu={"input_ids": IDS, "note": trees, "reward": dicts})
    columns = read_columns(client, meta.subset([2, 0]))
    assert is_same(columns["note"].tolist(), [trees[2], trees[0]])
    assert is_same(columns["reward"].tolist(), [{"x": torch.tensor(2)}, {"x": torch.tensor(0)}])
    write_columns(client, meta, {"note": images, "reward": torch.nested.nested_tensor(images)})
    columns = read_columns(client, meta.subset([2, 0]), ["note", "reward"])
    assert is_same(columns["note"].tolist(), [images[2], images[0]])
    assert is_same(list(columns["reward"].unbind()), [images[2], images[0]])


# padding


def write_ids(client: DataPlaneClient, ids: Any, name: str = "input_ids", **how: Any) -> list[list[int]]:
    names = [f"s{row}" for row in range(len(ids))]
    batch = {name: torch.tensor(ids)}
    meta = kv_first_write(batch, sample_ids=names, dp_client=client, partition_id="train", **how)
    return [row.tolist() for row in client.get_data(meta, [name])[name].unbind()]


def test_padding_is_on_the_right_unless_told_otherwise(client: DataPlaneClient) -> None:
    """NeMo-RL's ``kv_first_write`` knows no other; ``padding="left"`` is ours."""
    assert write_ids(client, [[1, 2, 0, 0], [1, 2, 3, 4]], lengths=[2, 4]) == [[1, 2], [1, 2, 3, 4]]
    left = [[0, 0, 1, 2], [1, 2, 3, 4]]
    assert write_ids(client, left, lengths=[2, 4], padding="left") == [[1, 2], [1, 2, 3, 4]]


def test_tokens_are_not_cut_off_as_padding_of_the_other_side(client: DataPlaneClient) -> None:
    left = [[0, 0, 1, 2], [1, 2, 3, 4]]
    with pytest.raises(ValueError, match=r"field 'input_ids'.* such as 1 and 2.*padding=\"left\""):
        write_ids(client, left, lengths=[2, 4])
    assert client.list_sample_ids("train") == []
    assert write_ids(client, left, lengths=[2, 4], padding="right") == [[0, 0], [1, 2, 3, 4]]


@pytest.mark.parametrize(
    "form",
    [
        torch.tensor,
        np.array,
        lambda rows: [torch.tensor(row) for row in rows],
        lambda rows: [np.array(row) for row in rows],
        lambda rows: rows,
        lambda rows: np.array(rows, np.uint32),
    ],
    ids=["tensor", "array", "tensors", "arrays", "lists", "uint32"],
)
def test_padding_is_checked_in_every_form_that_a_column_may_have(
    client: DataPlaneClient, form: Callable[[Any], Any]
) -> None:
    batch = {"input_ids": form([[0, 0, 1, 2], [1, 2, 3, 4]])}
    how: dict[str, Any] = {"sample_ids": ["a", "b"], "dp_client": client, "partition_id": "train"}
    with pytest.raises(ValueError, match=r"field 'input_ids'.* such as 1 and 2.*padding=\"left\""):
        kv_first_write(batch, **how, lengths=[2, 4])
    assert client.list_sample_ids("train") == []
    meta = kv_first_write(batch, **how, lengths=[2, 4], padding="left")
    assert [row.tolist() for row in client.get_data(meta)["input_ids"].unbind()] == [[1, 2], [1, 2, 3, 4]]


def test_what_is_said_to_be_per_token_is_never_left_as_it_is(client: DataPlaneClient) -> None:
    ids = [[1, 2, 3, 4], [5, 6, 7, 8]]
    with pytest.raises(ValueError, match="the length of row 1 is 5; it must be between 0 and 4"):
        write_ids(client, ids, "logprobs", lengths=[4, 5], token_aligned_fields=["logprobs"])
    with pytest.raises(ValueError, match=r"token_aligned_fields .* not 'logprobs'"):
        write_ids(client, ids, "logprobs", lengths=[4, 4], token_aligned_fields="logprobs")
    assert client.list_sample_ids("train") == []


def test_only_fields_with_a_usual_name_are_cut_unless_told_otherwise(client: DataPlaneClient) -> None:
    batch = {"input_ids": torch.tensor([[1, 0], [2, 3]]), "logprobs": torch.tensor([[0.1, 0.2], [0.3, 0.4]])}
    how: dict[str, Any] = {"sample_ids": ["a", "b"], "dp_client": client, "partition_id": "train"}
    meta = kv_first_write(batch, **how, lengths=[1, 2])
    assert [row.tolist() for row in client.get_data(meta)["input_ids"].unbind()] == [[1], [2, 3]]
    assert torch.equal(client.get_data(meta)["logprobs"], batch["logprobs"])
    meta = kv_first_write(batch, **how, lengths=[1, 2], token_aligned_fields=["logprobs"])
    assert torch.equal(client.get_data(meta)["input_ids"], batch["input_ids"])
    assert [len(row) for row in client.get_data(meta)["logprobs"].unbind()] == [1, 2]


@pytest.mark.parametrize("name", ["input_ids", "logprobs"])
def test_a_mask_says_which_positions_are_tokens(client: DataPlaneClient, name: str) -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]])
    ids = [[9, 1, 2, 9], [3, 4, 5, 6], [9, 9, 9, 9], [9, 9, 9, 7]]
    tokens = write_ids(client, ids, name, attention_mask=mask, token_aligned_fields=[name])
    assert tokens == [[1, 2], [3, 4, 5, 6], [], [7]]
    assert client.claim_meta("train", "work", [name], 4).sequence_lengths == [2, 4, 0, 1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"attention_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])},
            "row 0 of attention_mask has .* gap",
        ),
        ({"attention_mask": torch.ones(2, 3)}, "4 positions and attention_mask has 3"),
        ({"attention_mask": torch.full((2, 4), 0.5)}, "1 where a token is and 0 elsewhere"),
        ({"attention_mask": torch.ones(3, 4)}, r"shape \[N, S\] for 2 rows"),
        (
            {"attention_mask": torch.ones(2, 4), "lengths": [4, 3]},
            "length of row 1 is 3, and .* has 4 tokens",
        ),
        ({"attention_mask": torch.ones(2, 4), "padding": "left"}, "not both"),
        ({"lengths": [2, 4], "padding": "both"}, "padding is 'left' or 'right'"),
    ],
)
def test_what_is_said_about_padding_is_checked(
    client: DataPlaneClient, how: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_ids(client, [[0, 0, 1, 2], [1, 2, 3, 4]], **how)
    assert client.list_sample_ids("train") == []


@given(data=st.data(), lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6), spare=st.integers(0, 3))
@settings(deadline=None, max_examples=100)
def test_tokens_are_the_same_however_they_were_padded(
    data: st.DataObject, lengths: list[int], spare: int
) -> None:
    width = max(lengths) + spare
    tokens = [data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)) for n in lengths]
    side = data.draw(st.sampled_from(["left", "right", "both"]))
    pad = data.draw(st.integers(0, 3))
    ids, mask = torch.full((len(lengths), width), pad), torch.zeros(len(lengths), width)
    for row, own in enumerate(tokens):
        room = width - len(own)
        begin = data.draw(st.integers(0, room)) if side == "both" else room if side == "left" else 0
        ids[row, begin : begin + len(own)] = torch.tensor(own, dtype=ids.dtype)
        mask[row, begin : begin + len(own)] = 1
    forms: list[dict[str, Any]] = [{"attention_mask": mask}, {"attention_mask": mask, "lengths": lengths}]
    if side != "both":
        forms.append({"padding": side, "lengths": torch.tensor(lengths)})
    with build_data_plane_client(load_config("local", {"controller_address": "padding"})) as plane:
        plane.register_partition("train", ["input_ids"], len(lengths), ["work"])
        for how in forms:
            assert write_ids(plane, ids.tolist() if width else [[] for _ in lengths], **how) == tokens


def test_a_batch_in_nemo_rls_form_brings_its_lengths(client: DataPlaneClient) -> None:
    batch = {
        "input_ids": IDS,
        "input_lengths": torch.tensor(LENGTHS),
        "sample_mask": torch.ones(3),
    }
    with pytest.warns(UserWarning, match="was not declared"):
        meta = kv_first_write(
            batch,
            sample_ids=NAMES,
            dp_client=client,
            partition_id="train",
            extra_info={"step": 3},
            task_name="work",
            pad_to_multiple=8,
        )
    assert (meta.task_name, meta.sequence_lengths) == ("work", LENGTHS)
    assert meta.extra_info == {"step": 3, "pad_to_multiple": 8}
    columns = read_columns(client, meta)
    assert torch.equal(columns["sample_mask"], torch.ones(3))
    assert columns["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]


def test_a_meta_can_say_how_wide_its_columns_are_padded(client: DataPlaneClient) -> None:
    meta = first_write(client, extra_info={"global_forward_pad_seqlen": 6})
    assert read_columns(client, meta, ["input_ids"])["input_ids"].shape == (3, 6)


def test_writing_no_columns_writes_nothing(client: DataPlaneClient) -> None:
    meta = first_write(client)
    assert write_columns(client, meta, {}).fields == meta.fields
