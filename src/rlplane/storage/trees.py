"""Rows that are trees: objects with tensors and large arrays in them, at any depth and of any shape.

A block of trees begins with the bytes of its tensors, and behind them has the *structure* of each row: the
object as msgpack, with a *reference* (dtype, shape, where, how many bytes) where a tensor or an array was. So
the tensors travel as the bytes that they are, and each row is read by itself. A tensor that several rows of
a put hold is there once, and all of them refer to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, repeat
from operator import attrgetter
from typing import Any, NoReturn, TypeAlias

import msgspec
import numpy as np
import torch
from msgspec.msgpack import Encoder, Ext
from numpy.typing import NDArray
from torch import Tensor

from rlplane.errors import DataPlaneError, InvalidRequestError, MissingDataError, UnsupportedValueError
from rlplane.storage.dtypes import DTYPES, HOST, dtype_names
from rlplane.storage.objects import open_ext
from rlplane.storage.places import ALIGN
from rlplane.storage.rows import PIECE

# Smaller arrays are not worth a reference.
_WORTH_BULK = 4096
_TENSOR, _ARRAY = 3, 4
_encoder = Encoder()
_references = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], int, int])

_is_cpu, _is_nested = attrgetter("is_cpu"), attrgetter("is_nested")
_nbytes, _shape = attrgetter("nbytes"), attrgetter("shape")

Part: TypeAlias = tuple[int, int, int, Tensor]
"""A tensor on its way into a block: to which byte of it, how many bytes, its address, and the tensor itself.
At the address 0 is one that torch has to copy, because its bytes do not lie in memory as they are stored."""

Pieces = NDArray[Any]
Own = Callable[[int, int, torch.dtype, tuple[int, ...]], Tensor]


class Bulk:
    """The tensors and arrays of one column, while its rows are encoded.

    A batch has thousands of tensors, and asking torch about them is most of what encoding takes. So they are
    all kept first, and then each question is asked about all of them, which is a third faster than asking all
    questions about each.
    """

    def __init__(self, field: str) -> None:
        self._field = field
        self._tensors: dict[int, Tensor] = {}  # by id, which is theirs as long as they are here
        self._arrays: dict[tuple[Any, ...], tuple[Any, Ext]] = {}
        self.parts: list[Part] = []
        self.nbytes = 0

    @property
    def used(self) -> bool:
        """Whether there are any."""
        return bool(self._tensors or self._arrays)

    def keep(self, value: Any) -> Any:
        """What stands for a tensor or a large array in its row until that is encoded; None for anything
        else."""
        if type(value) is Tensor:
            self._tensors[id(value)] = value
            return value
        if type(value) is np.ndarray:
            return self._array(value) if value.nbytes >= _WORTH_BULK else None
        if not isinstance(value, Tensor):
            return None
        if value.is_nested:
            self._raise_nested()
        _check_memory(value, self._field)
        # As a plain one, because msgspec would take a subclass that is a dataclass for a dict.
        plain = value.as_subclass(Tensor)
        self._tensors[id(plain)] = plain
        return plain

    def encoder(self) -> Encoder:
        """Encodes rows whose tensors were all kept, with references in their stead."""
        references = self._references(list(self._tensors.values()))
        return Encoder(enc_hook=lambda value: references[id(value)])

    def _references(self, tensors: list[Tensor]) -> dict[int, Ext]:
        if any(map(_is_nested, tensors)):
            self._raise_nested()
        names = dtype_names(self._field, tensors)
        addresses, sizes = list(map(Tensor.data_ptr, tensors)), list(map(_nbytes, tensors))
        if 0 in addresses:
            for tensor in tensors:
                _check_memory(tensor, self._field)
        if len(set(addresses)) < len(addresses):
            # Of tensors that are one, the first is stored.
            firsts: dict[tuple[Any, ...], Tensor] = {}
            alike = [firsts.setdefault(_identity(tensor), tensor) for tensor in tensors]
            if len(firsts) < len(tensors):
                known = self._references(list(firsts.values()))
                return {id(tensor): known[id(first)] for tensor, first in zip(tensors, alike, strict=True)}
        hosts = tensors
        if not all(map(_is_cpu, tensors)):
            hosts = [tensor.detach().cpu() for tensor in tensors]
            addresses = list(map(Tensor.data_ptr, hosts))
        if not _are_plain(hosts):
            addresses = [address_of(host, self._field) for host in hosts]
        *begins, self.nbytes = accumulate([-(-size // ALIGN) * ALIGN for size in sizes], initial=self.nbytes)
        self.parts += [part for part in zip(begins, sizes, addresses, hosts, strict=True) if part[1]]
        references = zip(names, map(_shape, tensors), begins, sizes, strict=True)
        found = map(Ext, repeat(_TENSOR), map(_encoder.encode, references))
        return dict(zip(map(id, tensors), found, strict=True))

    def _raise_nested(self) -> NoReturn:
        raise UnsupportedValueError(
            f"field {self._field!r} holds a nested tensor inside a row; give a list of tensors"
        )

    def _array(self, value: NDArray[Any]) -> Ext:
        same = (value.ctypes.data, value.dtype.str, value.shape, value.strides)
        known = self._arrays.get(same)
        if known is None:
            # As bytes, which torch can have for every dtype and every byte order.
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            raw = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
            at, nbytes = self.nbytes, raw.nbytes
            self.parts.append((at, nbytes, raw.data_ptr(), raw))
            self.nbytes += -(-nbytes // ALIGN) * ALIGN
            reference = _encoder.encode((value.dtype.str, value.shape, at, nbytes))
            # The array itself, too: while it lives, its address is its own.
            known = self._arrays[same] = value, Ext(_ARRAY, reference)
        return known[1]


def address_of(value: Tensor, field: str) -> int:
    """Where the bytes of a tensor of ``field`` lie one behind the other, or 0 if they do not."""
    if not value.is_contiguous() or value.is_conj() or value.is_neg():
        return 0
    address = value.data_ptr()
    if not address:
        _check_memory(value, field)
    return address


def _are_plain(values: Sequence[Tensor]) -> bool:
    """Whether the bytes of all of them lie in memory as they are stored."""
    return (
        all(map(Tensor.is_contiguous, values))
        and not any(map(Tensor.is_conj, values))
        and not any(map(Tensor.is_neg, values))
    )


def _check_memory(value: Tensor, field: str) -> None:
    if not value.data_ptr() and value.nbytes:
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
    return [(at, at + size) for _, at, size in _walk(_lazily.decode(structure)) if size]


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
        for path, at, size in _walk(tree):
            if size:
                leaf = leaves.setdefault(path, len(leaves))
                found.append((row, leaf, at, at + size))
    return list(leaves), np.array(found, PIECE)


_lazily = msgspec.msgpack.Decoder()  # leaves what stands for a value as it is


def _walk(tree: Any, path: str | None = None) -> Iterator[tuple[str, int, int]]:
    """The paths of all tensors and arrays, where they begin, and how many bytes they have."""
    if type(tree) is Ext:
        if tree.code in (_TENSOR, _ARRAY):
            _, _, at, size = _references.decode(tree.data)
            yield path or "", at, size
    elif type(tree) is dict or type(tree) is list:
        for key, item in tree.items() if type(tree) is dict else enumerate(tree):
            yield from _walk(item, str(key) if path is None else f"{path}.{key}")


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
        head, dot, rest = path.partition(".")
        # As it is counted, and not "00": in a storage of chunks, only those were fetched that a path names.
        place = int(head) if head.isdecimal() else -1
        if str(place) != head or place >= len(tree):
            return _NOTHING
        return _descend(tree[place], rest) if dot else tree[place]
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
