"""``TQDataPlaneClient``: the data plane on a Ray cluster, with TransferQueue as its storage.

Three parts work together. The bytes go straight between this process and TransferQueue's storage
(``storage.py``), in the form of ``wire.py``. The control actor (``control.py``) decides what is visible,
ready and claimed. And this class puts them in the right order: reserve, store, commit; locate, fetch,
assemble.
"""

from __future__ import annotations

import contextlib
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict

from rlplane.adapters.transfer_queue.checkpoint import load_checkpoint, save_checkpoint
from rlplane.adapters.transfer_queue.liveness import Lifeline
from rlplane.adapters.transfer_queue.plane import (
    Plane,
    _connect_existing,
    _init_tq,
    _quiet_transfer_queue,
    ack_timeout_s,
    open_storage,
)
from rlplane.adapters.transfer_queue.storage import Gone, Pieces, Storage, UnitDied, Wanted, key_of
from rlplane.adapters.transfer_queue.wire import (
    Column,
    Layout,
    _assert_no_key_loss,
    _from_wire,
    check_enum,
    decode_column,
    encode_columns,
    gather_rows,
    join_layouts,
    rows_per_chunk,
)
from rlplane.adapters.transfer_queue.writes import Location, Reservation, Write
from rlplane.errors import (
    ClientClosedError,
    DataPlaneError,
    InvalidRequestError,
    PlaneConnectionError,
)
from rlplane.interfaces import DEFAULT_TIMEOUT_S, DataPlaneClient, DataPlaneConfig, KVBatchMeta
from rlplane.objects import decode_tags, encode_tags, open_tags, plain_tags
from rlplane.rules import PartitionSpec, check_ids, check_names, check_timeout
from rlplane.transfer_stats import TransferRecord, TransferStats

__all__ = ["TQDataPlaneClient"]

_FIRST_POLL_S = 0.001
_READ_ATTEMPTS = 4


class TQDataPlaneClient(DataPlaneClient):
    """A client of a plane on Ray.

    Args:
        cfg: The config. With ``bootstrap=False`` only the client's own keys are read.
        bootstrap: True starts the plane, or joins one that runs with the same config; False joins only.

    Raises:
        ConfigError: A plane with another config runs already.
        PlaneConnectionError: There is no Ray, or no plane on it.
        MissingExtraError: Ray, TransferQueue or Mooncake is not installed.

    Pickling it gives a client that joins the same plane (``bootstrap=False``), wherever it is unpickled.
    """

    def __init__(self, cfg: DataPlaneConfig, *, bootstrap: bool = True) -> None:
        self._cfg = cfg
        self._closed = True
        self.transfer_stats = TransferStats()
        self._allow_pickle = bool(cfg.get("allow_pickle"))
        self._poll_s = max(_FIRST_POLL_S, float(cfg["claim_meta_poll_interval_s"]))
        self._ack_timeout_s = ack_timeout_s(cfg)
        self._warned: set[tuple[str, str]] = set()
        _quiet_transfer_queue(cfg.get("transfer_queue") or {})
        self._plane: Plane = _init_tq(cfg) if bootstrap else _connect_existing(cfg)
        self._lifeline: Lifeline | None = None
        self._storage: Storage | None = None
        try:
            joined = {**cfg, "backend": self._plane.backend}
            self._storage = open_storage(
                joined,  # type: ignore[arg-type]
                self._plane.tq,
                self._plane.controller,
                self._plane.units,
            )
            self._closed = False
            self._owner, address = self._ask("join")
            self._lifeline = Lifeline(address, self._owner)
        except BaseException:
            self._closed = False
            self.close()
            raise

    # By task

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        self._check_open()
        spec = PartitionSpec.checked(
            partition_id, fields, num_samples, consumer_tasks, grpo_group_size, enums
        )
        self._ask("register", spec)

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        where: Mapping[str, Any] | None = None,
    ) -> KVBatchMeta:
        self._check_open()
        fields = check_names("required_fields", required_fields)
        deadline = time.monotonic() + check_timeout(timeout_s)
        token = uuid.uuid4().hex
        request = (partition_id, task_name, fields, batch_size, dict(where) if where else where)
        answer = self._ask("claim", token, self._owner, *request, blocking)
        try:
            pause = _FIRST_POLL_S
            while answer is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    answer = self._ask("give_up_claim", token)
                    break
                time.sleep(min(pause, left))
                pause = min(pause * 1.5, self._poll_s)
                self._check_open()
                answer = self._ask("poll", token)
        except BaseException as error:
            if not isinstance(error, DataPlaneError):
                with contextlib.suppress(Exception):
                    self._ask("cancel_claim", token)
            raise
        if answer is None:
            raise PlaneConnectionError("the control actor has forgotten a waiting claim")
        ids, sealed = answer
        tags = open_tags(decode_tags(sealed), allow_pickle=self._allow_pickle)
        return KVBatchMeta._adopt(partition_id, task_name, ids, fields, tags)

    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        fields = meta.fields if select_fields is None else select_fields
        if fields is None:
            raise InvalidRequestError("get_data needs select_fields, or a meta with fields")
        return self.get_samples(meta.sample_ids, meta.partition_id, fields)

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        self._check_open()
        return bool(self._ask("consumed", partition_id, check_names("task_names", task_names)))

    # By key

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> KVBatchMeta:
        self._check_open()
        ids = check_ids(sample_ids)
        deadline = time.monotonic() + check_timeout(timeout_s)
        columns: dict[str, Column] = {}
        if fields is not None:
            columns = encode_columns(fields, len(ids), allow_pickle=self._allow_pickle)
        sealed = None
        if tags is not None:
            if len(tags) != len(ids):
                raise InvalidRequestError(f"tags has {len(tags)} entries for {len(ids)} sample_ids")
            sealed = plain_tags(tags, allow_pickle=self._allow_pickle)
        if ids:
            self._write(ids, partition_id, columns, sealed, deadline)
        else:
            self._ask("status", partition_id)
        opened = None if sealed is None else open_tags(sealed, allow_pickle=self._allow_pickle)
        return KVBatchMeta._adopt(partition_id, None, ids, None if fields is None else list(columns), opened)

    def _write(
        self,
        ids: list[str],
        partition_id: str,
        columns: dict[str, Column],
        tags: list[dict[str, Any]] | None,
        deadline: float,
    ) -> None:
        began = time.perf_counter()
        layouts = {name: column.layout for name, column in columns.items()}
        chunk_rows = rows_per_chunk(columns, len(ids))
        encoded = None if tags is None else encode_tags(tags)
        request = (self._owner, partition_id, ids, encoded, layouts, chunk_rows)
        number, indexes, undeclared, enums = self._reserve(request, deadline)
        try:
            for name, vocabulary in enums.items():
                check_enum(name, columns[name], vocabulary)
            self._warn_undeclared(partition_id, undeclared)
            if columns:
                nbytes = sum(layout.nbytes for layout in layouts.values())
                posted = time.perf_counter()
                write = Write(number, partition_id, indexes, chunk_rows, layouts, nbytes)
                values = self._stored().store(write, columns, deadline)
                done = time.perf_counter()
                self.transfer_stats.record_transfer(
                    TransferRecord(nbytes, values, posted - began, done - posted)
                )
            self._ask("commit", number)
        except BaseException:
            with contextlib.suppress(Exception):
                self._ask("abandon", number)
            raise

    def _reserve(self, request: tuple[Any, ...], deadline: float) -> Reservation:
        token = uuid.uuid4().hex
        pause = _FIRST_POLL_S
        while True:
            reserved: Reservation | None = self._ask("reserve", token, *request)
            if reserved is not None:
                return reserved
            left = deadline - time.monotonic()
            if left <= 0:
                self._ask("give_up_room", token, len(request[2]), request[1])
            time.sleep(max(0.0, min(pause, left)))
            pause = min(pause * 1.5, self._poll_s)

    def _warn_undeclared(self, partition_id: str, names: Sequence[str]) -> None:
        for name in names:
            if (partition_id, name) not in self._warned:
                self._warned.add((partition_id, name))
                warnings.warn(
                    f"field {name!r} is written to partition {partition_id!r}, which does not declare it",
                    stacklevel=4,
                )

    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        self._check_open()
        ids = check_ids(sample_ids, distinct=False)
        names = check_names("select_fields", select_fields)
        if not names:
            raise InvalidRequestError("select_fields is empty; name at least one field")
        lost: frozenset[str] = frozenset()
        for _ in range(_READ_ATTEMPTS):
            began = time.perf_counter()
            location: Location = self._ask("locate", partition_id, ids, names)
            if not ids:
                return TensorDict({}, batch_size=[0])
            wanted = _chunks_of(location)
            posted = time.perf_counter()
            try:
                pieces = self._stored().fetch(wanted)
            except Gone as error:
                # Cleared or written anew while we read: ask again where it is.
                lost = error.keys
                continue
            except UnitDied as error:
                raise self._what_was_lost(ids, location, error.keys, error.unit, error.message) from error
            nbytes = sum(tensor.numel() for piece in pieces.values() for tensor in piece.tensors)
            values = sum(len(piece.base) for piece in pieces.values())
            done = time.perf_counter()
            self.transfer_stats.record_transfer(TransferRecord(nbytes, values, posted - began, done - posted))
            return self._assemble(location, names, len(ids), pieces)
        raise self._what_was_lost(ids, location, lost, None, "the storage does not have it any more")

    def _assemble(
        self, location: Location, names: Sequence[str], count: int, pieces: Mapping[str, Pieces]
    ) -> TensorDict:
        columns: dict[str, Any] = {}
        promoted = []
        for name in names:
            rows = _Rows(location, name)
            layout = join_layouts(name, rows.layouts)
            data = rows.gather(pieces[name])
            columns[name] = decode_column(layout, rows.lengths, data, allow_pickle=self._allow_pickle)
            if layout.promoted:
                promoted.append(name)
        wire = TensorDict(columns, batch_size=[count])
        _assert_no_key_loss(columns, wire, "get_samples")
        return _from_wire(wire, promoted)

    def _what_was_lost(
        self, ids: Sequence[str], location: Location, keys: frozenset[str], unit: int | None, why: str
    ) -> PlaneConnectionError:
        """Name the samples that cannot be read, instead of returning the others."""
        storage = self._stored()
        gone: dict[str, None] = {}
        for name, (numbers, positions) in location.places.items():
            for sample_id, number, position in zip(ids, numbers.tolist(), positions.tolist(), strict=True):
                write = location.writes[number]
                chunk = position // write.chunk_rows
                held_by = storage.unit_of(write.indexes[chunk])
                if key_of(write, chunk, name) in keys or (unit is not None and held_by == unit):
                    gone[sample_id] = None
        names = list(gone or dict.fromkeys(ids))
        shown = ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")
        return PlaneConnectionError(
            f"{why}; lost with it are {len(names)} of the {len(set(ids))} samples asked for: {shown}"
        )

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        self._check_open()
        if sample_ids is not None:
            self._ask("clear", partition_id, check_ids(sample_ids, distinct=False))
        elif not self._ask("clear_written_by", partition_id, self._owner):
            warnings.warn(f"there is nothing to clear in partition {partition_id!r}", stacklevel=2)

    # The optional ones

    def list_sample_ids(self, partition_id: str) -> list[str]:
        self._check_open()
        return list(self._ask("ids", partition_id))

    def partition_status(self, partition_id: str) -> dict[str, Any]:
        self._check_open()
        return dict(self._ask("status", partition_id))

    def save_checkpoint(self, path: str) -> None:
        self._check_open()
        if self._plane.backend != "simple":
            raise self._unsupported("save_checkpoint with backend mooncake_cpu")
        save_checkpoint(Path(path), self._stored(), self._ask, self._owner)

    def load_checkpoint(self, path: str, *, release_claims: bool = False) -> None:
        self._check_open()
        if self._plane.backend != "simple":
            raise self._unsupported("load_checkpoint with backend mooncake_cpu")
        load_checkpoint(Path(path), self._stored(), self._ask, self._owner, release_claims=release_claims)

    def close(self) -> None:
        if self._closed:
            return
        if self._lifeline is not None:
            with contextlib.suppress(DataPlaneError):
                self._ask("leave", self._owner)
            self._lifeline.close()
        self._closed = True
        if self._storage is not None:
            with contextlib.suppress(Exception):
                # What we end ourselves must not end before our own connection to it does.
                self._storage.close(wait=bool(self._plane.started))
        self._plane.end()

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_open()
        return _join, (self._cfg,)

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._plane.backend
        return f"TQDataPlaneClient({state}, namespace={self._plane.namespace!r})"

    def _ask(self, method: str, *args: Any) -> Any:
        """Call the control actor; its errors are raised here, and its death is one of them."""
        import ray

        if not ray.is_initialized():
            raise PlaneConnectionError("Ray was shut down under this client")
        try:
            answer = ray.get(getattr(self._plane.control, method).remote(*args), timeout=self._ack_timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise PlaneConnectionError(
                f"the control actor did not answer within {self._ack_timeout_s:g} s (ack_timeout_ms)"
            ) from None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, DataPlaneError):
                raise cause from error
            raise
        except ray.exceptions.RayError as error:
            raise PlaneConnectionError(
                f"the plane's control actor is gone: {str(error).splitlines()[0]}"
            ) from error
        if isinstance(answer, DataPlaneError):
            raise answer
        return answer

    def _stored(self) -> Storage:
        assert self._storage is not None
        return self._storage

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosedError("this client is closed")


def _join(cfg: DataPlaneConfig) -> TQDataPlaneClient:
    return TQDataPlaneClient(cfg, bootstrap=False)


class _Rows:
    """The rows of one field that are read: where their bytes are, and how they look."""

    def __init__(self, location: Location, name: str) -> None:
        self._numbers, positions = location.places[name]
        self._positions = positions.astype(np.int64)
        self._start = np.empty(len(positions), np.int64)
        self._stop = np.empty(len(positions), np.int64)
        self._chunk = np.empty(len(positions), np.int64)
        self.lengths = np.zeros(len(positions), np.int64)
        self.layouts: list[Layout] = []
        for number in np.unique(self._numbers).tolist():
            write = location.writes[number]
            layout = write.layouts[name]
            self.layouts.append(layout)
            mine = slice(None) if len(location.writes) == 1 else self._numbers == number
            position = self._positions[mine]
            offsets = layout.offsets()
            chunk = position // write.chunk_rows
            base = offsets[chunk * write.chunk_rows]
            self._chunk[mine] = chunk
            self._start[mine] = offsets[position] - base
            self._stop[mine] = offsets[position + 1] - base
            if layout.lengths is not None:
                self.lengths[mine] = layout.lengths[position]
            elif layout.tail:
                self.lengths[mine] = layout.tail[0]

    def gather(self, pieces: Pieces) -> Any:
        keys = zip(self._numbers.tolist(), self._chunk.tolist(), strict=True)
        places = np.array([pieces.base[key] for key in keys], np.int64).reshape(-1, 2)
        start, stop = self._start + places[:, 1], self._stop + places[:, 1]
        return gather_rows(pieces.tensors, places[:, 0], start, stop, private=pieces.private)


def _chunks_of(location: Location) -> list[Wanted]:
    """The chunks that hold the rows, write by write, each with the fields that are wanted of it."""
    wanted: dict[tuple[int, bytes], Wanted] = {}
    for name, (numbers, positions) in location.places.items():
        for number in np.unique(numbers).tolist():
            write = location.writes[number]
            mine = positions if len(location.writes) == 1 else positions[numbers == number]
            chunks = np.unique(mine.astype(np.int64) // write.chunk_rows)
            want = wanted.setdefault((number, chunks.tobytes()), Wanted(write, chunks, []))
            want.fields.append(name)
    return list(wanted.values())
