"""Bytes in and out of TransferQueue's storage units.

A unit keeps values by (field, number) and answers over ZMQ. We speak to it directly, in its own messages,
from the thread that asks. TransferQueue's controller is not involved: it hands out numbers and keeps track of
production, and our numbers, which are never used again, are outside of those that it hands out.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import zmq
from torch import Tensor

from rlplane.errors import PlaneConnectionError
from rlplane.storage.chunks import Chunk, ChunksLostError
from rlplane.storage.copying import copy_all
from rlplane.storage.keyed import unit_of
from rlplane.storage.places import Loss, UnitsDiedError
from rlplane.storage.transfer_queue import theirs

_FIELD = "rlplane"
# How long a unit may be silent before Ray is asked whether it still lives.
_SILENT_MS = 1000
_SLOWEST_BYTES_PER_S = 50e6


class StorageUnits:
    """A ``ChunkStore``: a client of all storage units of a plane. Usable from several threads: each has
    sockets of its own.

    Args:
        infos: TransferQueue's ``ZMQServerInfo`` of each unit, by rank.
        check_alive: Raises ``UnitsDiedError`` when the unit of that rank has died.
        ack_timeout_s: How long an answer may take, beside the time that its bytes need.
    """

    def __init__(
        self, infos: Mapping[int, Any], check_alive: Callable[[int], None], ack_timeout_s: float
    ) -> None:
        self._addresses = [infos[rank].to_addr("put_get_socket") for rank in sorted(infos)]
        self._check_alive, self._ack_timeout_s = check_alive, ack_timeout_s
        self._dead: dict[int, str] = {}  # those that are known to have died, with what was said of it
        self._zmq = theirs.load("utils.zmq_utils")
        self._prefix = self._zmq.STORAGE_CLIENT_IDENTITY_PREFIXES[0]
        self._open_context()

    def _open_context(self) -> None:
        self._pid = os.getpid()
        self._context = zmq.Context()
        self._local = threading.local()

    def put(self, chunks: Sequence[Chunk], buffer: Tensor, deadline: float) -> None:
        memory = buffer.numpy()
        requests = {
            unit: {
                "global_indexes": [chunk.key for chunk in mine],
                "data": {_FIELD: [memory[chunk.start : chunk.start + chunk.size] for chunk in mine]},
            }
            for unit, mine in self._by_unit(chunks).items()
        }
        try:
            self._exchange("PUT_DATA", requests, "PUT_DATA_RESPONSE", sum(chunk.size for chunk in chunks))
        except _UnitDiedError as error:
            raise UnitsDiedError(error.message, self._loss(error.unit)) from error

    def get(self, chunks: Sequence[Chunk], buffer: Tensor) -> None:
        by_unit = self._by_unit(chunks)
        requests = {
            unit: {"global_indexes": [chunk.key for chunk in mine], "fields": [_FIELD]}
            for unit, mine in by_unit.items()
        }
        try:
            answers = self._exchange(
                "GET_DATA", requests, "GET_DATA_RESPONSE", sum(chunk.size for chunk in chunks)
            )
        except _UnitFailedError as error:
            keys = frozenset(chunk.key for chunk in by_unit[error.unit])
            loss = self._loss(error.unit) if isinstance(error, _UnitDiedError) else None
            raise ChunksLostError(error.message, keys, loss) from error
        base = buffer.data_ptr()
        copies = []
        held = []
        for unit, body in answers.items():
            for chunk, value in zip(by_unit[unit], _values(unit, body, by_unit[unit]), strict=True):
                array = np.asarray(value)
                if array.nbytes != chunk.size:
                    raise ChunksLostError(
                        f"storage unit {unit} returned {array.nbytes} bytes where {chunk.size} were stored",
                        frozenset([chunk.key]),
                    )
                held.append(array)
                copies.append((base + chunk.start, array.ctypes.data, chunk.size))
        copy_all(copies)

    def drop(self, chunks: Sequence[Chunk]) -> None:
        requests = {
            unit: {"global_indexes": [chunk.key for chunk in mine]}
            for unit, mine in self._by_unit(chunks).items()
        }
        while requests:
            try:
                self._exchange("CLEAR_DATA", requests, "CLEAR_DATA_RESPONSE", 0)
                return
            except _UnitDiedError as error:
                # What was there is gone. The others are told, perhaps again.
                del requests[error.unit]

    def close(self) -> None:
        if self._pid == os.getpid():
            self._context.destroy(linger=0)

    def _by_unit(self, chunks: Sequence[Chunk]) -> dict[int, list[Chunk]]:
        by_unit: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            by_unit.setdefault(unit_of(chunk.key, len(self._addresses), chunk.dead), []).append(chunk)
        return by_unit

    def _loss(self, unit: int) -> Loss:
        return Loss((unit,), len(self._addresses))

    def _exchange(
        self, kind: str, bodies: Mapping[int, dict[str, Any]], expected: str, nbytes: int
    ) -> dict[int, dict[str, Any]]:
        """Send a request to each unit, then wait for all answers."""
        ZMQMessage, ZMQRequestType = self._zmq.ZMQMessage, self._zmq.ZMQRequestType
        for unit in bodies:
            if unit in self._dead:
                raise _UnitDiedError(self._dead[unit], unit)
        sockets = {}
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._ack_timeout_s + nbytes / _SLOWEST_BYTES_PER_S
        try:
            for unit, body in bodies.items():
                sockets[unit] = self._socket(unit)
                message = ZMQMessage.create(ZMQRequestType[kind], "rlplane", body)
                sockets[unit].send_multipart(message.serialize(), copy=nbytes < 65536)
            for unit, connected in sockets.items():
                frames = self._receive(unit, connected, deadline)
                try:
                    answer = ZMQMessage.deserialize(frames)
                except (ValueError, KeyError, TypeError) as error:
                    raise _UnitFailedError(f"storage unit {unit} sent no message: {error}", unit) from error
                if answer.request_type != ZMQRequestType[expected]:
                    raise _UnitFailedError(f"storage unit {unit} failed: {answer.body.get('message')}", unit)
                answers[unit] = answer.body
        except zmq.ZMQError as error:
            raise PlaneConnectionError(f"TransferQueue's storage cannot be reached: {error}") from error
        finally:
            # An answer does not say which request it is for. A socket whose answer was not read is of no use.
            for unit in sockets.keys() - answers.keys():
                self._local.sockets.pop(unit, None)
                with contextlib.suppress(zmq.ZMQError):
                    sockets[unit].close(linger=0)
        return answers

    def _receive(self, unit: int, connected: zmq.Socket[bytes], deadline: float) -> list[zmq.Frame]:
        while not connected.poll(_SILENT_MS):
            try:
                self._check_alive(unit)
            except UnitsDiedError as error:
                self._dead[unit] = error.message
                raise _UnitDiedError(error.message, unit) from error
            if time.monotonic() > deadline:
                raise PlaneConnectionError(
                    f"storage unit {unit} did not answer within {self._ack_timeout_s:g} s (ack_timeout_ms)"
                )
        return connected.recv_multipart(copy=False)

    def _socket(self, unit: int) -> zmq.Socket[bytes]:
        if self._pid != os.getpid():
            self._open_context()  # a forked child: the sockets are the parent's
        sockets: _Sockets | None = getattr(self._local, "sockets", None)
        if sockets is None:
            sockets = self._local.sockets = _Sockets()
        known = sockets.get(unit)
        if known is None or known.closed:
            known = self._context.socket(zmq.DEALER)
            known.setsockopt(zmq.LINGER, 0)
            known.setsockopt(zmq.IPV6, int("[" in self._addresses[unit]))
            known.setsockopt(zmq.IDENTITY, self._prefix + f"rlplane_{uuid.uuid4().hex}".encode())
            known.connect(self._addresses[unit])
            sockets[unit] = known
        return known


def _values(unit: int, body: Mapping[str, Any], chunks: Sequence[Chunk]) -> Sequence[Any]:
    """The values of an answer, one for each chunk that was asked for."""
    values = (body.get("data") or {}).get(_FIELD)
    if not isinstance(values, Sequence) or len(values) != len(chunks):
        raise ChunksLostError(
            f"storage unit {unit} did not return the {len(chunks)} values it was asked for",
            frozenset(chunk.key for chunk in chunks),
        )
    return values


class _Sockets(dict[int, "zmq.Socket[bytes]"]):
    """A thread's sockets, by unit. They are closed when the thread ends: a context waits for open ones."""

    def __del__(self) -> None:
        for connected in self.values():
            with contextlib.suppress(zmq.ZMQError):
                connected.close(linger=0)


class _UnitFailedError(PlaneConnectionError):
    def __init__(self, message: str, unit: int) -> None:
        super().__init__(message)
        self.unit = unit


class _UnitDiedError(_UnitFailedError):
    """It is gone for good: nobody starts a storage unit again."""
