"""Rows that are trees: objects with tensors and large arrays in them, at any depth and of any shape.

A block of trees begins with the bytes of its tensors, and behind them has the *structure* of each row: the
object as msgpack, with a *reference* (dtype, shape, where, how many bytes) where a tensor or an array was. So
the tensors travel as the bytes that they are, and each row is read by itself. A tensor that several rows of
a put hold is there once, and all of them refer to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

import msgspec
import numpy as np
import torch
from msgspec.msgpack import Ext
from numpy.typing import NDArray
from torch import Tensor

from rlplane.errors import DataPlaneError, InvalidRequestError, MissingDataError, UnsupportedValueError
from rlplane.storage.dtypes import DTYPES, HOST, dtype_name
from rlplane.storage.objects import open_ext
from rlplane.storage.places import ALIGN
from rlplane.storage.rows import PIECE

__all__ = ["Bulk", "Own", "Part", "Pieces", "TreeReader", "address_of", "pieces_of", "references_in"]

# Smaller arrays are not worth a reference.
_WORTH_BULK = 4096
_TENSOR, _ARRAY = 3, 4
_encoder = msgspec.msgpack.Encoder()
_references = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], int, int])

Part: TypeAlias = tuple[int, int, int, Tensor]
"""A tensor on its way into a block: to which byte of it, how many bytes, its address, and the tensor itself.
At the address 0 is one that torch has to copy, because its bytes do not lie in memory as they are stored."""

Pieces = NDArray[Any]
Own = Callable[[int, int, torch.dtype, tuple[int, ...]], Tensor]


class Bulk:
    """The tensors and arrays of one column, while its rows are encoded."""

    def __init__(self, field: str) -> None:
        self._field = field
        # The first tensor at an address, others at the same one by all that tells them apart, and arrays.
        self._known: dict[Any, tuple[Any, Ext]] = {}
        self.parts: list[Part] = []
        self.nbytes = 0
        self.used = False

    def reference(self, value: Any) -> Ext | None:
        """What stands for a tensor or a large array in the structure of its row; None for anything else."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) is np.ndarray and value.nbytes >= _WORTH_BULK:
            return self._array(value)
        return None

    def _tensor(self, value: Tensor) -> Ext:
        # A batch has thousands of these: every question to torch, and every call, is a measurable part of it.
        if value.is_nested:
            raise UnsupportedValueError(
                f"field {self._field!r} holds a nested tensor inside a row; give a list of tensors"
            )
        name = dtype_name(self._field, value)
        address, nbytes = value.data_ptr(), value.nbytes
        if not address and nbytes:
            _raise_without_memory(value, self._field)
        # The rows hold the values while they are encoded, so an address stands for one storage only.
        key: Any = address
        known = self._known.get(key)
        if known is not None:
            if known[0] is value:
                return known[1]
            key = _identity(value)
            if _identity(known[0]) == key:
                return known[1]
            known = self._known.get(key)
            if known is not None:
                return known[1]
        plain = value
        if not value.is_cpu:
            plain = value.detach().cpu()
            address = plain.data_ptr()
        found = self._add(_TENSOR, name, tuple(value.shape), plain, address, nbytes)
        if nbytes:
            self._known[key] = value, found
        return found

    def _array(self, value: NDArray[Any]) -> Ext:
        same = (value.ctypes.data, value.dtype.str, value.shape, value.strides)
        known = self._known.get(same)
        if known is None:
            # As bytes, which torch can have for every dtype and every byte order.
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            raw = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
            known = self._known[same] = (
                value,
                self._add(_ARRAY, value.dtype.str, value.shape, raw, raw.data_ptr(), raw.nbytes),
            )
        return known[1]

    def _add(
        self, code: int, dtype: str, shape: tuple[int, ...], value: Tensor, address: int, nbytes: int
    ) -> Ext:
        self.used = True
        at = self.nbytes
        if nbytes:
            self.parts.append((at, nbytes, address if _is_plain(value) else 0, value))
            self.nbytes = -(-(at + nbytes) // ALIGN) * ALIGN
        return Ext(code, _encoder.encode((dtype, shape, at, nbytes)))


def address_of(value: Tensor, field: str) -> int:
    """Where the bytes of a tensor of ``field`` lie one behind the other, or 0 if they do not."""
    if not _is_plain(value):
        return 0
    address = value.data_ptr()
    if not address and value.nbytes:
        _raise_without_memory(value, field)
    return address


def _is_plain(value: Tensor) -> bool:
    return value.is_contiguous() and not value.is_conj() and not value.is_neg()


def _raise_without_memory(value: Tensor, field: str) -> NoReturn:
    raise InvalidRequestError(
        f"field {field!r} has a {type(value).__name__} without memory of its own; give a plain tensor"
    )


def _identity(value: Tensor) -> tuple[Any, ...]:
    """What tensors have in common that are one."""
    return (
        value.device,
        value.data_ptr(),
        value.dtype,
        value.shape,
        value.stride(),
        value.is_conj(),
        value.is_neg(),
    )


class TreeReader:
    """Reads rows of a block of trees, or one leaf of each.

    Args:
        name: The field, for messages.
        structures: The bytes of the block.
        offsets: Where the structures of the rows begin, and where the last one ends.
        own: Gives bytes of the block as a tensor that belongs to the reader.
        allow_pickle: Whether objects may be unpickled.
        path: Which leaf is read, as keys and positions joined by dots. Empty: all of the row.
    """

    def __init__(
        self,
        name: str,
        structures: memoryview,
        offsets: Sequence[int],
        own: Own,
        *,
        allow_pickle: bool,
        path: str = "",
    ) -> None:
        self._data, self._offsets, self._path = structures, offsets, path
        self._opener = opener = _Opener(name, offsets[0], own, allow_pickle)
        # The opener does not know the decoder: in a cycle, what was read would outlive its reader until the
        # garbage collector came by.
        self._decoder = msgspec.msgpack.Decoder(ext_hook=opener.reference if path else opener.open)

    def __call__(self, position: int) -> Any:
        begin, end = self._offsets[position], self._offsets[position + 1]
        if not self._offsets[0] <= begin <= end <= len(self._data):
            self._opener.raise_torn()
        tree = self._decoder.decode(self._data[begin:end])
        if not self._path:
            return tree
        return self._opener.resolved(_leaf_of(tree, self._path, self._opener.name))


class _Opener:
    """Makes values of references. A read has thousands of them, and every call is a measurable part of it."""

    def __init__(self, name: str, bulk_end: int, own: Own, allow_pickle: bool) -> None:
        self.name = name
        self._bulk_end, self._own, self._allow_pickle = bulk_end, own, allow_pickle
        self._read: dict[bytes, Any] = {}

    def reference(self, code: int, data: memoryview) -> Any:
        """What stands in a structure, with tensors and arrays unread."""
        if code in (_TENSOR, _ARRAY):
            return Ext(code, bytes(data))
        return open_ext(code, data, allow_pickle=self._allow_pickle)

    def open(self, code: int, data: memoryview | bytes) -> Any:
        """What stands in a structure, read."""
        if code not in (_TENSOR, _ARRAY):
            return open_ext(code, memoryview(data), allow_pickle=self._allow_pickle)
        # Rows that share a tensor get the same one again, as they had it when they were written.
        key = bytes(data)
        found = self._read.get(key)
        if found is None:
            found = self._read[key] = self._fresh(code, key)
        return found

    def resolved(self, tree: Any) -> Any:
        """A tree with its references read."""
        if type(tree) is Ext:
            return self.open(tree.code, bytes(tree.data))
        if type(tree) is dict:
            return {key: self.resolved(item) for key, item in tree.items()}
        return [self.resolved(item) for item in tree] if type(tree) is list else tree

    def _fresh(self, code: int, reference: bytes) -> Any:
        dtype, shape, at, size = _references.decode(reference)
        if not 0 <= at <= at + size <= self._bulk_end:
            self.raise_torn()
        if code == _ARRAY:
            raw = self._own(at, at + size, torch.uint8, (size,)).numpy()
            return raw.view(np.dtype(dtype)).reshape(shape)
        known = DTYPES[dtype]
        if known.itemsize * math.prod(shape) != size:
            self.raise_torn()
        return (
            self._own(at, at + size, known, shape) if size else torch.empty(shape, dtype=known, device=HOST)
        )

    def raise_torn(self) -> NoReturn:
        """Refuse to read on, which would read other memory."""
        # A put checks them, so somebody has written over them since.
        raise DataPlaneError(f"the rows of field {self.name!r} are damaged: they refer to other memory")


def references_in(structure: memoryview) -> list[tuple[int, int]]:
    """Where the bytes begin and end that one row refers to."""
    return [(at, at + size) for _, at, size in _walk(_lazily.decode(structure), "") if size]


def pieces_of(structures: memoryview, offsets: Sequence[int], *, begin: int = 0) -> tuple[list[str], Pieces]:
    """The paths of all leaves that are tensors, and which bytes each row refers to for which of them.

    For storages in which nobody can look into a row before fetching it.

    Args:
        structures: The bytes of the block, from byte ``begin`` on.
        offsets: Where the structures of the rows begin, and where the last one ends, in the block.
        begin: Where ``structures`` begins.
    """
    leaves: dict[str, int] = {}
    found: list[tuple[int, int, int, int]] = []
    for row in range(len(offsets) - 1):
        tree = _lazily.decode(structures[offsets[row] - begin : offsets[row + 1] - begin])
        for path, at, size in _walk(tree, ""):
            if size:
                leaf = leaves.setdefault(path, len(leaves))
                found.append((row, leaf, at, at + size))
    return list(leaves), np.array(found, PIECE)


_lazily = msgspec.msgpack.Decoder()  # leaves what stands for a value as it is


def _walk(tree: Any, path: str) -> Iterator[tuple[str, int, int]]:
    """The paths of all tensors and arrays, where they begin, and how many bytes they have."""
    if type(tree) is Ext:
        if tree.code in (_TENSOR, _ARRAY):
            _, _, at, size = _references.decode(tree.data)
            yield path, at, size
    elif type(tree) is dict or type(tree) is list:
        for key, item in tree.items() if type(tree) is dict else enumerate(tree):
            yield from _walk(item, f"{path}.{key}" if path else str(key))


def _leaf_of(tree: Any, path: str, name: str) -> Any:
    found = _descend(tree, path)
    if found is _NOTHING:
        held = sorted(tree) if type(tree) is dict else f"a {type(tree).__name__}"
        raise MissingDataError(f"field {name!r}: a row has nothing at {path!r}; it has {held}")
    return found


_NOTHING = object()


def _descend(tree: Any, path: str) -> Any:
    """What is at ``path``. A key may itself have dots in it."""
    if type(tree) is list:
        head, _, rest = path.partition(".")
        if not head.isdecimal() or int(head) >= len(tree):
            return _NOTHING
        return _descend(tree[int(head)], rest) if rest else tree[int(head)]
    if type(tree) is not dict:
        return _NOTHING
    if path in tree:
        return tree[path]
    for at, letter in enumerate(path):
        if letter == "." and path[:at] in tree:
            found = _descend(tree[path[:at]], path[at + 1 :])
            if found is not _NOTHING:
                return found
    return _NOTHING
