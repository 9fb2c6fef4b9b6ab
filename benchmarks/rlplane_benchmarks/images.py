"""Rows that are trees: the images of a Qwen2-VL batch, which differ in size from row to row.

Each row has the image's patches and its grid, as the model's processor makes them. Every tensor has memory of
its own, because a store that pickles would otherwise send all of them with each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from rlplane_benchmarks.plan import Workload

if TYPE_CHECKING:
    from rlplane_benchmarks.batches import Columns

__all__ = ["ImageBatch", "tensors_of"]

_FIELD = "multi_modal_inputs"
_STAMPS = 120  # fits bfloat16
_PATCH = 1176  # numbers of a patch: 14 × 14 pixels, 3 colours, 2 frames


class ImageBatch:
    """Rows with an image each. With ``shared_by`` rows of a prompt, they hold the same tensors."""

    lengths = None

    def __init__(self, workload: Workload) -> None:
        self.name, self.rows, self.fields = workload.name, workload.rows, [_FIELD]
        source = torch.Generator().manual_seed(workload.nbytes)
        side = (workload.nbytes / workload.rows / _PATCH / torch.bfloat16.itemsize) ** 0.5
        self._images = [_image(side, source) for _ in range(workload.rows // workload.shared_by)]
        self._trees = [self._images[row // workload.shared_by] for row in range(workload.rows)]

    @property
    def nbytes(self) -> int:
        """The bytes of all rows, as if they shared nothing."""
        return sum(tensor.nbytes for tree in self._trees for tensor in _tensors(tree))

    def ids(self, number: int) -> list[str]:
        """The samples' ids in a round."""
        return [f"{self.name}.{number}.{row}" for row in range(self.rows)]

    def stamp(self, number: int) -> None:
        """Write the round's number into the first element of every image."""
        for image in self._images:
            image["pixel_values"][0, 0] = number % _STAMPS

    def tensordict(self) -> TensorDict:
        """The batch as rlplane and TransferQueue take it."""
        rows = [NonTensorData(tree, batch_size=[]) for tree in self._trees]
        return TensorDict({_FIELD: NonTensorStack(*rows)}, batch_size=[self.rows])

    def difference(self, got: Columns, order: Sequence[int] | None) -> str | None:
        """What is wrong with ``got`` as the rows in ``order``, or None if every byte is right."""
        if list(got) != self.fields:
            return f"fields {sorted(got)} instead of {self.fields}"
        rows = range(self.rows) if order is None else order
        wanted = [tensor for row in rows for tensor in _tensors(self._trees[row])]
        actual = list(got[_FIELD][0])
        if len(actual) != len(wanted):
            return f"field {_FIELD!r} has {len(actual)} tensors instead of {len(wanted)}"
        for mine, theirs in zip(wanted, actual, strict=True):
            if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
                return f"field {_FIELD!r} came back with tensors of another dtype or shape"
            # With numpy, like ``touch``: on busy cores, a thousand waits for torch's threads take minutes.
            if not np.array_equal(mine.view(torch.uint8).numpy(), theirs.view(torch.uint8).numpy()):
                return f"field {_FIELD!r} came back with other bytes than were written"
        return None


def tensors_of(column: Any) -> list[Tensor]:
    """The tensors of all rows of a column of trees, row by row."""
    return [tensor for tree in column.tolist() for tensor in _tensors(tree)]


def _image(side: float, source: torch.Generator) -> dict[str, Any]:
    # Even numbers of patches, half to one and a half times the mean side of the batch.
    height, width = (
        max(2 * round(side * (0.5 + share) / 2), 2) for share in torch.rand(2, generator=source).tolist()
    )
    pixels = torch.rand(height * width, _PATCH, generator=source).to(torch.bfloat16)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]]), "video": None}


def _tensors(tree: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return tree["pixel_values"], tree["image_grid_thw"]
