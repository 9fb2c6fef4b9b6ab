"""What a caller is told who has made a mistake: what was wrong, and what there is instead."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict

from rlplane import build_async_data_plane_client, build_data_plane_client, load_config
from rlplane.errors import ClaimTimeoutError, InvalidRequestError
from rlplane.interfaces import DataPlaneClient


@pytest.fixture
def plane() -> Iterator[DataPlaneClient]:
    with build_data_plane_client(load_config("local")) as client:
        client.register_partition("p", ["x"], 4, ["train"])
        yield client


@pytest.mark.parametrize(
    ("flow", "told"),
    [
        ({"kind": "window"}, "flow has the kind 'window'; there are unbounded, windowed, ready_first"),
        ({"kind": ["windowed"]}, "flow has the kind ['windowed']; there are"),
        ({"kind": "windowed", "staleness": 1}, "flow has no 'staleness'; it has kind, max_staleness"),
        ({"max_staleness": 2}, "flow: max_staleness, batch and freshest_first need a kind of policy"),
    ],
)
def test_a_flow_policy_that_does_not_exist_is_told_which_do(
    plane: DataPlaneClient, flow: dict[str, object], told: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plane.register_partition("q", ["x"], 4, ["train"], flow=flow)
    assert str(caught.value).startswith(told)


def test_tags_are_one_for_each_sample_and_not_one_for_all(plane: DataPlaneClient) -> None:
    rows = TensorDict({"x": torch.zeros(2)}, [2])
    with pytest.raises(InvalidRequestError, match="a list with a dict for each sample, not one dict"):
        plane.put_samples(["a", "b"], "p", rows, {"version": 1, "n": 2})  # type: ignore[arg-type]
    assert plane.count("p") == 0


def test_a_claim_that_times_out_says_how_long_it_waited_and_how_to_wait_longer(
    plane: DataPlaneClient,
) -> None:
    with pytest.raises(ClaimTimeoutError) as caught:
        plane.claim_meta("p", "train", ["x"], 2, timeout_s=0.05)
    assert caught.value.__notes__ == ["It waited for 0.05 s. timeout_s says how long; None: for ever."]

    async def claim() -> None:
        async with build_async_data_plane_client(load_config("local")) as client:
            await client.register_partition("p", ["x"], 4, ["train"])
            await client.claim_meta("p", "train", ["x"], 2, timeout_s=0.05)

    with pytest.raises(ClaimTimeoutError) as caught:
        asyncio.run(claim())
    assert caught.value.__notes__[0].startswith("It waited for 0.05 s.")
