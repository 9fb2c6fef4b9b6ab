"""A checkpoint of a plane: one safetensors file, written atomically and checked when it is read.

Every block is in it under ``partition/field/number``, with its real dtype and shape, so that any safetensors
reader can look at the columns. The control state is one more tensor, of msgpack bytes. The header's metadata
has the schema version and a digest over everything, so that a torn or altered file is refused. The format is
written here and not by the library, because a plane may be larger than the memory that a copy needs: blocks
go from shared memory to the file one by one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from rlplane.adapters.local.wire import Layout
from rlplane.errors import CheckpointError
from rlplane.persist import SCHEMA_VERSION, block_names

__all__ = ["Checkpoint", "read_checkpoint", "write_checkpoint"]

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
        self, state: bytes, layouts: dict[int, Layout], data: memoryview, at: dict[str, Any]
    ) -> None:
        self.state, self.layouts = state, layouts
        self._data, self._at = data, at

    def read_into(self, number: int, block: Tensor) -> None:
        """Copy the bytes of a block into ``block``, a uint8 tensor of its layout's size."""
        layout = self.layouts[number]
        begin, end = self._at[f"{number}.values"]
        block[: layout.values_nbytes].copy_(self._bytes(begin, end))
        if f"{number}.offsets" in self._at:
            begin, end = self._at[f"{number}.offsets"]
            block[layout.offsets_at : layout.offsets_at + end - begin].copy_(self._bytes(begin, end))

    def _bytes(self, begin: int, end: int) -> Tensor:
        # A copy, because torch has no read-only tensors and the file is mapped read-only.
        return torch.from_numpy(np.frombuffer(self._data[begin:end], np.uint8).copy())


def write_checkpoint(
    path: str | os.PathLike[str], state: bytes, blocks: Mapping[int, tuple[Layout, Tensor]]
) -> None:
    """Write a file that is either there whole or not at all."""
    target = Path(path)
    names = block_names(state)
    pieces: list[tuple[str, str, list[int], memoryview]] = []
    control = msgspec.msgpack.encode((state, {number: layout for number, (layout, _) in blocks.items()}))
    pieces.append((_CONTROL, "U8", [len(control)], memoryview(control)))
    for number, (layout, block) in blocks.items():
        pieces += _pieces_of(f"{names[number]}/{number}", layout, block)
    header: dict[str, Any] = {}
    at = 0
    for name, dtype, shape, data in pieces:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + data.nbytes]}
        at += data.nbytes
    metadata = {"format": "rlplane", "schema_version": str(SCHEMA_VERSION)}
    digest = _digest_of(header, metadata)
    for piece in pieces:
        digest.update(piece[3])
    header["__metadata__"] = metadata | {"digest": digest.hexdigest()}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 64)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            file.write(len(encoded).to_bytes(8, "little"))
            file.write(encoded)
            for piece in pieces:
                file.write(piece[3])
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise CheckpointError(f"cannot write the checkpoint {target}: {error.strerror}") from error
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint and check every byte of it, before anything is done with it."""
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
        metadata = header.pop("__metadata__")
        wanted = metadata.pop("digest")
        if metadata.get("format") != "rlplane":
            raise ValueError("it was not written by rlplane")
        if metadata["schema_version"] != str(SCHEMA_VERSION):
            version = metadata["schema_version"]
            raise ValueError(f"it has schema version {version}; this rlplane reads {SCHEMA_VERSION}")
        body = data[8 + length :]
        end = max(entry["data_offsets"][1] for entry in header.values())
        if len(body) != end:
            raise ValueError(f"it has {len(body)} bytes of data where {end} belong")
        digest = _digest_of(header, metadata)
        digest.update(body)
        if digest.hexdigest() != wanted:
            raise ValueError("its digest does not agree with its content: it was torn or altered")
        begin, end = header.pop(_CONTROL)["data_offsets"]
        state, layouts = msgspec.msgpack.decode(body[begin:end], type=tuple[bytes, dict[int, Layout]])
        at = {name.rpartition("/")[2]: entry["data_offsets"] for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"the checkpoint {path} is refused: {error}") from error
    return Checkpoint(state, layouts, body, at)


def _pieces_of(name: str, layout: Layout, block: Tensor) -> list[tuple[str, str, list[int], memoryview]]:
    raw = memoryview(block.numpy().data).cast("B")
    values = raw[: layout.values_nbytes]
    dtype = _SAFETENSORS_NAMES.get(layout.dtype, "U8")
    if layout.kind in ("dense", "enum") and layout.dtype in _SAFETENSORS_NAMES:
        shape = [layout.rows, *layout.shape]
    elif layout.dtype in _SAFETENSORS_NAMES:
        element = torch.empty(0, dtype=getattr(torch, layout.dtype.removeprefix("torch."))).itemsize
        for extent in layout.shape:
            element *= extent
        shape = [layout.values_nbytes // element if element else 0, *layout.shape]
    else:
        shape = [layout.values_nbytes]
    pieces = [(f"{name}.values", dtype, shape, values)]
    if layout.kind in ("jagged", "object"):
        offsets = raw[layout.offsets_at : layout.offsets_at + 8 * (layout.rows + 1)]
        pieces.append((f"{name}.offsets", "I64", [layout.rows + 1], offsets))
    return pieces


def _digest_of(header: dict[str, Any], metadata: dict[str, str]) -> Any:
    text = json.dumps([header, metadata], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32)
