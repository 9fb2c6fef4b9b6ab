"""``NativeTQDataPlaneClient``: document 002 to the letter, on TransferQueue's public interface.

Each call is one of TransferQueue's, so programs that speak TransferQueue themselves see the same samples: a
key is a sample id, a tag is a tag. What it lacks beside our own engines: it asks again and again where ours
are woken, and it promises what TransferQueue promises. :attr:`NativeTQDataPlaneClient.limitations` says what
it refuses; a short read is an error here as everywhere.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlplane.adapters.client import rows_of
from rlplane.adapters.transfer_queue.leaves import _from_wire, _promote_1d_leaves
from rlplane.adapters.transfer_queue.native_queue import RunningQueue
from rlplane.caller import warn_caller
from rlplane.control.policies import FlowPolicy
from rlplane.control.rules import PartitionSpec, check_claim, check_ids, check_names, check_timeout
from rlplane.errors import (
    ClaimTimeoutError,
    ClientClosedError,
    InvalidRequestError,
    MissingDataError,
    PlaneConnectionError,
    UnknownFieldError,
    UnknownPartitionError,
    UnknownTaskError,
)
from rlplane.interfaces import DEFAULT_TIMEOUT_S, DataPlaneClient, DataPlaneConfig, KVBatchMeta
from rlplane.storage.assembly import stack_objects

_NOTHING = "rlplane_nothing"  # a field that is written to samples that have none, to clear them
_ANY_ORDER = "TransferQueue hands samples out by their indexes, and uses indexes again that were cleared"
_UNCOUNTED = "TransferQueue does not count what was written: a tail is known only while nothing was cleared"
_NO_LAYOUT = "TransferQueue keeps rows, and not how the column was laid out that they came in"
_PICKLES = "TransferQueue pickles what it is given, whatever it is"
_NOT_PROMISED = {
    "a_claim_that_sees_a_sample_sees_its_fields_and_tags": _ANY_ORDER,
    "a_sample_is_handed_to_a_task_once": _ANY_ORDER,
    "a_tail_waits_until_all_of_it_is_ready": _ANY_ORDER,
    "a_waiting_claim_is_woken_by_the_write_that_completes_its_batch": _ANY_ORDER,
    "a_writer_that_changes_what_it_wrote_changes_nothing": _ANY_ORDER,
    "tags_of_every_kind_come_back_equal": _ANY_ORDER,
    "the_close_of_a_client_leaves_the_planes_of_others_up": _ANY_ORDER,
    "the_close_of_a_worker_leaves_the_plane_up": _ANY_ORDER,
    "the_count_of_expected_samples_starts_again_with_a_registration": _ANY_ORDER,
    "what_is_ready_first_is_claimed_first": _ANY_ORDER,
    "a_cleared_sample_was_written_all_the_same": _UNCOUNTED,
    "a_tail_does_not_wait_for_samples_that_were_cleared": _UNCOUNTED,
    "nothing_is_consumed_before_anything_was_written": _UNCOUNTED,
    "samples_of_an_earlier_registration_belong_to_the_tail_when_they_are_live": _UNCOUNTED,
    "dense_and_nested_rows_of_one_field_come_back_jagged": _NO_LAYOUT,
    "empty_rows_stay_empty_rows": _NO_LAYOUT,
    "nested_rows_come_back_jagged": _NO_LAYOUT,
    "rows_come_in_the_order_asked_also_twice": _NO_LAYOUT,
    "rows_of_several_dtypes_are_not_read_as_one_tensor": _NO_LAYOUT,
    "an_object_that_may_not_travel_is_refused_and_nothing_is_written": _PICKLES,
    "errors_are_of_the_classes_in_the_tree": _PICKLES,
    "a_task_that_comes_back_starts_anew": "TransferQueue never forgets what a task has consumed",
}
_NO_EMPTY = "TransferQueue's way to Mooncake cannot store a tensor without elements"
_NOT_PROMISED_ON_MOONCAKE = {
    "a_column_of_scalars_stays_a_column_of_scalars": "a row without a dimension travels to Mooncake as one "
    "of length 1, so columns of shape (N, 1) come back as (N,)",
    "columns_that_are_views_are_written_as_they_look": _NO_EMPTY,
    "nested_rows_may_differ_in_every_dimension": _NO_EMPTY,
    "rows_of_many_dimensions_keep_their_shape": _NO_EMPTY,
    "trees_come_back_equal_with_tensors_as_tensors": "TransferQueue does not find a row again that is a "
    "tensor in a column of objects",
    "writing_a_field_again_replaces_it_and_leaves_the_others": "TransferQueue reads a row from Mooncake with "
    "the size that the field had at first",
}


class NativeTQDataPlaneClient(DataPlaneClient):
    """A client of a TransferQueue, whoever started it.

    Args:
        cfg: The config, with ``transfer_queue.native: true``.
        bootstrap: True joins the TransferQueue of the Ray cluster, or starts one if there is none; False
            joins only. What was started here ends with ``close``, and nothing else does.
    """

    limitations = frozenset(
        {
            "append_samples",
            "enums",
            "finish_claims",
            "finish_partition",
            "flow",
            "groups",
            "max_tokens",
            "must_exist",
            "order",
            "ranks",
            "reuse",
            "short_groups",
            "where",
            # Leaves of trees, nested TensorDicts.
            "a_leaf_is_read_alone",
            "a_leaf_that_a_row_does_not_have_is_an_error",
            "a_tensor_that_rows_share_is_held_once",
            "every_form_of_a_column_of_trees_is_one_tree_per_row",
            # Claims that require no field: these look by one whether nothing was written.
            "a_row_count_that_differs_from_the_ids_is_refused_and_nothing_is_written",
            "a_single_object_for_all_rows_is_refused_with_the_way_to_write_it",
            "a_write_without_fields_writes_tags_alone",
            "an_empty_write_writes_nothing_and_returns_an_empty_meta",
            "an_id_that_is_not_a_non_empty_string_is_refused",
            "an_id_that_is_there_twice_is_refused_and_nothing_is_written",
            "an_object_column_without_one_entry_per_row_is_refused",
            "live_samples_survive_a_registration",
            "no_reader_sees_a_write_in_part",
            "tags_of_another_length_are_refused_and_nothing_is_written",
            "without_required_fields_any_live_sample_is_ready",
        }
    )
    """What is refused with ``NotImplementedError``, in the words of the conformance suite."""
    not_promised: Mapping[str, str] = _NOT_PROMISED
    """What TransferQueue does in another way, and why, by the name of the suite's check. A client on Mooncake
    has a longer list."""

    def __init__(self, cfg: DataPlaneConfig, *, bootstrap: bool = True) -> None:
        self._cfg = cfg
        self._interval_s = float(cfg["claim_meta_poll_interval_s"])
        self._queue: RunningQueue | None = RunningQueue(cfg, bootstrap=bootstrap)
        # A row without a dimension does not survive TransferQueue's way to Mooncake.
        self._promote_1d = self._queue.backend != "SimpleStorage"
        if self._promote_1d:
            self.not_promised = _NOT_PROMISED | _NOT_PROMISED_ON_MOONCAKE
        self._specs: dict[str, PartitionSpec] = {}
        self._written: dict[str, dict[str, None]] = {}

    # By task

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
        *,
        flow: FlowPolicy | Mapping[str, Any] | None = None,
        produces: dict[str, list[str]] | None = None,
    ) -> None:
        """Make the partition. TransferQueue knows no more of it: this client remembers the rest, and checks
        what it is asked."""
        spec = PartitionSpec.checked(partition_id, fields, num_samples, consumer_tasks, grpo_group_size)
        refused = {"grpo_group_size": grpo_group_size, "enums": enums, "flow": flow, "produces": produces}
        for name, value in refused.items():
            if value:
                raise self._unsupported(f"{name}: TransferQueue's sampler decides what goes together")
        with self._errors():
            # No samples, but the partition is there: for those who ask for it before anybody writes.
            self._client().get_meta(data_fields=[], batch_size=0, partition_id=partition_id, mode="insert")
        self._specs[partition_id] = spec

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        *,
        where: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        order: str | None = None,
        dp_world: int | None = None,
        step: str | int | None = None,
        max_uses: int = 1,
        repeat_where: Mapping[str, Any] | None = None,
        split_groups: bool = False,
    ) -> KVBatchMeta:
        """Ask TransferQueue every ``claim_meta_poll_interval_s`` until it has enough."""
        names = check_names("required_fields", required_fields)
        given = {"where": where, "max_tokens": max_tokens, "order": order, "step": step}
        given["max_uses"] = None if max_uses == 1 else max_uses
        for name, value in given.items():
            if value is not None:
                raise self._unsupported(f"claim_meta with {name}")
        if not names:
            raise self._unsupported("claim_meta without required_fields")
        patience = float("inf") if timeout_s is None else check_timeout(timeout_s)
        deadline = time.monotonic() + patience
        self._check_claim(partition_id, task_name, names, batch_size)
        while True:
            ready, is_tail = self._count_ready(partition_id, task_name, names)
            wanted = min(ready, batch_size)
            if wanted and (wanted == batch_size or is_tail or not blocking):
                claimed = self._fetch(partition_id, task_name, names, wanted)
                if claimed is not None:
                    return claimed
                continue  # somebody else was faster
            if not blocking:
                return KVBatchMeta._adopt(partition_id, task_name, [], names, [])
            left = deadline - time.monotonic()
            if left <= 0:
                raise ClaimTimeoutError(
                    f"task {task_name!r} waited for {batch_size} samples of partition {partition_id!r} "
                    f"with fields {names}; {ready} were ready",
                    ready,
                )
            time.sleep(min(self._interval_s, left))

    def _check_claim(self, partition_id: str, task_name: str, names: list[str], batch_size: int) -> None:
        spec = self._specs.get(partition_id)
        if spec is None:
            # Somebody else's: its tasks and fields come into being by being named.
            self._refuse_unknown(partition_id)
            check_claim(PartitionSpec.checked(partition_id, names, 0, []), batch_size, names, names)
            return
        if task_name not in spec.tasks:
            raise UnknownTaskError(
                f"partition {partition_id!r} has no task {task_name!r}; it has {sorted(spec.tasks)}"
            )
        unknown = set(names).difference(spec.fields)
        known = {*spec.fields, *(name for name in unknown if self._was_written(partition_id, name))}
        check_claim(spec, batch_size, known, names)

    def _was_written(self, partition_id: str, name: str) -> bool:
        with self._errors():
            return self._client().get_production_status([name], partition_id)[1] is not None

    def _count_ready(self, partition_id: str, task_name: str, names: list[str]) -> tuple[int, bool]:
        """How many samples have the fields and are not consumed, and whether no more are to be expected."""
        with self._errors():
            indexes, consumed = self._client().get_consumption_status(task_name, partition_id)
            produced_indexes, produced = self._client().get_production_status(names, partition_id)
        if consumed is None or produced is None or not torch.equal(indexes, produced_indexes):
            return 0, False  # or somebody has written between the two: look again
        free = consumed == 0
        ready = int((free & (produced == 1).all(dim=1)).sum())
        spec = self._specs.get(partition_id)
        is_complete = spec is not None and spec.num_samples == len(consumed)
        return ready, is_complete and ready == int(free.sum())

    def _fetch(self, partition_id: str, task_name: str, names: list[str], count: int) -> KVBatchMeta | None:
        with self._errors():
            try:
                found = self._client().get_meta(
                    data_fields=names,
                    batch_size=count,
                    partition_id=partition_id,
                    mode="fetch",
                    task_name=task_name,
                )
            except RuntimeError as error:
                if "Timeout" not in str(error):  # a controller that does not poll has waited, in vain
                    raise
                return None
            if not found.size:
                return None
            try:
                keys = self._client().kv_retrieve_keys(found.global_indexes, partition_id)
            except RuntimeError as error:
                raise MissingDataError(
                    f"task {task_name!r} was given samples of partition {partition_id!r} that were put "
                    f"without keys, and have no ids here: the indexes {found.global_indexes[:5]}"
                ) from error
        tags = [dict(tag) for tag in found.custom_meta]
        return KVBatchMeta._adopt(partition_id, task_name, list(keys), names, tags)

    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        return self.get_samples(*rows_of(meta, select_fields))

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        tasks = check_names("task_names", task_names)
        self._refuse_unknown(partition_id)
        spec = self._specs.get(partition_id)
        for task in tasks:
            if spec is not None and task not in spec.tasks:
                raise UnknownTaskError(
                    f"partition {partition_id!r} has no task {task!r}; it has {spec.tasks}"
                )
        with self._errors():
            return all(self._client().check_consumption_status(task, partition_id) for task in tasks)

    # By key

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        must_exist: bool = False,
    ) -> KVBatchMeta:
        """``kv_batch_put``. TransferQueue does not wait for room: ``timeout_s`` has no effect."""
        check_timeout(timeout_s)
        if must_exist:
            raise self._unsupported("put_samples with must_exist")
        ids = check_ids(sample_ids)
        if tags is not None and len(tags) != len(ids):
            raise InvalidRequestError(f"{len(tags)} tags for {len(ids)} sample_ids; it needs one per sample")
        self._refuse_unknown(partition_id)
        columns = None if fields is None else self._checked_columns(fields, len(ids))
        self._warn_undeclared(partition_id, columns)
        if ids and (columns is not None or tags is not None):
            with self._errors():
                self._tq().kv_batch_put(ids, partition_id, fields=columns, tags=_copied(tags))
            self._written.setdefault(partition_id, {}).update(dict.fromkeys(ids))
        names = None if columns is None else list(columns.keys())
        known = [{} for _ in ids] if tags is None else _copied(tags)
        return KVBatchMeta._adopt(partition_id, None, list(ids), names, known)

    def _checked_columns(self, fields: TensorDict, count: int) -> TensorDict:
        if not isinstance(fields, TensorDict):
            raise InvalidRequestError(f"fields must be a TensorDict, not a {type(fields).__name__}")
        if tuple(fields.batch_size) != (count,):
            raise InvalidRequestError(
                f"fields has batch_size {list(fields.batch_size)} for {count} sample_ids"
            )
        columns: dict[str, Any] = {}
        for name, value in fields.items():
            if isinstance(value, TensorDict):
                raise self._unsupported(f"trees, such as field {name!r}")
            if isinstance(value, NonTensorData) and not isinstance(value, NonTensorStack):
                held = value.data
                if not isinstance(held, (list, tuple, np.ndarray)) or len(held) != count:
                    raise InvalidRequestError(
                        f"field {name!r} holds one object for {count} rows; write NonTensorStack(*rows)"
                    )
                value = stack_objects(held.tolist() if isinstance(held, np.ndarray) else list(held))
            columns[name] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
        plain = TensorDict(columns, batch_size=[count])
        return _promote_1d_leaves(plain) if self._promote_1d else plain

    def _warn_undeclared(self, partition_id: str, columns: TensorDict | None) -> None:
        spec = self._specs.get(partition_id)
        if spec is None or columns is None:
            return
        extra = [str(name) for name in columns.keys() if name not in spec.fields]  # noqa: SIM118
        if extra:
            self._specs[partition_id] = spec.extended(extra, [])
            for name in extra:
                warn_caller(
                    f"field {name!r} of partition {partition_id!r} was not declared; "
                    f"declared are {spec.fields}",
                    UserWarning,
                )

    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        """``kv_batch_get``. TransferQueue leaves out what is not there; here that is an error."""
        names = check_names("select_fields", select_fields)
        if not names:
            raise InvalidRequestError("select_fields is empty; name the fields to read")
        ids = check_ids(sample_ids, distinct=False)
        self._refuse_unknown(partition_id)
        if not ids:
            return TensorDict({}, batch_size=[0])
        distinct = list(dict.fromkeys(ids))
        try:
            with self._errors():
                data = self._tq().kv_batch_get(distinct, partition_id, select_fields=list(names))
        except (KeyError, ValueError) as error:
            raise self._missing(distinct, partition_id, names) from error
        if data.batch_size[0] != len(distinct) or not set(data.keys()) >= set(names):
            raise self._missing(distinct, partition_id, names)
        columns = {name: _as_written(data.get(name)) for name in names}
        if len(distinct) < len(ids):
            places = {sample_id: place for place, sample_id in enumerate(distinct)}
            columns = {name: _repeated(value, [places[i] for i in ids]) for name, value in columns.items()}
        read = TensorDict(columns, batch_size=[len(ids)])
        return _from_wire(read) if self._promote_1d else read

    def _missing(self, ids: Sequence[str], partition_id: str, names: Sequence[str]) -> Exception:
        """Why a read was short."""
        with self._errors():
            there = self._tq().kv_list(partition_id).get(partition_id, {})
        gone = [sample_id for sample_id in ids if sample_id not in there]
        if gone:
            return MissingDataError(
                f"partition {partition_id!r} does not have {gone[:3]} ({len(gone)} of {len(ids)} asked for)"
            )
        unknown = [name for name in names if not self._was_written(partition_id, name)]
        spec = self._specs.get(partition_id)
        for name in unknown:
            if "." in name and self._was_written(partition_id, name.partition(".")[0]):
                return self._unsupported(f"reading a leaf of a tree, such as {name!r}")
        if unknown and (spec is None or unknown[0] not in spec.fields):
            return UnknownFieldError(f"partition {partition_id!r} has no field {unknown[0]!r}")
        return MissingDataError(
            f"some of the fields {list(names)} of partition {partition_id!r} are not written for all of "
            f"{list(ids[:3])}{', …' if len(ids) > 3 else ''}"
        )

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        """``kv_clear``; None clears what this client wrote, or all that there is if it wrote nothing."""
        ids = None if sample_ids is None else check_ids(sample_ids, distinct=False)
        self._refuse_unknown(partition_id)
        mine = self._written.get(partition_id)
        if ids is None:
            ids = list(mine) if mine is not None else self.list_sample_ids(partition_id)
            there = set(self.list_sample_ids(partition_id))
            ids = [sample_id for sample_id in ids if sample_id in there]
            if not ids:
                warn_caller(f"nothing to clear in partition {partition_id!r}", UserWarning)
        if ids:
            self._clear(list(dict.fromkeys(ids)), partition_id)
            for sample_id in ids:
                (mine or {}).pop(sample_id, None)

    def _clear(self, ids: list[str], partition_id: str) -> None:
        try:
            self._tq().kv_clear(ids, partition_id)
        except RuntimeError as error:
            if "field_names" not in str(error):
                raise PlaneConnectionError(f"TransferQueue failed: {error}") from error
        else:
            return
        # On Mooncake, it cannot clear samples at once that have no field in common, nor one that has none.
        if len(ids) == 1:
            with self._errors():
                nothing = TensorDict({_NOTHING: torch.zeros(1, 1)}, batch_size=[1])
                self._tq().kv_batch_put(ids, partition_id, fields=nothing)
                self._tq().kv_clear(ids, partition_id)
            return
        for sample_id in ids:
            self._clear([sample_id], partition_id)

    def list_sample_ids(self, partition_id: str) -> list[str]:
        self._refuse_unknown(partition_id)
        with self._errors():
            return list(self._tq().kv_list(partition_id).get(partition_id, {}))

    def close(self) -> None:
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.close()

    # The TransferQueue of this process

    def _tq(self) -> Any:
        if self._queue is None:
            raise ClientClosedError("this client is closed; build a new one with build_data_plane_client")
        return self._queue.module

    def _client(self) -> Any:
        return self._tq().get_client()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """TransferQueue's errors about its own processes, as ours."""
        try:
            yield
        except (RuntimeError, AssertionError) as error:
            if isinstance(error, NotImplementedError):
                raise
            raise PlaneConnectionError(f"TransferQueue failed: {error}") from error

    def _refuse_unknown(self, partition_id: str) -> None:
        self._tq()
        if not isinstance(partition_id, str) or partition_id not in self._specs:
            with self._errors():
                known = self._client().get_partition_list()
            if partition_id not in known:
                raise UnknownPartitionError(
                    f"partition {partition_id!r} is neither registered here nor in the TransferQueue, "
                    f"which has {sorted(known)[:8]}"
                )

    def __reduce__(self) -> tuple[Callable[..., DataPlaneClient], tuple[DataPlaneConfig]]:
        return _join, (self._cfg,)

    def __repr__(self) -> str:
        return f"NativeTQDataPlaneClient({'closed' if self._queue is None else self._queue.backend})"


def _join(cfg: DataPlaneConfig) -> NativeTQDataPlaneClient:
    return NativeTQDataPlaneClient(cfg, bootstrap=False)


def _copied(tags: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    return None if tags is None else KVBatchMeta("", None, [""] * len(tags), tags=list(tags)).tags


def _as_written(value: Any) -> Any:
    """Rows of one length, which TransferQueue returns nested, as the dense column that they were."""
    if isinstance(value, (NonTensorData, NonTensorStack)):
        return stack_objects(value.tolist())
    if not isinstance(value, torch.Tensor) or not value.is_nested:
        return value
    rows = value.unbind()
    if len({row.shape for row in rows}) == 1:
        return torch.stack(rows)
    return value


def _repeated(value: Any, places: list[int]) -> Any:
    if isinstance(value, torch.Tensor) and not value.is_nested:
        return value[places]
    if isinstance(value, torch.Tensor):
        rows = value.unbind()
        return torch.nested.as_nested_tensor([rows[place] for place in places], layout=value.layout)
    items = value.tolist() if hasattr(value, "tolist") else list(value)
    return stack_objects([items[place] for place in places])
