"""The control service of a cluster, inside a Ray actor.

The actor is only its home: clients speak to it over TCP, and Ray is asked once, for the address and the
token.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplane.adapters.client import DEFAULT_RECONNECT_TIMEOUT_S
from rlplane.adapters.transfer_queue.watch import UnitWatch
from rlplane.atomic_file import write_atomically
from rlplane.service.admission import share_for_live
from rlplane.service.journal import Journal
from rlplane.service.recovery import recover
from rlplane.service.server import Server
from rlplane.service.sockets import listen
from rlplane.service.stall import collect_new_garbage_only, use_small_pages
from rlplane.storage.chunks import chunks_of
from rlplane.storage.keyed import BackgroundDiscard, KeyedHost
from rlplane.storage.places import Place
from rlplane.storage.transfer_queue import theirs

_PUBLISHED = ("aggregator", "run")


class ServiceActor:
    """Runs the control service in a thread as long as this actor lives."""

    def __init__(self, cfg: dict[str, Any], about: dict[str, Any]) -> None:
        from rlplane.adapters.transfer_queue.plane import Plane, open_store

        use_small_pages()
        plane = self._plane = Plane(**about, actor=None)
        self._store = open_store(cfg, plane)  # type: ignore[arg-type]
        self._discard = BackgroundDiscard(self._drop, self._dropped)
        self._journal: Journal | None = None
        # Mooncake decides by itself which unit a chunk goes to.
        units = cfg["num_storage_units"] if plane.backend == "simple" else 0
        self._host = KeyedHost(
            cfg["global_segment_size"] * cfg["num_storage_units"],
            self._discard_later,
            units,
            self._discard.hurry,
        )
        capacity = cfg["storage_capacity"]
        share = share_for_live(cfg)
        recovered = None
        self._files = Path(plane.journal_dir) if plane.journal_dir else None
        if self._files is not None:
            self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in _PUBLISHED:
                with contextlib.suppress(FileNotFoundError):
                    setattr(plane, name, (self._files / name).read_text())
            if any(self._files.glob("journal.*")):
                # Ray has started this actor again, after its process died.
                recovered = recover(self._files, capacity, self._host.limit, share)
                self._host.adopt(list(recovered.places.values()), recovered.last_place)
                self._host.lose(recovered.service.dead)
                for place in recovered.freed:
                    self._discard.add(place, counted=False)
            self._journal = Journal(self._files, 0 if recovered is None else recovered.generation)
        listener, address = listen(f"tcp://{_listen_ip(cfg)}:0")
        token = secrets.token_hex(32)
        self._server = Server(
            capacity,
            self._host,
            listener,
            token=token,
            journal=self._journal,
            recovered=recovered,
            reconnect_timeout_s=reconnect_timeout_s(cfg),
            reserve_for_live=share,
        )
        plane.service = {"address": address, "token": token}
        collect_new_garbage_only()
        threading.Thread(target=self._server.run, name="rlplane-service", daemon=True).start()
        self._watch = UnitWatch(plane, self._store, self._server)

    def describe(self) -> dict[str, Any]:
        """What a client needs to join."""
        return self._plane.describe()

    def describe_run(self) -> str:
        """What a viewer needs to watch the run; empty if nobody has said."""
        return self._plane.run

    def publish_aggregator(self, address: str, run: str) -> None:
        """Keep what clients are told about where to send measurements, and viewers about the run, also when
        this actor starts again."""
        for name, text in zip(_PUBLISHED, (address, run), strict=True):
            setattr(self._plane, name, text)
            if self._files is not None:
                write_atomically(self._files / name, text.encode(), mode=0o600)

    def pid(self) -> int:
        """This actor's process."""
        return os.getpid()

    def close(self) -> None:
        """Stop serving."""
        self._server.stop()
        self._server.wait_closed(5.0)
        self._discard.close()
        self._watch.close()
        if self._files is not None:
            shutil.rmtree(self._files, ignore_errors=True)

    def _discard_later(self, place: Place) -> bool:
        if self._journal is None:
            return self._discard.add(place)
        # The bytes are needed for as long as the journal says that they are.
        self._journal.afterwards(lambda: self._discard.add(place))
        return False

    def _drop(self, places: Sequence[Place]) -> None:
        self._store.drop([chunk for place in places for chunk in chunks_of(place)])

    def _dropped(self, places: Sequence[Place]) -> None:
        def count() -> None:
            self._host.discarded(places)
            self._server.service.room_came_free()

        self._server.call_soon(count)


def reconnect_timeout_s(cfg: Mapping[str, Any]) -> float:
    """How long a client and a service that lost each other wait."""
    wanted = cfg.get("reconnect_timeout_s")
    return DEFAULT_RECONNECT_TIMEOUT_S if wanted is None else float(wanted)


def _listen_ip(cfg: dict[str, Any]) -> str:
    found = (cfg.get("transfer_queue") or {}).get("node_ip")
    return found or str(theirs.load("utils.zmq_utils").get_node_ip_address())
