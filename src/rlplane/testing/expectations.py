"""What the checks expect, said so that a failure tells what was asked, what came and what should have come.

Plain functions rather than ``assert``: they work under ``python -O`` and outside pytest, and a
``NotImplementedError`` passes through all of them, because that is how an adapter refuses a limitation.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlplane.errors import ClaimTimeoutError
from rlplane.interfaces import KVBatchMeta
from rlplane.testing.plane_under_test import PartitionUnderTest
from rlplane.testing.promises import BrokenPromise

E = TypeVar("E", bound=BaseException)


def expect(condition: object, otherwise: str) -> None:
    """Break the promise with the message ``otherwise`` unless ``condition`` holds."""
    if not condition:
        raise BrokenPromise(otherwise)


def equal(what: str, got: Any, wanted: Any) -> None:
    """``what`` must be ``wanted``."""
    expect(is_same(got, wanted), f"{what}: got {got!r:.400}, and it should be {wanted!r:.400}")


def has_samples(
    what: str, meta: KVBatchMeta, wanted: Iterable[str], tags: list[dict[str, Any]] | None = None
) -> None:
    """The claim ``what`` must have these samples in this order, with these tags if they are given."""
    equal(f"{what} has the samples", meta.sample_ids, list(wanted))
    if tags is not None:
        equal(f"{what} has the tags", meta.tags, tags)


def refuses(
    kind: type[E],
    what: str,
    call: Callable[..., object],
    *args: Any,
    mentions: Sequence[str] = (),
    within_s: float | None = None,
    **kwargs: Any,
) -> E:
    """``call(*args, **kwargs)`` must raise ``kind``, with ``mentions`` in its message, ``within_s``."""
    started = time.monotonic()
    try:
        result = call(*args, **kwargs)
    except kind as exc:
        elapsed = time.monotonic() - started
        if within_s is not None and elapsed > within_s:
            raise BrokenPromise(
                f"{what} raised {kind.__name__} after {elapsed:.2f} s, and it should at once"
            ) from exc
        for word in mentions:
            expect(word in str(exc), f"{what} raised {exc!r}, which should name {word!r}")
        return exc
    except (NotImplementedError, BrokenPromise):
        raise
    except Exception as exc:
        raise BrokenPromise(
            f"{what} raised {type(exc).__name__} ({exc}), and it should raise {kind.__name__}"
        ) from exc
    raise BrokenPromise(f"{what} returned {result!r:.200}, and it should raise {kind.__name__}")


def times_out(what: str, part: PartitionUnderTest, batch_size: int, *, ready: int, **how: Any) -> None:
    """A claim must raise ``ClaimTimeoutError`` at its timeout, and say how many samples were ready."""
    timeout_s = part.plane.short
    # In a thread, so that an adapter that ignores the timeout is told so.
    claim = part.claim_in_thread(batch_size, timeout_s=timeout_s, **how)
    what = f"{what}, with timeout_s={timeout_s:g}"
    error = refuses(ClaimTimeoutError, what, claim.result, what)
    equal(f"the number that was ready for {what}", error.ready, ready)


@contextmanager
def records_warnings() -> Iterator[list[str]]:
    """The messages of the warnings that are given in the block."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
        messages += [str(warning.message) for warning in caught]


# Columns. A row is a tensor, or an object.


def dense(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A dense column."""
    return torch.tensor(rows, dtype=dtype)


def jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """A nested column in the jagged layout."""
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def strided(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """A nested column in the older, strided layout."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that this layout is a prototype
        return torch.nested.nested_tensor(list(rows))


def objects(rows: Sequence[Any]) -> NonTensorStack:
    """A column of objects."""
    return NonTensorStack(*[NonTensorData(row) for row in rows])


def rows_of(column: Any) -> list[Any]:
    """The rows of a column of any kind."""
    if isinstance(column, NonTensorStack):
        return [column[i].data for i in range(len(column))]
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    raise BrokenPromise(f"a column came back as {type(column).__name__}, not as a tensor or a NonTensorStack")


def has_column(what: str, batch: TensorDict, field: str, rows: Sequence[Any], layout: str) -> None:
    """``batch`` must hold ``rows`` in ``field``, as ``"dense"``, ``"jagged"`` or ``"objects"``."""
    what = f"{what}, field {field!r}"
    expect(field in batch.keys(), f"{what} is not there; the fields are {list(batch.keys())}")  # noqa: SIM118
    column = batch.get(field)
    expect(_layout(column) == layout, f"{what} came back {_layout(column)}, and it should be {layout}")
    got = rows_of(column)
    equal(f"{what}: the number of rows", len(got), len(rows))
    for index, (row, wanted) in enumerate(zip(got, rows, strict=True)):
        equal(f"{what}, row {index}", row, wanted)


def has_columns(
    what: str, batch: TensorDict, columns: Mapping[str, Sequence[Any] | torch.Tensor], layout: str
) -> None:
    """``batch`` must hold these rows in each of these fields, all of one layout."""
    for field, rows in columns.items():
        has_column(what, batch, field, list(rows), layout)


def is_same(got: Any, wanted: Any) -> bool:
    """Equality that sees dtypes and shapes, looks into containers, and tells True from 1."""
    if isinstance(wanted, torch.Tensor):
        return (
            isinstance(got, torch.Tensor)
            and (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            and torch.equal(_bits(got), _bits(wanted))
        )
    if isinstance(wanted, np.ndarray):
        return (
            isinstance(got, np.ndarray)
            and (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            and got.tobytes() == wanted.tobytes()
        )
    if isinstance(wanted, np.generic):
        return bool(got == wanted)
    if type(got) is not type(wanted):
        return False
    if isinstance(wanted, (list, tuple)):
        return len(got) == len(wanted) and all(map(is_same, got, wanted))
    if isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(is_same(got[key], wanted[key]) for key in wanted)
    return bool(got == wanted)


def _layout(column: Any) -> str:
    if isinstance(column, NonTensorStack):
        return "objects"
    if not isinstance(column, torch.Tensor):
        return f"as {type(column).__name__}"
    if not column.is_nested:
        return "dense"
    return "jagged" if column.layout is torch.jagged else "nested in the strided layout"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Not every dtype has an equality on the CPU (fp8 has none), and NaN is not equal to itself.
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
