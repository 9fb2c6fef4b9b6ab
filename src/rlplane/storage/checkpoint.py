"""A checkpoint of a plane: one safetensors file in a directory, written atomically and checked when it is
read.

Every block is in it under ``partition/field/number``, with its real dtype and shape, so that any safetensors
reader can look at the columns. The control state is one more tensor, of msgpack bytes. The header's metadata
has the schema version, what the user saved along, and a digest over everything, so that a torn or altered
file is refused. The format is written here and not by the library, because a plane may be larger than the
memory that a copy needs: blocks go from storage to the file one by one. It is the same on every engine.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import torch
from torch import Tensor

from rlplane.atomic_file import write_atomically
from rlplane.control.dump import SCHEMA_VERSION, block_names
from rlplane.errors import CheckpointError
from rlplane.storage.dtypes import DTYPES
from rlplane.storage.places import Layout

FILE_NAME = "plane.safetensors"
_FORMAT = "rlplane"
_NO_DIGEST = "0" * 64
_CONTROL = "__control__"
_SAFETENSORS_NAMES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint64": "U64",
    "torch.uint32": "U32",
    "torch.uint16": "U16",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}


class Checkpoint:
    """A checked file: the control state, and the blocks, which are read when asked for."""

    def __init__(
        self,
        state: bytes,
        layouts: dict[int, Layout],
        metadata: dict[str, Any],
        data: memoryview,
        at: dict[str, tuple[int, int]],
    ) -> None:
        self.state, self.layouts, self.metadata = state, layouts, metadata
        self._data, self._at = data, at
        for number in layouts:
            self._check(number)

    def read(self, number: int) -> tuple[Tensor, Tensor | None]:
        """The values of a block as bytes, and its offsets if it has any."""
        values = torch.from_numpy(self._bytes(f"{number}.values").copy())
        if not self.layouts[number].has_offsets:
            return values, None
        return values, torch.from_numpy(self._bytes(f"{number}.offsets").view(np.int64).copy())

    def _bytes(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        begin, end = self._at[name]
        return np.frombuffer(self._data[begin:end], np.uint8)

    def _check(self, number: int) -> None:
        """Refuse a block whose layout does not agree with its bytes: readers trust what is stored."""
        layout = self.layouts[number]
        nbytes = len(self._bytes(f"{number}.values"))
        element = DTYPES[layout.dtype].itemsize * math.prod(layout.shape)
        wrong = layout.values_nbytes != nbytes or layout.rows < 0 or min(layout.shape, default=0) < 0
        if layout.has_offsets:
            offsets = self._bytes(f"{number}.offsets").view(np.int64)
            wrong = (
                wrong
                or len(offsets) != layout.rows + 1
                # Before the first row of trees are the tensors that the rows refer to.
                or (offsets[0] < 0 if layout.kind in ("tree", "ragged") else offsets[0] != 0)
                or bool((offsets[1:] < offsets[:-1]).any())
                or int(offsets[-1]) * element != nbytes
            )
        elif layout.kind == "enum":
            words = len(layout.vocabulary or ())
            codes = self._bytes(f"{number}.values").view(layout.dtype.removeprefix("torch."))
            wrong = wrong or len(codes) != layout.rows or bool(((codes < 0) | (codes >= words)).any())
        else:
            wrong = wrong or layout.kind != "dense" or layout.rows * element != nbytes
        if wrong or layout.offsets is not None:
            raise ValueError(f"the layout of block {number} does not agree with its bytes")


def write_checkpoint(
    directory: str | os.PathLike[str],
    state: bytes,
    layouts: Mapping[int, Layout],
    read: Callable[[int], tuple[memoryview, memoryview | None]],
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint that is there whole or not at all; one that was there before is replaced.

    Args:
        directory: Where to; it is made if need be.
        state: The control state.
        layouts: Of every block.
        read: Gives the values and the offsets of a block, called once for each.
        metadata: What the user wants back with it: anything that JSON can hold.
    """
    target = Path(directory) / FILE_NAME
    try:
        user = json.dumps(dict(metadata or {}))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"metadata must be what JSON can hold: {error}") from error
    stored = {
        number: msgspec.structs.replace(layout, offsets=None, leaves=None, pieces=None)
        for number, layout in layouts.items()
    }
    control = msgspec.msgpack.encode((state, stored))
    header: dict[str, Any] = {}
    at = 0
    names = block_names(state)
    pieces = [(_CONTROL, "U8", [len(control)], len(control))]
    for number, layout in layouts.items():
        pieces += _pieces_of(f"{names[number]}/{number}", layout)
    for name, dtype, shape, nbytes in pieces:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    about = {"format": _FORMAT, "schema_version": str(SCHEMA_VERSION), "user": user}
    digest = _digest_of(header, about)

    def write(file: BinaryIO) -> None:
        file.write(_encoded_header(header, about, _NO_DIGEST))
        digest.update(control)
        file.write(control)
        for number in layouts:
            for piece in read(number):
                if piece is not None:
                    digest.update(piece)
                    file.write(piece)
        file.seek(0)
        file.write(_encoded_header(header, about, digest.hexdigest()))

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, write)
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {target}: {error.strerror}") from error


def _encoded_header(header: dict[str, Any], about: dict[str, str], digest: str) -> bytes:
    complete = {**header, "__metadata__": {**about, "digest": digest}}
    encoded = json.dumps(complete, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 64)
    return len(encoded).to_bytes(8, "little") + encoded


def read_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint and check every byte of it, before anything is done with it."""
    path = Path(directory) / FILE_NAME
    try:
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error}") from error
    try:
        length = int.from_bytes(data[:8], "little")
        if not 0 < length <= len(data) - 8:
            raise ValueError("its header is cut off")
        header = json.loads(bytes(data[8 : 8 + length]))
        about = header.pop("__metadata__")
        wanted = about.pop("digest")
        if about.get("format") != _FORMAT:
            raise ValueError("it was not written by rlplane")
        if about["schema_version"] != str(SCHEMA_VERSION):
            version = about["schema_version"]
            raise ValueError(f"it has schema version {version}; this rlplane reads {SCHEMA_VERSION}")
        body = data[8 + length :]
        end = max(entry["data_offsets"][1] for entry in header.values())
        if len(body) != end:
            raise ValueError(f"it has {len(body)} bytes of data where {end} belong")
        digest = _digest_of(header, about)
        digest.update(body)
        if digest.hexdigest() != wanted:
            raise ValueError("its digest does not agree with its content: it was torn or altered")
        begin, end = header.pop(_CONTROL)["data_offsets"]
        state, layouts = msgspec.msgpack.decode(body[begin:end], type=tuple[bytes, dict[int, Layout]])
        at = {name.rpartition("/")[2]: tuple(entry["data_offsets"]) for name, entry in header.items()}
        return Checkpoint(state, layouts, json.loads(about["user"]), body, at)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"the checkpoint {path} is refused: {error}") from error


def _pieces_of(name: str, layout: Layout) -> list[tuple[str, str, list[int], int]]:
    """What a block becomes in the file: names, safetensors' dtypes, shapes and sizes."""
    dtype = _SAFETENSORS_NAMES.get(layout.dtype)
    if dtype is None:
        dtype, shape = "U8", [layout.values_nbytes]
    elif layout.kind in ("dense", "enum"):
        shape = [layout.rows, *layout.shape]
    else:
        element = DTYPES[layout.dtype].itemsize * math.prod(layout.shape)
        shape = [layout.values_nbytes // element if element else 0, *layout.shape]
    pieces = [(f"{name}.values", dtype, shape, layout.values_nbytes)]
    if layout.has_offsets:
        pieces.append((f"{name}.offsets", "I64", [layout.rows + 1], 8 * (layout.rows + 1)))
    return pieces


def _digest_of(header: dict[str, Any], about: dict[str, str]) -> Any:
    text = json.dumps([header, about], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32)
