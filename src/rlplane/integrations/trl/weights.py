"""Weights through the plane: one sample per version, which is there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator

from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from rlplane.interfaces import DataPlaneClient

_FIELD = "state"
VERSION_TAG = "weight_version"


def weights_partition(partition_id: str) -> str:
    """Where the weights are that the rollouts of ``partition_id`` are made with."""
    return f"{partition_id}.weights"


class PlaneWeightTransfer:
    """TRL's ``WeightTransferProtocol``: each ``send_weights`` is a version that rollout processes pick up.

    They go on generating meanwhile: nothing has to be paused. The two newest versions are kept.

    Args:
        plane: The client of the trainer's process.
        partition_id: As that of the :class:`PlaneRolloutWorker`.
    """

    def __init__(self, plane: DataPlaneClient, partition_id: str = "trl") -> None:
        self._plane = plane
        self._partition = weights_partition(partition_id)
        self._version = 0

    def init_weight_transfer(self) -> None:
        """Register the partition."""
        self._plane.register_partition(self._partition, [_FIELD], 0, ["rollout"])

    def pause(self) -> None:
        """Nothing to do: rollouts in progress keep the version that they began with."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Publish a version. TRL's trainer counts its own in the same way: 1 at the beginning of training."""
        state = {name: tensor.detach().cpu() for name, tensor in iterator}
        self._version += 1
        row = TensorDict({_FIELD: NonTensorStack(NonTensorData(state))}, [1])
        self._plane.put_samples([f"v{self._version}"], self._partition, row, [{VERSION_TAG: self._version}])
        self._plane.clear_samples([f"v{self._version - 2}"], self._partition)

    def resume(self) -> None:
        """Nothing to do."""

    def destroy(self) -> None:
        """Give the memory of the weights back. Rollout processes may still look for newer ones."""
        self._plane.clear_samples([f"v{self._version - 1}", f"v{self._version}"], self._partition)


def newer_weights(
    plane: DataPlaneClient, partition_id: str, than: int
) -> tuple[int, dict[str, Tensor]] | None:
    """The newest version and its weights, or None if there is none that is newer."""
    while True:
        found = plane.peek_meta(
            weights_partition(partition_id),
            where={VERSION_TAG: {">": than}},
            fields=[_FIELD],
            limit=1,
            order=f"priority:{VERSION_TAG}",
        )
        if not found.size:
            return None
        try:
            (state,) = plane.get_data(found).get(_FIELD).tolist()
        except KeyError:  # Two newer ones have come meanwhile.
            continue
        return int((found.tags or [])[0][VERSION_TAG]), state
