"""kv_first_write, read_columns and write_columns, through the memory engine."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlplane import build_data_plane_client, load_config, shard_meta_for_dp
from rlplane.columns import kv_first_write, read_columns, write_columns
from rlplane.interfaces import DataPlaneClient, KVBatchMeta

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
        "partition_id": "train",
        "sample_ids": NAMES,
        "fields": {
            "input_ids": IDS,
            "reward": torch.tensor([0.1, 0.2, 0.3]),
            "note": ["x", "y", {"z": 1}],
        },
        "lengths": LENGTHS,
    }
    return kv_first_write(client, **{**arguments, **changes})


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
    assert columns["note"] == ["x", "y", {"z": 1}]


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
        after = write_columns(client, meta, {"logprobs": padded * -0.5})
        assert after.fields == ["input_ids", "reward", "note", "logprobs"]
        assert after.sample_ids == meta.sample_ids
    result = read_columns(client, whole, ["logprobs"])["logprobs"]
    assert result.tolist() == [[-0.5, -1.0, -1.5], [-2.0, 0.0, 0.0], [-2.5, -3.0, 0.0]]


def test_written_columns_are_packed_by_the_lengths_of_the_meta(client: DataPlaneClient) -> None:
    meta = first_write(client)
    write_columns(client, meta, {"logprobs": torch.full((3, 7), 0.5)})
    stored = client.get_data(meta, ["logprobs"])["logprobs"]
    assert [row.shape[0] for row in stored.unbind()] == LENGTHS


@pytest.mark.parametrize(
    ("columns", "per_token", "message"),
    [
        ({}, None, "no fields were given"),
        ({"logprobs": torch.zeros(2)}, None, "field 'logprobs': a column of 3 rows is needed"),
        ({"logprobs": torch.rand(3, 9)}, None, "is field 'logprobs' per token"),
        ({"logprobs": torch.zeros(3, 2)}, ["logprobs"], "length of row 0 is 3"),
    ],
)
def test_columns_that_do_not_fit_are_refused_and_not_written(
    client: DataPlaneClient, columns: dict[str, Any], per_token: Any, message: str
) -> None:
    meta = first_write(client)
    with pytest.raises(ValueError, match=message):
        write_columns(client, meta, columns, per_token=per_token)
    with pytest.raises(KeyError, match="logprobs"):
        client.get_data(meta, ["logprobs"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [1, 2]}, "lengths has 2 entries for 3 samples"),
        ({"lengths": None, "per_token": ["input_ids"]}, "no lengths to pack by"),
        ({"tags": [{}]}, "tags has 1 entries for 3 sample_ids"),
        ({"sample_ids": ["a", "a", "b"]}, "a"),
        ({"lengths": None, "fields": {"note": ["x"]}}, "field 'note': a column of 3 rows is needed"),
    ],
)
def test_a_first_write_that_does_not_fit_writes_nothing(
    client: DataPlaneClient, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        first_write(client, **changes)
    assert client.list_sample_ids("train") == []
