"""Where the tokens of padded rows are: at the front, as in NeMo-RL, unless the caller says otherwise.

Left padding taken for right padding would keep the padding and drop the tokens. Whoever pads on the left says
so, or gives the attention mask, which also says how many tokens there are. Where nobody has said it, whoever
writes a batch checks what would be cut off (:func:`check_cut_off`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rlplane.errors import InvalidRequestError

__all__ = [
    "Lengths",
    "PaddingSide",
    "TokenSpans",
    "check_cut_off",
    "check_width",
    "checked_lengths",
    "token_spans",
]

Lengths = Sequence[int] | Tensor
PaddingSide = Literal["left", "right"]
_IDS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class TokenSpans:
    """How many tokens each row has, and where in a padded row they are."""

    counts: np.ndarray[Any, Any]
    side: PaddingSide = "right"
    starts: np.ndarray[Any, Any] | None = None
    """Where each row's tokens begin, if a mask has said so; then rows are as wide as it was."""
    width: int | None = None

    def begins(self, widths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Where the tokens begin in rows of these widths.

        Raises:
            ValueError: A row is shorter than its tokens, or has another width than the mask.
        """
        short = np.flatnonzero(widths < self.counts)
        if len(short):
            row = int(short[0])
            raise InvalidRequestError(
                f"the length of row {row} is {self.counts[row]}; it must be between 0 and {widths[row]}"
            )
        if self.starts is not None:
            other = np.flatnonzero(widths != self.width)
            if len(other):
                raise InvalidRequestError(
                    f"its rows have {widths[other[0]]} positions and attention_mask has {self.width}; they "
                    "must be equally wide"
                )
            return self.starts
        if self.side == "left":
            begins: np.ndarray[Any, Any] = widths - self.counts
            return begins
        return np.zeros_like(self.counts)


def token_spans(
    lengths: Lengths | None, rows: int, *, padding: PaddingSide | None = None, attention_mask: Any = None
) -> TokenSpans:
    """Check what the caller says about the tokens of ``rows`` rows.

    Args:
        lengths: The number of tokens of each row. None: those of the mask.
        rows: How many rows there are.
        padding: The side of the padding; None is "right".
        attention_mask: 1 where a token is and 0 where padding is, ``[rows, S]``. Each row's tokens are one
            stretch, with padding before it, behind it or both.

    Raises:
        ValueError: They are not of these rows or contradict each other, or a mask's row has a gap.
    """
    if padding not in (None, "left", "right"):
        raise InvalidRequestError(f"padding is 'left' or 'right'; got {padding!r}")
    if attention_mask is None:
        if lengths is None:
            raise InvalidRequestError("give lengths=, the number of tokens of each row, or attention_mask=")
        return TokenSpans(checked_lengths(lengths, rows), padding or "right")
    if padding is not None:
        raise InvalidRequestError(
            "give padding= or attention_mask=, not both: a mask says where the padding is"
        )
    mask = _checked_mask(attention_mask, rows)
    counts = mask.sum(axis=1, dtype=np.int64)
    starts = mask.argmax(axis=1) if mask.shape[1] else np.zeros(rows, np.int64)
    edges = np.diff(mask.astype(np.int8), axis=1, prepend=0)
    gaps = np.flatnonzero((edges == 1).sum(axis=1) > 1)
    if len(gaps):
        raise InvalidRequestError(
            f"row {gaps[0]} of attention_mask has tokens on both sides of a gap; a row's tokens are one "
            "stretch"
        )
    if lengths is not None:
        said = checked_lengths(lengths, rows)
        differing = np.flatnonzero(said != counts)
        if len(differing):
            row = int(differing[0])
            raise InvalidRequestError(
                f"the length of row {row} is {said[row]}, and attention_mask has {counts[row]} tokens there"
            )
    return TokenSpans(counts, "right", starts.astype(np.int64), mask.shape[1])


def check_cut_off(name: str, value: Any, counts: np.ndarray[Any, Any]) -> None:
    """Refuse token ids whose padding, taken to be on the right, is not all the same: it has tokens in it.

    Raises:
        ValueError: Two different values would be cut off.
    """
    cut = _cut_off(value, counts)
    if len(cut) and (cut != cut[0]).any():
        raise InvalidRequestError(
            f"field {name!r} has different values behind the tokens of its rows, such as {cut[0]} and "
            f"{cut[cut != cut[0]][0]}, and padding is all the same: if the rows are padded on the left, say "
            'padding="left" or give attention_mask=; if these shall be cut off, say padding="right"'
        )


def check_width(name: str, value: Any, counts: np.ndarray[Any, Any]) -> None:
    """Refuse a padded column that is narrower than the longest row has tokens.

    Raises:
        ValueError: It is.
    """
    if not isinstance(value, (Tensor, np.ndarray)) or value.ndim < 2 or getattr(value, "is_nested", False):
        return
    try:
        checked_lengths(counts, len(counts), value.shape[1])
    except InvalidRequestError as error:
        raise InvalidRequestError(f"field {name!r}: {error}") from error


def _cut_off(value: Any, counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What is behind the tokens of all rows of ids; nothing if it is no such column."""
    if isinstance(value, (list, tuple)):
        rows = [_as_ids(row) for row in value]
        ends = [
            row[n:] for row, n in zip(rows, counts.tolist(), strict=False) if row is not None and row.ndim
        ]
        return np.concatenate(ends) if ends else np.zeros(0)
    ids = _as_ids(value)
    if ids is None or ids.ndim != 2 or len(ids) != len(counts):
        return np.zeros(0)
    cut: np.ndarray[Any, Any] = ids[np.arange(ids.shape[1]) >= counts[:, None]]
    return cut


def _as_ids(value: Any) -> np.ndarray[Any, Any] | None:
    if isinstance(value, Tensor):
        if value.is_nested or value.dtype not in _IDS:
            return None
        value = value.detach().cpu().numpy()
    elif isinstance(value, (list, tuple)):
        value = np.asarray(value)
    is_ids = isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.dtype.itemsize >= 4
    return value if is_ids else None


def checked_lengths(lengths: Any, rows: int, width: int | None = None) -> np.ndarray[Any, Any]:
    """The lengths as int64: one per row, at least 0 and, if a width is given, at most that."""
    raw = lengths.detach().cpu().numpy() if isinstance(lengths, Tensor) else np.asarray(lengths)
    if raw.ndim != 1 or len(raw) != rows or (raw.dtype.kind not in "iu" and len(raw)):
        raise InvalidRequestError(
            f"lengths shape {raw.shape} of {raw.dtype} does not fit {rows} rows: one whole number per row"
        )
    counts: np.ndarray[Any, Any] = raw.astype(np.int64)
    bad = np.flatnonzero((counts < 0) | (counts > (counts if width is None else width)))
    if len(bad):
        limit = "at least 0" if width is None else f"between 0 and {width}"
        raise InvalidRequestError(f"the length of row {bad[0]} is {counts[bad[0]]}; it must be {limit}")
    return counts


def _checked_mask(given: Any, rows: int) -> np.ndarray[Any, Any]:
    raw = given.detach().cpu().float().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if raw.ndim != 2 or raw.shape[0] != rows:
        raise InvalidRequestError(
            f"attention_mask has the shape [N, S] for {rows} rows; got {tuple(raw.shape)}"
        )
    mask: np.ndarray[Any, Any] = raw == 1
    if not (mask | (raw == 0)).all():
        raise InvalidRequestError("attention_mask is 1 where a token is and 0 elsewhere; it has other values")
    return mask
