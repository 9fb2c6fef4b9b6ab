"""``PlaneCalls``: what each call of a client does, as steps that either client performs.

A put encodes its columns, writes them to a place in storage and commits that in one round trip. A get asks
where the rows are, and reads them from storage under a lease. Most others are one request. Every method here
is a call (``adapters/steps.py``): ``PlaneClient`` performs it in the calling thread, ``AsyncPlaneClient`` on
its event loop.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlplane.adapters import many
from rlplane.adapters.link import Link
from rlplane.adapters.steps import Call, Exchange, MoveBytes, Undo, ask
from rlplane.caller import warn_caller
from rlplane.control.policies import FlowPolicy
from rlplane.control.rules import PartitionSpec, check_ids, check_names, check_timeout, compile_where
from rlplane.errors import (
    CapacityTimeoutError,
    ClaimTimeoutError,
    DataPlaneError,
    InvalidRequestError,
    PlaneConnectionError,
    SamplesLostError,
    UnknownPartitionError,
)
from rlplane.interfaces import DataPlaneConfig, KVBatchMeta
from rlplane.service import protocol as wire
from rlplane.service.parts import are_many
from rlplane.storage.assembly import Assembler
from rlplane.storage.layout import OBJECT_BYTES, EncodedColumn, bytes_to_encode, encode_columns
from rlplane.storage.leases import ReadLease
from rlplane.storage.objects import open_tags, plain_tags
from rlplane.storage.places import Located, OutOfPagesError, Place, RowsLostError, UnitsDiedError
from rlplane.storage.sums import RowChecks, with_sums
from rlplane.transfer_stats import TransferRecord, TransferStats

__all__ = ["PlaneCalls"]

_WRITE_ATTEMPTS = 8
# How long a put waits before it asks a machine for memory again that had none.
_OUT_OF_PAGES_S = 0.1


class PlaneCalls:
    """The calls of one client, with what they share: its settings, and what is counted of its transfers."""

    def __init__(self, cfg: DataPlaneConfig) -> None:
        self._allow_pickle = bool(cfg.get("allow_pickle", False))
        self.spare_limit = int(cfg["local_buffer_size"])
        self._warned: set[tuple[str, str]] = set()
        watched: Mapping[str, Any] = cfg.get("observability") or {}
        self._is_verified = bool(watched.get("enabled", False) and watched.get("verify", False))
        self.count_anew()

    def count_anew(self) -> None:
        """Begin the counts, as a forked child does: the others are its parent's."""
        self.transfer_stats = TransferStats()
        self.row_checks = RowChecks() if self._is_verified else None

    def register(
        self,
        link: Link,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None,
        enums: dict[str, list[str]] | None,
        flow: FlowPolicy | Mapping[str, Any] | None,
        produces: dict[str, list[str]] | None,
    ) -> Call[None]:
        spec = PartitionSpec.checked(
            partition_id, fields, num_samples, consumer_tasks, grpo_group_size, enums, flow, produces
        )
        yield from ask(wire.Register(spec), wire.Done)
        link.specs.pop(partition_id, None)

    def declare(
        self, link: Link, partition_id: str, fields: Sequence[str], tasks: Sequence[str] = ()
    ) -> Call[None]:
        """Let the partition come into being, with these fields and tasks beside those that it has.

        For the interfaces of others, in which a partition need not be registered.
        """
        try:
            _, known = yield from link.describe(partition_id)
            if set(fields) <= set(known.fields) and set(tasks) <= set(known.tasks):
                return
        except UnknownPartitionError:
            pass
        spec = PartitionSpec.checked(partition_id, list(fields), 0, list(tasks))
        yield from ask(wire.Register(spec, extend=True), wire.Done)
        link.specs.pop(partition_id, None)

    def claim(
        self,
        link: Link,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None,
        blocking: bool,
        timeout_s: float | None,
        *,
        where: Mapping[str, Any] | None,
        max_tokens: int | None,
        order: str | None,
        dp_world: int | None,
        step: str | int | None,
        max_uses: int,
        repeat_where: Mapping[str, Any] | None,
        split_groups: bool,
    ) -> Call[KVBatchMeta]:
        timeout_s = float("inf") if timeout_s is None else check_timeout(timeout_s)
        if (step is None) != (dp_world is None) or (step is not None and dp_rank is None):
            raise InvalidRequestError(
                "a claim that ranks share needs dp_rank, dp_world and step; given are "
                f"dp_rank={dp_rank!r}, dp_world={dp_world!r} and step={step!r}"
            )
        if type(max_uses) is not int:
            raise InvalidRequestError(f"max_uses is an integer of at least 1, not {max_uses!r}")
        names = check_names("required_fields", required_fields)
        plain = _plain_where(where)
        request = wire.ClaimRequest(
            partition_id,
            task_name,
            names,
            batch_size,
            blocking,
            float(timeout_s),
            plain,
            max_tokens,
            order,
        )
        request.max_uses, request.repeat_where = max_uses, _plain_where(repeat_where)
        if step is not None:
            request.step, request.dp_rank, request.dp_world = str(step), dp_rank or 0, dp_world or 1
            request.split_groups = bool(split_groups)
        try:
            claimed = yield from ask(request, wire.Claimed, waits_s=timeout_s if blocking else 0.0)
        except ClaimTimeoutError as error:
            error.add_note(f"It waited for {timeout_s:g} s. timeout_s says how long; None: for ever.")
            raise
        tags = open_tags(claimed.tags, allow_pickle=self._allow_pickle)
        return KVBatchMeta._adopt(partition_id, task_name, claimed.ids, names, tags)

    def consumed(self, link: Link, partition_id: str, task_names: list[str]) -> Call[bool]:
        names = check_names("task_names", task_names)
        return bool((yield from ask(wire.Consumed(partition_id, names), wire.Done)).value)

    def put(
        self,
        link: Link,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None,
        tags: list[dict[str, Any]] | None,
        *,
        timeout_s: float,
        must_exist: bool = False,
        appends: bool = False,
        finishes: bool = True,
    ) -> Call[KVBatchMeta]:
        if appends and fields is None:
            raise InvalidRequestError("append_samples needs the fields that grow, as a TensorDict, not None")
        deadline = time.monotonic() + check_timeout(timeout_s)
        ids = check_ids(sample_ids)
        sealed = None
        if tags is not None:
            if isinstance(tags, Mapping):
                raise InvalidRequestError("tags must be a list with a dict for each sample, not one dict")
            if len(tags) != len(ids):
                raise InvalidRequestError(
                    f"{len(tags)} tags for {len(ids)} sample_ids; it needs one per sample"
                )
            sealed = plain_tags(tags, allow_pickle=self._allow_pickle)
        for attempt in range(_WRITE_ATTEMPTS):
            version, spec = yield from link.describe(partition_id)
            columns: list[EncodedColumn] = []
            if fields is not None:
                encode = partial(self._encode, link, ids, fields, spec)
                about = partial(bytes_to_encode, fields) if self.row_checks is None else _very_many
                columns = yield MoveBytes(encode, about)
            commit = wire.Commit(
                partition_id,
                version,
                ids,
                [column.name for column in columns],
                [column.layout for column in columns],
                None,
                0,
                0.0,
                sealed,
                must_exist=must_exist,
                appends=appends,
                finishes=finishes,
            )
            if are_many(ids):
                commit.named = yield from many.name(ids, sealed)
                commit.ids, commit.tags = [], None
            # From the second attempt on without a spare place, which may have been the reason for it.
            if not ids or (
                yield from self._write_and_commit(link, columns, commit, deadline, spare_allowed=not attempt)
            ):
                break
            # Registered again meanwhile, perhaps with another vocabulary: look, and encode anew.
            link.specs.pop(partition_id, None)
        else:
            raise InvalidRequestError(f"partition {partition_id!r} is registered again and again")
        names = None if fields is None else commit.fields
        self._warn_undeclared(spec, names or ())
        known = [{} for _ in ids] if sealed is None else open_tags(sealed, allow_pickle=self._allow_pickle)
        return KVBatchMeta._adopt(partition_id, None, list(ids), names, known)

    def _encode(
        self, link: Link, ids: Sequence[str], fields: TensorDict, spec: PartitionSpec
    ) -> list[EncodedColumn]:
        columns = encode_columns(
            fields,
            len(ids),
            spec.enums,
            allow_pickle=self._allow_pickle,
            offsets_in_block=link.storage.keeps_offsets,
        )
        return columns if self.row_checks is None else [with_sums(column, ids) for column in columns]

    def _write_and_commit(
        self,
        link: Link,
        columns: Sequence[EncodedColumn],
        commit: wire.Commit,
        deadline: float,
        *,
        spare_allowed: bool,
    ) -> Call[bool]:
        """Write and commit; False if the partition or the place is not what the client thought it was."""
        used = sum([column.nbytes for column in columns])
        place: Place | None = None
        asked = is_spare = False
        writing = committing = started = time.perf_counter()
        try:
            if columns:
                # A put whose rows are all empty has no bytes, and a place all the same.
                used = max(used, 1)
                place = link.take_spare(used) if spare_allowed else None
                is_spare = place is not None
                while True:
                    if place is None:
                        left = max(deadline - time.monotonic(), 0.0)
                        reserve = wire.Reserve(used, left, commit.partition_id, commit.ids, commit.named)
                        place = (yield from ask(reserve, wire.Reserved, waits_s=left)).place
                    began = yield MoveBytes(partial(_write, link, place, columns, deadline), lambda: used)
                    if isinstance(began, float):
                        break
                    if isinstance(began, UnitsDiedError):
                        # The service has not known it, or the place would be in others.
                        yield from ask(wire.Lost(began.loss), wire.Done)
                        yield from ask(wire.Unreserve(place.number), wire.Done)
                        place, is_spare = None, False
                        continue
                    # The machine has less memory than the plane may use. Nobody says when it has more again.
                    yield from ask(wire.Unreserve(place.number, out_of_pages=True), wire.Done)
                    place, is_spare = None, False
                    if time.monotonic() >= deadline:
                        raise CapacityTimeoutError(str(began))
                    yield MoveBytes(partial(time.sleep, _OUT_OF_PAGES_S), _very_many)
                writing = began
                committing = time.perf_counter()
                commit.place, commit.used = place.number, used
                # A little more than this put, because the next ragged batch is never of the same size.
                commit.want = min(used + used // 8, self.spare_limit) if used <= self.spare_limit else 0
            commit.timeout_s = max(deadline - time.monotonic(), 0.0)
            asked = True
            answer = yield Exchange(commit, commit.timeout_s)
        except GeneratorExit:
            raise  # nobody drives this call any more: the client is gone, and its places with it
        except BaseException as error:
            # A service that has not answered the commit is not asked again.
            gone = asked and isinstance(error, PlaneConnectionError)
            if commit.named is not None and not gone:
                yield Undo(wire.Unname(commit.named))
            if place is not None and not gone:
                # Nothing happens if the commit has come through after all.
                yield Undo(wire.Unreserve(place.number))
                if is_spare and not asked:
                    # It may have been revoked: then the service knows nothing of it, and nobody clears it.
                    with contextlib.suppress(DataPlaneError):
                        link.storage.discard(place)
            raise
        if isinstance(answer, wire.Failure):
            if answer.kind in ("StaleSpecError", "StalePlaceError"):
                if place is not None:
                    with contextlib.suppress(DataPlaneError):
                        link.storage.discard(place)
                return False
            self.transfer_stats.record_failed_transfer()
            raise wire.error_of(answer)
        assert isinstance(answer, wire.Done)
        if answer.spare is not None:
            link.spare = answer.spare
        if columns:
            post_s = time.perf_counter() - committing + writing - started
            self.transfer_stats.record_transfer(
                TransferRecord(used, len(columns), post_s, committing - writing)
            )
        return True

    def _warn_undeclared(self, spec: PartitionSpec, names: Sequence[str]) -> None:
        """Warn once per partition and field about fields that nobody declared."""
        if all(map(spec.fields.__contains__, names)):
            return
        for name in names:
            if name not in spec.fields and (spec.partition_id, name) not in self._warned:
                self._warned.add((spec.partition_id, name))
                warn_caller(
                    f"field {name!r} of partition {spec.partition_id!r} was not declared; "
                    f"declared are {spec.fields}",
                    UserWarning,
                )

    def get(
        self, link: Link, sample_ids: list[str], partition_id: str, select_fields: list[str]
    ) -> Call[TensorDict]:
        names = check_names("select_fields", select_fields)
        if not names:
            raise InvalidRequestError("select_fields is empty; name the fields to read")
        ids = check_ids(sample_ids, distinct=False)
        started = time.perf_counter()
        if are_many(ids):
            located, release = yield from many.locate_many(link, partition_id, ids, names)
        else:
            located = yield from ask(wire.Locate(partition_id, ids, names), Located)
            release = partial(link.connection.release, located.lease)
        reading = time.perf_counter()
        lease = ReadLease(release)

        def read() -> tuple[dict[str, Any], int]:
            with link.in_use:
                source = link.storage.open(located, lease)
                # The source does not know the assembler: in a cycle, what was read would outlive its reader
                # until the garbage collector came by.
                if self.row_checks is not None:
                    self.row_checks.check(partition_id, ids, names, located, source.read)
                layouts = {block: layout for block, (_, _, layout) in located.blocks.items()}
                assembler = Assembler(layouts, source, allow_pickle=self._allow_pickle)
                paths = located.paths or [""] * len(names)
                columns = {
                    name: assembler.column(name, rows, path)
                    for name, rows, path in zip(names, located.rows, paths, strict=True)
                }
                assembler.finish()
                return columns, source.nbytes

        try:
            columns, nbytes = yield MoveBytes(read, partial(_bytes_of_rows, located, len(ids)))
        except RowsLostError as error:
            lost = list(dict.fromkeys(ids[row] for row in error.rows))
            shown = ", ".join(map(repr, lost[:3])) + (", …" if len(lost) > 3 else "")
            if error.loss:
                yield Undo(wire.Lost(error.loss))
            raise SamplesLostError(
                f"{error.message}; lost with it are {len(lost)} of the {len(set(ids))} samples asked for: "
                f"{shown}"
            ) from error
        finally:
            lease.done()
        if located.blocks:
            self.transfer_stats.record_transfer(
                TransferRecord(nbytes, len(located.blocks), reading - started, time.perf_counter() - reading)
            )
        # Not the constructor: it asks every nested tensor for its shape, which takes longer than reading it.
        # What it would check, that every column has as many rows, is known here.
        return TensorDict._new_unsafe(columns, batch_size=torch.Size([len(ids)]))

    def clear(self, link: Link, sample_ids: list[str] | None, partition_id: str) -> Call[None]:
        ids = None if sample_ids is None else check_ids(sample_ids, distinct=False)
        if ids is not None and are_many(ids):
            yield from many.clear(partition_id, ids)
            return
        cleared = (yield from ask(wire.Clear(partition_id, ids), wire.Done)).value
        if ids is None and not cleared:
            warn_caller(f"nothing to clear in partition {partition_id!r}", UserWarning)

    def peek(
        self,
        link: Link,
        partition_id: str,
        where: Mapping[str, Any] | None,
        fields: list[str] | None,
        limit: int | None,
        order: str | None,
    ) -> Call[KVBatchMeta]:
        names = None if fields is None else check_names("fields", fields)
        _check_limit(limit)
        request = wire.Peek(partition_id, _plain_where(where), names or [], limit, order)
        seen = yield from ask(request, wire.Claimed)
        tags = open_tags(seen.tags, allow_pickle=self._allow_pickle)
        return KVBatchMeta._adopt(partition_id, None, seen.ids, names, tags)

    def advance(self, link: Link, partition_id: str, version: int) -> Call[None]:
        if type(version) is not int:
            raise InvalidRequestError(f"version must be an integer, not {version!r}")
        yield from ask(wire.Advance(partition_id, version), wire.Done)

    def close_group(
        self, link: Link, partition_id: str, group: str | int, reason: str, fields: list[str] | None
    ) -> Call[int]:
        if type(group) not in (str, int) or not isinstance(reason, str) or not reason:
            raise InvalidRequestError(
                f"a group is a string or an integer and the reason a text, not {group!r} and {reason!r}"
            )
        names = check_names("fields", fields or [])
        left: int = (yield from ask(wire.CloseGroup(partition_id, group, reason, names), wire.Done)).value
        return left

    def should_abort(self, link: Link, sample_ids: list[str], partition_id: str) -> Call[list[str]]:
        ids = check_ids(sample_ids, distinct=False)
        return (yield from many.should_abort(partition_id, ids))

    def evicted(self, link: Link, partition_id: str, limit: int | None) -> Call[KVBatchMeta]:
        _check_limit(limit)
        told = yield from ask(wire.Evicted(partition_id, limit), wire.Claimed)
        tags = open_tags(told.tags, allow_pickle=self._allow_pickle)
        return KVBatchMeta._adopt(partition_id, None, told.ids, None, tags)

    def count(self, link: Link, partition_id: str, where: Mapping[str, Any] | None) -> Call[int]:
        counted: int = (yield from ask(wire.Count(partition_id, _plain_where(where)), wire.Done)).value
        return counted

    def unclaim(self, link: Link, meta: KVBatchMeta, is_finished: bool = False) -> Call[None]:
        if meta.task_name is None:
            raise InvalidRequestError("unclaim needs a meta that claim_meta returned; this one has no task")
        ids = check_ids(meta.sample_ids, distinct=False)
        yield from many.unclaim(meta.partition_id, meta.task_name, ids, is_finished)

    def drop(self, link: Link, partition_id: str) -> Call[None]:
        yield from ask(wire.DropPartition(partition_id), wire.Done)
        link.specs.pop(partition_id, None)

    def value(self, link: Link, request: wire.Request) -> Call[Any]:
        return (yield from ask(request, wire.Done)).value


def _check_limit(limit: int | None) -> None:
    if limit is not None and (type(limit) is not int or limit < 0):
        raise InvalidRequestError(f"limit must be an integer of at least 0, or None, not {limit!r}")


def _plain_where(where: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Conditions as they travel; refused here, with the caller's own values in the message."""
    compile_where(where)
    return None if where is None else {tag: _plain(condition) for tag, condition in where.items()}


def _write(
    link: Link, place: Place, columns: Sequence[EncodedColumn], deadline: float
) -> float | OutOfPagesError | UnitsDiedError:
    """Fill a place, and say when that began: other uses of the storage may have to end first. That there is
    no memory, or that a part of the storage has died, is no failure yet."""
    with link.in_use:
        began = time.perf_counter()
        try:
            link.storage.write(place, columns, deadline)
        except (OutOfPagesError, UnitsDiedError) as error:
            return error
        return began


def _very_many() -> int:
    """So many bytes that an event loop leaves them to a thread."""
    return 2**30


def _bytes_of_rows(located: Located, count: int) -> int:
    """At most about how many bytes ``count`` rows of these blocks have, or cost as much to put together."""
    total = 0
    for _, _, layout in located.blocks.values():
        rows = min(count, layout.rows)
        least = OBJECT_BYTES * rows if layout.kind in ("object", "tree") else 0
        total += max(layout.nbytes * rows // max(layout.rows, 1), least)
    return total


def _plain(condition: Any) -> Any:
    """Sets and numpy scalars in a condition, as what msgpack has for them."""
    if isinstance(condition, Mapping):
        return {name: _plain(operand) for name, operand in condition.items()}
    if isinstance(condition, (set, frozenset, tuple, list)):
        return [_plain(item) for item in condition]
    if isinstance(condition, (np.generic, Tensor)):
        return condition.item()
    return condition
