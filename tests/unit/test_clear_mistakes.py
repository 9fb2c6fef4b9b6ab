"""Mistakes that are easily made get a message that says what is wrong and what would be right."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.warm_workers import run_warm

import rlplane
from rlplane.interfaces import DataPlaneClient

CHILD = """
import warnings, rlplane

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    with rlplane.build_data_plane_client(rlplane.load_config("shm")) as client:
        print(client.list_sample_ids("p"), [str(one.message) for one in told])
"""


@pytest.fixture
def client() -> Iterator[DataPlaneClient]:
    with rlplane.build_data_plane_client(rlplane.load_config("local")) as client:
        client.register_partition("p", ["x"], 10, ["train"])
        yield client


def test_a_child_that_forgets_bootstrap_false_joins_with_a_warning() -> None:
    with rlplane.build_data_plane_client(rlplane.load_config("shm")) as client:
        client.register_partition("p", ["x"], 10, ["train"])
        client.put_samples(["a"], "p", None, [{}])
        child = run_warm([sys.executable, "-c", CHILD], timeout=300, check=True)
        assert child.stdout.startswith("['a']") and "bootstrap=False" in child.stdout
        assert client.list_sample_ids("p") == ["a"]  # and its close has not ended the plane


def test_a_second_plane_of_the_same_process_is_its_own() -> None:
    with (
        rlplane.build_data_plane_client(rlplane.load_config("shm")) as first,
        rlplane.build_data_plane_client(rlplane.load_config("shm")) as second,
    ):
        first.register_partition("p", ["x"], 10, ["train"])
        with pytest.raises(KeyError):
            second.list_sample_ids("p")


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ({"w": {">=": 1}}, r"no sample has a tag 'w'; they have \['name', 'v'\]"),
        ({"v": "1"}, "the tag 'v' is a number, and is compared with the text '1'"),
        ({"name": {">": 3}}, "the tag 'name' is text, and is compared with the number 3"),
    ],
)
def test_a_condition_that_cannot_match_is_explained_by_the_timeout(
    client: DataPlaneClient, where: dict[str, Any], reason: str
) -> None:
    client.put_samples(["a", "b"], "p", None, [{"v": 1, "name": "one"}, {"v": 2, "name": "two"}])
    with pytest.raises(TimeoutError, match=reason):
        client.claim_meta("p", "train", [], 1, timeout_s=0.0, where=where)


def test_a_condition_that_only_does_not_match_yet_is_not_explained(client: DataPlaneClient) -> None:
    client.put_samples(["a"], "p", None, [{"v": 1}])
    with pytest.raises(TimeoutError, match=r"(?m)claimed already\)$"):
        client.claim_meta("p", "train", [], 1, timeout_s=0.0, where={"v": {">": 7}})


def test_swapped_arguments_are_named(client: DataPlaneClient) -> None:
    with pytest.raises(ValueError, match=r"not 'p'; the ids come first and the partition second"):
        client.put_samples("p", ["a"])  # type: ignore[arg-type]


def test_columns_in_the_place_of_the_partition_are_named(client: DataPlaneClient) -> None:
    columns = TensorDict({"x": torch.zeros(1)}, [1])
    with pytest.raises(ValueError, match=r"partition_id must be a string, not a TensorDict"):
        client.put_samples(["a"], columns, "p")


def test_a_field_that_nobody_has_written_is_named_by_the_timeout(client: DataPlaneClient) -> None:
    client.put_samples(["a"], "p", None, [{}])
    with pytest.raises(TimeoutError, match=r"(?m); no live sample has \['x'\] yet$"):
        client.claim_meta("p", "train", ["x"], 1, timeout_s=0.0)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_tensor_without_values_is_refused_by_name(client: DataPlaneClient, layout: torch.layout) -> None:
    column = torch.zeros(1, 3, device="meta")
    if layout is torch.jagged:
        column = torch.nested.nested_tensor_from_jagged(column[0], torch.tensor([0, 3], device="meta"))
    with pytest.raises(ValueError, match=r"field 'x' is on the device 'meta'"):
        client.put_samples(["a"], "p", TensorDict({"x": column}, [1]))
    assert client.list_sample_ids("p") == []
