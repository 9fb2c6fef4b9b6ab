"""Contestants that are there to be caught: one returns wrong bytes, one an older batch, one dies."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from rlplane.bench.batches import Batch, Columns
from rlplane.bench.contestants.copying import CopyStore


class WrongByte(CopyStore):
    """Changes one bit of the last field."""

    def get(self, batch: Batch, ids: list[str], order: Sequence[int] | None, receipt: Any) -> Columns:
        columns = super().get(batch, ids, order, receipt)
        value = columns[batch.fields[-1]][0]
        assert isinstance(value, torch.Tensor)
        value.reshape(-1).view(torch.uint8)[-1] ^= 1
        return columns


class OldBatch(CopyStore):
    """Forgets to write after its first put of each batch."""

    def put(self, name: str, ids: list[str], form: Batch) -> None:
        if name not in self.__dict__:
            self.__dict__[name] = True
            super().put(name, ids, form)


class Dies(CopyStore):
    """Ends without a word."""

    def put(self, name: str, ids: list[str], form: Batch) -> None:
        os._exit(7)
