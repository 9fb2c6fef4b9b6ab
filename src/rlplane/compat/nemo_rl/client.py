"""A ``DataPlaneClient`` of NeMo-RL's, on a plane of ours. Imported only where NeMo-RL is installed."""

from __future__ import annotations

import warnings
from contextlib import suppress
from os import PathLike, fspath
from typing import Any

import torch
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from tensordict import TensorDict

import rlplane
from rlplane.adapters.calls import PlaneCalls
from rlplane.adapters.client import PlaneClient
from rlplane.columns.codec import materialize, row_lengths
from rlplane.errors import UnknownPartitionError
from rlplane.interfaces import DEFAULT_TIMEOUT_S, DataPlaneConfig


class RlplaneClient(DataPlaneClient):  # type: ignore[misc]  # NeMo-RL is not there when types are checked
    """NeMo-RL's calls, carried out by the client in ``plane``, whose methods beyond them may be used too."""

    def __init__(self, cfg: DataPlaneConfig, *, bootstrap: bool = True) -> None:
        """Build the plane's client; see :func:`rlplane.build_data_plane_client`."""
        self.plane = rlplane.build_data_plane_client(cfg, bootstrap=bootstrap)

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        """See :meth:`rlplane.DataPlaneClient.register_partition`."""
        self.plane.register_partition(
            partition_id, fields, num_samples, consumer_tasks, grpo_group_size, enums
        )

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> KVBatchMeta:
        """See :meth:`rlplane.DataPlaneClient.claim_meta`."""
        return _their_meta(
            self.plane.claim_meta(
                partition_id, task_name, required_fields, batch_size, dp_rank, blocking, timeout_s
            )
        )

    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        """See :meth:`rlplane.DataPlaneClient.get_data`."""
        fields = meta.fields if select_fields is None else select_fields
        if fields is None:
            raise ValueError("get_data needs select_fields, or a meta that names its fields")
        return self.get_samples(meta.sample_ids, meta.partition_id, fields)

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        """See :meth:`rlplane.DataPlaneClient.check_consumption_status`."""
        return self.plane.check_consumption_status(partition_id, task_names)

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> KVBatchMeta:
        """See :meth:`rlplane.DataPlaneClient.put_samples`. No samples are nothing to write.

        As with TransferQueue, partitions and fields come into being by writing: NeMo-RL's single controller
        registers none, and the extras of a multimodal batch are not declared.
        """
        if not sample_ids:
            return KVBatchMeta(partition_id=partition_id, task_name=None, sample_ids=[])
        engine = getattr(self.plane, "inner", self.plane)
        if isinstance(engine, PlaneClient):
            names = [] if fields is None else [str(name) for name in fields.keys()]  # noqa: SIM118
            engine._call(PlaneCalls.declare, partition_id, names)
        return _their_meta(self.plane.put_samples(list(sample_ids), partition_id, fields, tags))

    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        """See :meth:`rlplane.DataPlaneClient.get_samples`.

        As NeMo-RL's adapters do, a jagged column whose rows have one length is returned dense.
        """
        if not sample_ids:
            return TensorDict({}, batch_size=[0])
        found = self.plane.get_samples(list(sample_ids), partition_id, list(select_fields))
        for name in select_fields:
            column = found.get(name)
            if isinstance(column, torch.Tensor) and column.is_nested:
                found[name] = _dense_if_even(column)
        return found

    def list_sample_ids(self, partition_id: str) -> list[str]:
        """The samples of a partition, sorted; none if it does not exist."""
        try:
            return sorted(self.plane.list_sample_ids(partition_id))
        except UnknownPartitionError:
            return []

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        """See :meth:`rlplane.DataPlaneClient.clear_samples`. ``None`` clears all that the partition has.

        In a partition that does not exist there is nothing to clear.
        """
        if sample_ids is None:
            sample_ids = self.list_sample_ids(partition_id)
            if not sample_ids:
                warnings.warn(f"nothing to clear in partition {partition_id!r}", RuntimeWarning, stacklevel=2)
        if sample_ids:
            with suppress(UnknownPartitionError):
                self.plane.clear_samples(list(sample_ids), partition_id)

    def save_checkpoint(
        self, checkpoint_dir: str | PathLike[str], *, metadata: dict[str, Any] | None = None
    ) -> None:
        """See :meth:`rlplane.DataPlaneClient.save_checkpoint`."""
        self.plane.save_checkpoint(fspath(checkpoint_dir), metadata=metadata)

    def load_checkpoint(self, checkpoint_dir: str | PathLike[str]) -> dict[str, Any]:
        """See :meth:`rlplane.DataPlaneClient.load_checkpoint`."""
        return self.plane.load_checkpoint(fspath(checkpoint_dir))

    def close(self) -> None:
        """See :meth:`rlplane.DataPlaneClient.close`."""
        self.plane.close()


def _their_meta(meta: rlplane.KVBatchMeta) -> KVBatchMeta:
    return KVBatchMeta(
        partition_id=meta.partition_id,
        task_name=meta.task_name,
        sample_ids=meta.sample_ids,
        fields=meta.fields,
        sequence_lengths=meta.sequence_lengths,
        extra_info=meta.extra_info,
        tags=meta.tags,
    )


def _dense_if_even(column: torch.Tensor) -> torch.Tensor:
    try:
        lengths = row_lengths(column)
    except ValueError:  # rows that differ in more than their first dimension
        return column
    is_even = len(lengths) > 0 and bool((lengths == lengths[0]).all())
    dense: torch.Tensor = materialize({"column": column})["column"] if is_even else column
    return dense
