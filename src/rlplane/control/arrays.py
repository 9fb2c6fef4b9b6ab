"""Columns in memory that grow."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

__all__ = ["grown"]


def grown(array: NDArray[Any], size: int, fill: Any) -> NDArray[Any]:
    """The array with ``size`` entries, of which nobody may keep a view: its memory is moved.

    The kernel moves large memory without copying it. A copy of a million objects would take long, above all
    while a child process dumps the state: every object that is referred to once more is a page to copy.
    """
    if not array.flags.owndata:
        array = array.copy()
    filled = len(array)
    array.resize(size, refcheck=False)
    array[filled:] = fill
    return array
