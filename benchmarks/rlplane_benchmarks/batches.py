"""The bytes that are written and read. Every process makes the same batch from its description, so that a
reader can check what it got. Each round writes its number into every row, so that old bytes are noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from rlplane_benchmarks.images import ImageBatch
from rlplane_benchmarks.plan import Workload

__all__ = [
    "BYTES_PER_TOKEN",
    "GRPO_FIELDS",
    "Batch",
    "Columns",
    "Words",
    "grpo_batch",
    "make_batches",
    "scattered_order",
    "touch",
    "words_of",
]

Columns: TypeAlias = dict[str, tuple[Tensor | list[Tensor], Sequence[int] | None]]
"""What a reader got: by field, its values (one tensor, or one per row) and, if ragged, the rows' lengths."""

Words: TypeAlias = NDArray[np.int64] | NDArray[np.uint8]

# What GRPO stores for a token: 25 bytes in six columns.
GRPO_FIELDS = {
    "input_ids": torch.int64,
    "generation_logprobs": torch.float32,
    "prev_logprobs": torch.float32,
    "reference_logprobs": torch.float32,
    "advantages": torch.float32,
    "token_mask": torch.int8,
}
BYTES_PER_TOKEN = sum(dtype.itemsize for dtype in GRPO_FIELDS.values())
_STAMPS = 120  # fits int8


class Batch:
    """Rows of named columns. ``values[name]`` is flat if the batch is ragged, else rows come first."""

    def __init__(self, name: str, values: dict[str, Tensor], lengths: Tensor | None, rows: int) -> None:
        self.name = name
        self.values = values
        self.rows = rows
        self.lengths: list[int] | None = None
        self.offsets: Tensor | None = None
        if lengths is not None:
            self.lengths = lengths.tolist()
            self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

    @property
    def nbytes(self) -> int:
        return sum(value.numel() * value.itemsize for value in self.values.values())

    @property
    def fields(self) -> list[str]:
        return list(self.values)

    def ids(self, number: int) -> list[str]:
        """The samples' ids in a round: new ones each time, as in a training job."""
        return [f"{self.name}.{number}.{row}" for row in range(self.rows)]

    def stamp(self, number: int) -> None:
        """Write the round's number into the first element of every row and field."""
        for value in self.values.values():
            if self.offsets is None:
                value[:, 0] = number % _STAMPS
            else:
                value[self.offsets[:-1]] = torch.tensor(number % _STAMPS, dtype=value.dtype)

    def tensordict(self) -> TensorDict:
        """The batch as rlplane and TransferQueue take it."""
        if self.offsets is None:
            return TensorDict(dict(self.values), batch_size=[self.rows])
        columns: dict[str, Any] = {
            name: torch.nested.nested_tensor_from_jagged(value, self.offsets)
            for name, value in self.values.items()
        }
        return TensorDict(columns, batch_size=[self.rows])

    def split(self, name: str) -> Sequence[Tensor]:
        """A column as its rows, which are views."""
        value = self.values[name]
        return value.unbind() if self.lengths is None else torch.split(value, self.lengths)

    def difference(self, got: Columns, order: Sequence[int] | None) -> str | None:
        """What is wrong with ``got`` as the rows in ``order``, or None if every byte is right."""
        if sorted(got) != sorted(self.fields):
            return f"fields {sorted(got)} instead of {sorted(self.fields)}"
        rows = range(self.rows) if order is None else order
        for name, (value, lengths) in got.items():
            wanted = self.values[name]
            if order is not None:
                pieces = self.split(name)
                wanted = torch.cat([pieces[row].reshape(-1) for row in order])
            if self.lengths is not None and lengths is not None:
                expected = [self.lengths[row] for row in rows]
                if list(lengths) != expected:
                    return f"field {name!r} has rows of other lengths than were written"
            actual = torch.cat([v.reshape(-1) for v in value]) if isinstance(value, list) else value
            if actual.dtype != wanted.dtype:
                return f"field {name!r} came back as {actual.dtype} instead of {wanted.dtype}"
            if actual.numel() != wanted.numel():
                return f"field {name!r} has {actual.numel()} elements instead of {wanted.numel()}"
            if not torch.equal(actual.reshape(-1), wanted.reshape(-1)):
                return f"field {name!r} came back with other bytes than were written"
        return None


def make_batches(workloads: Sequence[Workload]) -> dict[str, Batch | ImageBatch]:
    """The batches of a group. Wide ones are views of one buffer, to save memory.

    A stamp of one is therefore seen in the others: writers and readers have to stamp in the same order.
    """
    batches: dict[str, Batch | ImageBatch] = {}
    dense = [workload for workload in workloads if not workload.ragged and not workload.is_trees]
    buffer = torch.arange(max((workload.nbytes // 4 for workload in dense), default=0), dtype=torch.int32)
    for workload in workloads:
        if workload.is_trees:
            batches[workload.name] = ImageBatch(workload)
        elif workload.ragged:
            batches[workload.name] = grpo_batch(workload)
        else:
            width = workload.nbytes // (4 * workload.rows * workload.fields)
            count = width * workload.rows * workload.fields
            parts = buffer[:count].view(workload.fields, workload.rows, width).unbind()
            values = {f"field_{number}": part for number, part in enumerate(parts)}
            batches[workload.name] = Batch(workload.name, values, None, workload.rows)
    return batches


def grpo_batch(workload: Workload) -> Batch:
    """Ragged rows of what GRPO stores for a token."""
    source = torch.Generator().manual_seed(workload.nbytes)
    mean = max(workload.nbytes // (workload.rows * BYTES_PER_TOKEN), 2)
    lengths = torch.randint(mean // 2, mean + mean // 2 + 1, (workload.rows,), generator=source)
    lengths.clamp_(min=1)
    # The last row makes up the difference, so that a batch of "13 MB" has just that.
    lengths[-1] = max(workload.nbytes // BYTES_PER_TOKEN - int(lengths[:-1].sum()), 1)
    tokens = int(lengths.sum())
    values = {}
    for name, dtype in GRPO_FIELDS.items():
        if dtype.is_floating_point:
            values[name] = torch.rand(tokens, generator=source).to(dtype)
        else:
            top = 2 if dtype is torch.int8 else 150_000
            values[name] = torch.randint(0, top, (tokens,), generator=source, dtype=dtype)
    return Batch(workload.name, values, lengths, workload.rows)


def scattered_order(rows: int, number: int) -> list[int]:
    """All rows in a random order, which is the same in every process."""
    order: list[int] = torch.randperm(rows, generator=torch.Generator().manual_seed(number)).tolist()
    return order


def words_of(columns: Columns) -> list[Words]:
    """What :func:`touch` reads, without reading it: a tensor costs as much to look into as some kilobytes to
    read, which is the bench's own time and not that of whoever handed it out."""
    found: list[Words] = []
    for value, _ in columns.values():
        # Rows may share a tensor.
        for part in {id(part): part for part in value}.values() if isinstance(value, list) else (value,):
            if not part.is_contiguous():
                raise ValueError("a column is contiguous, or a part of reading it would not be measured")
            flat = part.detach().view(-1).view(torch.uint8).numpy()
            whole = len(flat) // 8 * 8 if part.data_ptr() % 8 == 0 else 0
            found += [piece for piece in (flat[:whole].view(np.int64), flat[whole:]) if len(piece)]
    return found


def touch(words: Sequence[Words]) -> int:
    """Read every byte, as a user of the batch does: a get without a copy has its page faults here."""
    # With numpy: torch would wake its threads for every tensor, and a column of images has a thousand.
    return sum([int(np.add.reduce(piece)) for piece in words])
