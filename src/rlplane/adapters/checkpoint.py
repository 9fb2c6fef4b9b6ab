"""Checkpoints of a plane, on every engine: one file, which any of them loads."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlplane.adapters.link import Link
from rlplane.control.loading import pieces_of
from rlplane.errors import DataPlaneError, MissingDataError, PlaneConnectionError
from rlplane.interfaces import DEFAULT_TIMEOUT_S, CheckpointConfig
from rlplane.service import protocol as wire
from rlplane.storage.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from rlplane.storage.layout import EncodedColumn, with_offsets_in_layout
from rlplane.storage.places import Layout

logger = logging.getLogger(__name__)

_NAME = "checkpoint-{:08d}"
_IS_OURS = re.compile(r"checkpoint-[0-9]{8}")
_BLOCKS_AT_ONCE = 4096


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The newest of the checkpoints that a plane has saved by itself into ``directory``."""
    return max(_saved(directory), default=None)


class PeriodicCheckpoints:
    """Saves the plane every few seconds, in a thread, and keeps the newest.

    A checkpoint is there whole or not at all, and the one before it goes only when it is there.
    """

    def __init__(self, link: Link, settings: CheckpointConfig) -> None:
        self._link, self._directory = link, Path(settings["dir"])
        self._every_s, self._keep = float(settings["every_s"]), int(settings.get("keep", 2))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlplane-checkpoint", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Save no more; wait for the one that is being saved."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self._save()
            except (DataPlaneError, OSError) as error:
                # The job goes on; the next one may succeed.
                logger.warning("no checkpoint was saved to %s: %s", self._directory, error)

    def _save(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        saved = sorted(_saved(self._directory))
        number = int(saved[-1].name.rpartition("-")[2]) + 1 if saved else 0
        path = self._directory / _NAME.format(number)
        hidden = path.with_name(f".{path.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        save_plane(self._link, str(hidden), {"time": time.time()})
        hidden.rename(path)
        for old in [*saved, path][: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)


def _saved(directory: str | Path) -> list[Path]:
    # Others may save into the same directory, and give theirs such names as checkpoint-500.
    return [path for path in Path(directory).glob("checkpoint-*") if _IS_OURS.fullmatch(path.name)]


def save_plane(link: Link, checkpoint_dir: str, metadata: Mapping[str, Any] | None) -> None:
    """Write the plane as it is at one point of time, while work goes on."""
    lease, frozen = _freeze(link)
    try:
        with link.in_use:
            write_checkpoint(
                checkpoint_dir,
                frozen.state,
                {block: layout for block, (_, _, layout) in frozen.blocks.items()},
                lambda block: _bytes_of(link, frozen, block),
                metadata,
            )
    finally:
        link.connection.release(lease)


def _freeze(link: Link) -> tuple[int, wire.FrozenPlane]:
    """A lease on all places, and the plane as it was when that was given."""
    while True:
        life = link.connection.life
        lease = link.request(wire.Freeze(), wire.Frozen, waits_s=DEFAULT_TIMEOUT_S).lease
        try:
            frozen = wire.FrozenPlane.read(b"".join(_pieces(link, lease)))
        except MissingDataError:
            # The service has been started again, and does not know what it had frozen.
            link.connection.release(lease)
            continue
        except BaseException:
            link.connection.release(lease)
            raise
        if link.connection.hold(lease, frozen.places, life):
            return lease, frozen


def _pieces(link: Link, lease: int) -> Iterator[bytes]:
    is_last = False
    while not is_last:
        piece, is_last = link.request(wire.FrozenPiece(lease), wire.Done).value
        yield piece


def load_plane(
    link: Link, checkpoint_dir: str, most_at_once: int, *, release_claims: bool = False
) -> dict[str, Any]:
    """Replace the content of the plane by that of a checkpoint, whatever engine it was saved on."""
    checkpoint = read_checkpoint(checkpoint_dir)
    load = secrets.randbits(62)
    reserved: list[int] = []
    blocks: dict[int, tuple[int, int, Layout]] = {}
    deadline = time.monotonic() + DEFAULT_TIMEOUT_S
    try:
        for group in _grouped(checkpoint.layouts, most_at_once):
            columns = [_column(checkpoint, block, link.storage.keeps_offsets) for block in group]
            nbytes = max(sum(column.nbytes for column in columns), 1)
            left = max(deadline - time.monotonic(), 0.0)
            place = link.request(wire.Reserve(nbytes, left), wire.Reserved, waits_s=left).place
            reserved.append(place.number)
            with link.in_use:
                link.storage.write(place, columns, deadline)
            start = 0
            for block, column in zip(group, columns, strict=True):
                blocks[block] = (place.number, start, column.layout)
                start += column.nbytes
        for at in range(0, max(len(blocks), 1), _BLOCKS_AT_ONCE):
            some = dict(itertools.islice(blocks.items(), at, at + _BLOCKS_AT_ONCE))
            link.request(wire.RestorePiece(load, some), wire.Done)
        for piece in pieces_of(checkpoint.state):
            link.request(wire.RestorePiece(load, state=piece), wire.Done)
        link.request(wire.Restore(load, reserved, release_claims), wire.Done)
    except BaseException:
        with contextlib.suppress(PlaneConnectionError):
            link.request(wire.Unload(load), wire.Done)
        for number in reserved:
            with contextlib.suppress(PlaneConnectionError):
                link.request(wire.Unreserve(number), wire.Done)
        raise
    link.specs.clear()
    return checkpoint.metadata


def _bytes_of(link: Link, frozen: wire.FrozenPlane, block: int) -> tuple[memoryview, memoryview | None]:
    """The values and the offsets of a block."""
    place, start, layout = frozen.blocks[block]
    whole = link.storage.fetch(frozen.places[place], start, layout.nbytes)
    raw = memoryview(whole.numpy().data).cast("B")
    values = raw[: layout.values_nbytes]
    if not layout.has_offsets:
        return values, None
    if layout.offsets is not None:
        return values, memoryview(layout.offsets)
    return values, raw[layout.offsets_at : layout.offsets_at + 8 * (layout.rows + 1)]


def _column(checkpoint: Checkpoint, block: int, offsets_in_block: bool) -> EncodedColumn:
    layout, values, offsets = checkpoint.layouts[block], *checkpoint.read(block)
    column = EncodedColumn("", layout, layout.nbytes, values, offsets)
    return column if offsets_in_block else with_offsets_in_layout(column)


def _grouped(layouts: dict[int, Layout], most: int) -> list[list[int]]:
    """Blocks in groups of at most ``most`` bytes, so that each group needs one reservation."""
    groups: list[list[int]] = []
    room = 0
    for block, layout in layouts.items():
        if layout.nbytes > room or not groups:
            groups.append([])
            room = most
        groups[-1].append(block)
        room -= layout.nbytes
    return groups
