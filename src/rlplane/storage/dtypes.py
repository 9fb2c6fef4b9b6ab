"""The dtypes that travel, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from rlplane.errors import InvalidRequestError

DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
HOST = torch.device("cpu")  # named everywhere, because a user may have set another default
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_NAMES = {dtype: name for name, dtype in DTYPES.items() if dtype not in _QUANTIZED}
_dtype, _layout = attrgetter("dtype"), attrgetter("layout")


def dtype_name(field: str, value: Tensor) -> str:
    """The name of a tensor's dtype; ``ValueError`` if it is one whose bytes are not all there is to it."""
    known = _NAMES.get(value.dtype)
    if known is None or value.layout is not torch.strided:
        raise InvalidRequestError(
            f"field {field!r} has dtype {value.dtype} and layout {value.layout}; "
            "a field is dense or nested, and not quantized"
        )
    return known


def dtype_names(field: str, values: Sequence[Tensor]) -> list[str]:
    """The same for many tensors."""
    if set(map(_layout, values)) <= {torch.strided}:
        with contextlib.suppress(KeyError):
            return list(map(_NAMES.__getitem__, map(_dtype, values)))
    return [dtype_name(field, value) for value in values]
