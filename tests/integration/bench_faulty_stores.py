"""Stores with a fault that the bench has to notice: wrong bytes, an older batch, a process that ends."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from rlplane_benchmarks.batches import Batch, Columns
from rlplane_benchmarks.participants.memory_copy import CopyStore
from rlplane_benchmarks.participants.transfer_queue import KeyValueStore


class WrongByte(CopyStore):
    """Changes one bit of the last field."""

    def get(self, batch: Batch, ids: list[str], order: Sequence[int] | None, references: Any) -> Columns:
        columns = super().get(batch, ids, order, references)
        value = columns[batch.fields[-1]][0]
        assert isinstance(value, torch.Tensor)
        value.reshape(-1).view(torch.uint8)[-1] ^= 1
        return columns


class OldBatch(CopyStore):
    """Forgets to write after its first put of each batch."""

    def put(self, name: str, ids: list[str], prepared: Batch) -> None:
        if name not in self.__dict__:
            self.__dict__[name] = True
            super().put(name, ids, prepared)


class Dies(CopyStore):
    """Ends without a word."""

    def put(self, name: str, ids: list[str], prepared: Batch) -> None:
        os._exit(7)


class WrongRows(KeyValueStore):
    """Plain TransferQueue whose reader changes a number in the last row that it claimed."""

    def read_tiny(self, partition: str, claimed: Any) -> torch.Tensor:
        rows = super().read_tiny(partition, claimed).clone()
        rows[-1, -1] += 1
        return rows


class RowsOfAnotherCycle(KeyValueStore):
    """Plain TransferQueue whose reader gets sound rows, but of other numbers than were written."""

    def read_tiny(self, partition: str, claimed: Any) -> torch.Tensor:
        return super().read_tiny(partition, claimed) + 1
