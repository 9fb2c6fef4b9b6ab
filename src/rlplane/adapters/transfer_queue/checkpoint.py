"""Checkpoints: TransferQueue dumps its storage and its controller, and beside them goes what they mean.

The control state is frozen first. Stored bytes are never overwritten, and from then on nothing is cleared, so
whatever TransferQueue dumps afterwards has everything that the frozen state refers to, however long it takes
and whatever is written meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlplane.adapters.transfer_queue.storage import Storage
from rlplane.errors import CheckpointError

__all__ = ["load_checkpoint", "save_checkpoint"]

_FORMAT, _VERSION = "rlplane.transfer_queue", 1
_MANIFEST, _CONTROL, _CONTROLLER = "manifest.json", "control.msgpack", "controller_state.pkl"

Ask = Callable[..., Any]


def save_checkpoint(path: Path, storage: Storage, ask: Ask, owner: int) -> None:
    """Write a checkpoint to the directory ``path``, which appears whole or not at all.

    On several nodes the directory has to be on a file system that all of them share: each storage unit
    writes its own part.
    """
    path = path.absolute()
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.new")
    new.mkdir(parents=True)
    try:
        frozen: bytes = ask("freeze", owner)
        try:
            storage.run(storage.client.async_save_storage_checkpoint(str(new)), "TransferQueue's storage")
            controller = storage.client.async_save_controller_checkpoint(str(new / _CONTROLLER))
            storage.run(controller, "TransferQueue's controller")
        finally:
            ask("thaw", owner)
        (new / _CONTROL).write_bytes(frozen)
        manifest = {
            "format": _FORMAT,
            "version": _VERSION,
            "storage_units": len(storage.units),
            "files": {name: _digest(new / name) for name in _files(new)},
        }
        (new / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        _sync(new)
        _replace(path, new)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def load_checkpoint(
    path: Path, storage: Storage, ask: Ask, owner: int, *, release_claims: bool = False
) -> None:
    """Replace the plane's content. What is wrong with a checkpoint is found out before anything changes."""
    path = path.absolute()
    _check(path, len(storage.units))
    deadline = time.monotonic() + storage.ack_timeout_s
    try:
        while not ask("shut", owner):
            if time.monotonic() > deadline:
                raise CheckpointError("writes are under way that do not end; load a checkpoint when none is")
            time.sleep(0.01)
        storage.run(storage.client.async_load_storage_checkpoint(str(path)), "TransferQueue's storage")
        controller = storage.client.async_load_controller_checkpoint(str(path / _CONTROLLER))
        storage.run(controller, "TransferQueue's controller")
        used = ask("restore", (path / _CONTROL).read_bytes(), owner, release_claims)
        _clear_leftovers(storage, used)
    finally:
        ask("thaw", owner)


def _clear_leftovers(storage: Storage, used: dict[str, list[int]]) -> None:
    """Clear rows that were reserved, unfinished or freed when the checkpoint was made."""
    from transfer_queue.metadata import BatchMeta

    client = storage.client
    for partition_id in storage.run(client.async_get_partition_list(), "TransferQueue's controller"):
        meta = storage.run(client._get_partition_meta(partition_id), "TransferQueue's controller")
        left = sorted(set(meta.global_indexes if meta else ()) - set(used.get(partition_id, ())))
        if left:
            leftovers = BatchMeta(left, [partition_id] * len(left))
            storage.run(client.async_clear_samples(leftovers), "TransferQueue")


def _check(path: Path, units: int) -> None:
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {_MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the {_MANIFEST} of {path} cannot be read: {error}") from error
    if manifest.get("format") != _FORMAT or manifest.get("version") != _VERSION:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')!r}, version {manifest.get('version')!r}; "
            f"this engine reads {_FORMAT!r}, version {_VERSION}"
        )
    if manifest["storage_units"] != units:
        raise CheckpointError(
            f"{path} was saved with num_storage_units {manifest['storage_units']}; this plane has {units}"
        )
    for name, digest in manifest["files"].items():
        try:
            found = _digest(path / name)
        except OSError as error:
            raise CheckpointError(f"{path} is torn: {name} cannot be read: {error}") from error
        if found != digest:
            raise CheckpointError(f"{path} was altered: {name} is not what was saved")


def _files(directory: Path) -> list[str]:
    return sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file())


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _sync(directory: Path) -> None:
    for name in [*_files(directory), "."]:
        handle = os.open(directory / name, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _replace(path: Path, new: Path) -> None:
    old = path.with_name(f"{new.name}.old")
    if path.exists():
        path.rename(old)
    try:
        new.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
