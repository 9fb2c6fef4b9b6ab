"""Adapters that are wrong on purpose, each in one way, with the check that is meant to catch it.

Each is the reference adapter with a step replaced. Most of these faults were seen in real stores.
"""

from __future__ import annotations

import time
import warnings

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from tests.unit.reference_adapter import ReferenceClient, Row

from rlplane.errors import ClaimTimeoutError, UnknownFieldError
from rlplane.interfaces import KVBatchMeta, PartitionStatus

CAUGHT_BY: dict[type[ReferenceClient], str] = {}
# Those that make the check wait for its deadline: with them, time is scaled.
KEEP_WAITING: set[type[ReferenceClient]] = set()


def caught_by(check: str, *, keeps_waiting: bool = False):
    """Say which check must catch the adapter, and whether it finds out by its deadline."""

    def remember(adapter: type[ReferenceClient]) -> type[ReferenceClient]:
        CAUGHT_BY[adapter] = check
        if keeps_waiting:
            KEEP_WAITING.add(adapter)
        return adapter

    return remember


# Registering.


@caught_by("live_samples_survive_a_registration")
class RegistrationDropsSamples(ReferenceClient):
    def carry_over(self, old, new):
        pass


@caught_by("a_task_that_stays_keeps_its_cursor")
class RegistrationDropsCursors(ReferenceClient):
    def carry_over(self, old, new):
        super().carry_over(old, new)
        for sample in new.samples.values():
            sample.claimed_by.clear()


@caught_by("a_task_that_comes_back_starts_anew")
class RegistrationRemembersCursorsOfDroppedTasks(ReferenceClient):
    def carry_over(self, old, new):
        claimed = {i: set(sample.claimed_by) for i, sample in old.samples.items()}
        super().carry_over(old, new)
        for i, sample in new.samples.items():
            sample.claimed_by = claimed[i]


@caught_by("the_count_of_expected_samples_starts_again_with_a_registration", keeps_waiting=True)
class RegistrationGoesOnCounting(ReferenceClient):
    def carry_over(self, old, new):
        super().carry_over(old, new)
        new.written = old.written


@caught_by("registering_again_replaces_the_schema")
class RegistrationAddsToTheSchema(ReferenceClient):
    def carry_over(self, old, new):
        super().carry_over(old, new)
        new.fields = [*old.fields, *new.fields]


@caught_by("an_undeclared_field_may_be_written_with_one_warning")
class WarnsAboutEveryWrite(ReferenceClient):
    def warn_undeclared(self, partition_id, flow, rows):
        flow.warned.clear()
        super().warn_undeclared(partition_id, flow, rows)


@caught_by("a_string_outside_an_enum_is_refused_and_nothing_is_written")
class TakesAnyStringForAnEnum(ReferenceClient):
    def register_partition(self, *args, enums=None, **kwargs):
        super().register_partition(*args, **kwargs)


# Writing.


@caught_by("a_claim_that_sees_a_sample_sees_its_fields_and_tags")
class WritesTagsLate(ReferenceClient):
    def put_samples(self, sample_ids, partition_id, fields=None, tags=None, **kwargs):
        super().put_samples(sample_ids, partition_id, fields, **kwargs)
        time.sleep(0.02)
        return super().put_samples(sample_ids, partition_id, None, tags, **kwargs)


@caught_by("no_reader_sees_a_write_in_part")
class WritesRowByRow(ReferenceClient):
    def put_samples(self, sample_ids, partition_id, fields=None, tags=None, **kwargs):
        for row, sample_id in enumerate(sample_ids):
            one = None if fields is None else fields[row : row + 1]
            super().put_samples([sample_id], partition_id, one, tags and tags[row : row + 1], **kwargs)
            time.sleep(0.001)
        return KVBatchMeta(partition_id, None, sample_ids, tags=tags)


@caught_by("no_reader_sees_a_write_in_part")
class WritesFieldByField(ReferenceClient):
    def put_samples(self, sample_ids, partition_id, fields=None, tags=None, **kwargs):
        for name in list(fields.keys()):
            super().put_samples(sample_ids, partition_id, fields.select(name), tags, **kwargs)
            time.sleep(0.001)
        return KVBatchMeta(partition_id, None, sample_ids, tags=tags)


@caught_by("an_object_that_may_not_travel_is_refused_and_nothing_is_written")
class WritesWhatCameBeforeTheError(ReferenceClient):
    def columns(self, flow, sample_ids, fields):
        for name in list(fields.keys()):
            column = super().columns(flow, sample_ids, fields.select(name))
            self.commit(flow, sample_ids, column, [{} for _ in sample_ids])
        return super().columns(flow, sample_ids, fields)


@caught_by("a_late_write_does_not_bring_cleared_samples_back")
class BringsClearedSamplesBack(ReferenceClient):
    def check_exists(self, flow, sample_ids):
        pass


@caught_by("a_claim_takes_as_many_samples_as_fit_into_its_tokens")
class TakesOneTooMany(ReferenceClient):
    def fitting(self, flow, claim):
        taken, is_full = super().fitting(flow, claim)
        if claim.max_tokens is None or not is_full:
            return taken, is_full
        return self.ready(flow, claim)[: len(taken) + 1], is_full


@caught_by("a_look_shows_what_is_there_and_claims_nothing")
class LooksAtWhatIsUnclaimed(ReferenceClient):
    def peek_meta(self, partition_id, **how):
        seen = super().peek_meta(partition_id, **how)
        samples = self.flow(partition_id).samples
        return seen.subset([n for n, i in enumerate(seen.sample_ids) if not samples[i].claimed_by])


@caught_by("tags_of_another_length_are_refused_and_nothing_is_written")
class PadsTags(ReferenceClient):
    def put_samples(self, sample_ids, partition_id, fields=None, tags=None, **kwargs):
        if tags is not None:
            tags = (tags + [{}] * len(sample_ids))[: len(sample_ids)]
        return super().put_samples(sample_ids, partition_id, fields, tags, **kwargs)


@caught_by("an_id_that_is_there_twice_is_refused_and_nothing_is_written")
class TakesDuplicates(ReferenceClient):
    def check_ids(self, sample_ids):
        pass


@caught_by("a_row_count_that_differs_from_the_ids_is_refused_and_nothing_is_written")
class CutsRowsToTheIds(ReferenceClient):
    def columns(self, flow, sample_ids, fields):
        return super().columns(flow, sample_ids, fields[: len(sample_ids)])


@caught_by("tags_are_merged")
class ReplacesTags(ReferenceClient):
    def merge_tags(self, sample, tags):
        sample.tags = dict(tags)


@caught_by("a_field_written_again_does_not_hand_a_claimed_sample_out_again")
class QueuesOverwrittenSamplesAgain(ReferenceClient):
    def commit(self, flow, sample_ids, rows, tags):
        super().commit(flow, sample_ids, rows, tags)
        for sample_id in sample_ids if rows else ():
            flow.samples[sample_id].claimed_by.clear()


@caught_by("a_sample_that_is_written_again_keeps_its_place")
class SendsOverwrittenSamplesToTheBack(ReferenceClient):
    def commit(self, flow, sample_ids, rows, tags):
        super().commit(flow, sample_ids, rows, tags)
        for sample_id in sample_ids:
            for name in rows:
                self.store.clock += 1
                flow.samples[sample_id].rows[name].ready_at = self.store.clock


@caught_by("a_write_without_fields_writes_tags_alone")
class ForgetsTagsWithoutFields(ReferenceClient):
    def commit(self, flow, sample_ids, rows, tags):
        known = [i for i in sample_ids if rows or i in flow.samples]
        super().commit(flow, known, rows, [tags[sample_ids.index(i)] for i in known])


@caught_by("a_write_to_a_full_plane_waits_for_a_clear")
class HasNoCapacity(ReferenceClient):
    def wait_for_room(self, flow, sample_ids, rows, timeout_s):
        pass


@caught_by("a_write_without_new_samples_does_not_wait", keeps_waiting=True)
class WaitsForRoomToOverwrite(ReferenceClient):
    def wait_for_room(self, flow, sample_ids, rows, timeout_s):
        super().wait_for_room(flow, [f"new {i}" for i in sample_ids], rows, timeout_s)


@caught_by("a_write_that_fits_is_not_held_up_for_ever_by_a_larger_one", keeps_waiting=True)
class ServesWaitingWritesStrictlyInTurn(ReferenceClient):
    def wait_for_room(self, flow, sample_ids, rows, timeout_s):
        line, me = vars(self.store).setdefault("line", []), object()
        line.append(me)
        try:
            self.store.changed.wait_for(lambda: line[0] is me, timeout_s)
            super().wait_for_room(flow, sample_ids, rows, timeout_s)
        finally:
            line.remove(me)


@caught_by("a_plane_that_is_full_of_new_samples_can_finish_them", keeps_waiting=True)
class KeepsNothingForWhatExists(ReferenceClient):
    def kept_for_live(self):
        return 0


# Columns.


@caught_by("dense_columns_of_every_dtype_come_back_as_they_went_in")
class MakesDenseColumnsNested(ReferenceClient):
    def stack(self, rows):
        if rows[0].ndim:
            return torch.nested.nested_tensor(rows, layout=torch.jagged)
        return super().stack(rows)


@caught_by("dense_columns_of_every_dtype_come_back_as_they_went_in")
class WidensHalfPrecision(ReferenceClient):
    def stack(self, rows):
        column = super().stack(rows)
        return column.float() if column.dtype is torch.bfloat16 else column


@caught_by("a_column_of_scalars_stays_a_column_of_scalars")
class MakesScalarsColumns(ReferenceClient):
    def stack(self, rows):
        column = super().stack(rows)
        return column.unsqueeze(1) if column.ndim == 1 else column


@caught_by("a_column_of_scalars_stays_a_column_of_scalars")
class SqueezesColumns(ReferenceClient):
    def stack(self, rows):
        column = super().stack(rows)
        return column.squeeze(1) if column.ndim == 2 and column.shape[1] == 1 else column


@caught_by("nested_rows_come_back_jagged")
class PadsNestedRows(ReferenceClient):
    def join(self, name, rows):
        column = super().join(name, rows)
        is_nested = isinstance(column, torch.Tensor) and column.is_nested
        return torch.nested.to_padded_tensor(column, 0.0) if is_nested else column


@caught_by("empty_rows_stay_empty_rows")
class DropsEmptyRows(ReferenceClient):
    def join(self, name, rows):
        kept = [row for row in rows if row.kind != "nested" or row.value.numel()]
        return super().join(name, (kept + rows)[: len(rows)])


@caught_by("objects_of_every_kind_come_back_equal")
class LosesObjects(ReferenceClient):
    def copy_out(self, value):
        return None


@caught_by("objects_of_every_kind_come_back_equal")
class MakesTextOfBytes(ReferenceClient):
    def copy_out(self, value):
        return value.decode(errors="replace") if isinstance(value, bytes) else super().copy_out(value)


@caught_by("every_form_of_an_object_column_is_one_object_per_row")
class RepeatsAListOfObjects(ReferenceClient):
    def rows(self, name, column):
        if isinstance(column, NonTensorData) and not isinstance(column, NonTensorStack):
            return [Row(self.own(column.data, name), "object") for _ in range(column.batch_size[0])]
        return super().rows(name, column)

    def own(self, value, name):
        return super().own(value.tolist() if hasattr(value, "tolist") else value, name)


@caught_by("a_single_object_for_all_rows_is_refused_with_the_way_to_write_it")
class RepeatsASingleObject(ReferenceClient):
    def rows(self, name, column):
        if isinstance(column, NonTensorData) and isinstance(column.data, str):
            return [Row(column.data, "object") for _ in range(column.batch_size[0])]
        return super().rows(name, column)


@caught_by("every_form_of_a_text_column_is_one_text_per_row")
class RepeatsAnArrayOfText(ReferenceClient):
    def rows(self, name, column):
        data = column.data if isinstance(column, NonTensorData) else None
        if isinstance(data, np.ndarray) and data.dtype.kind == "U":
            return [Row(data, "object") for _ in data]
        return super().rows(name, column)


@caught_by("trees_come_back_equal_with_tensors_as_tensors")
class MakesListsOfTensorsInRows(ReferenceClient):
    def own(self, value, name):
        return value.tolist() if isinstance(value, torch.Tensor) else super().own(value, name)


@caught_by("a_tensor_that_rows_share_is_held_once")
class KeepsASharedTensorForEachRow(ReferenceClient):
    def own(self, value, name):
        return value.clone() if isinstance(value, torch.Tensor) else super().own(value, name)


@caught_by("a_leaf_that_a_row_does_not_have_is_an_error")
class ReadsNothingWhereALeafIsMissing(ReferenceClient):
    def leaf(self, rows, name):
        return super().leaf(rows, name) or Row(None, "object")


@caught_by("an_object_that_may_not_travel_is_refused_and_nothing_is_written")
class PicklesEverything(ReferenceClient):
    def __init__(self, store):
        store.allow_pickle = True
        super().__init__(store)


# Claiming.


@caught_by("a_sample_is_handed_to_a_task_once")
class ClaimsTwice(ReferenceClient):
    def grant(self, flow, claim, sample_ids):
        claim.granted = sample_ids


@caught_by("many_threads_claim_every_sample_exactly_once")
class ClaimsTwiceWhenHurried(ReferenceClient):
    def claim_meta(self, partition_id, task_name, required_fields, batch_size, *args, **kwargs):
        flow = self.flow(partition_id)
        free = [i for i, s in list(flow.samples.items()) if s.rows and task_name not in s.claimed_by]
        time.sleep(0.001)  # between looking and taking
        for i in free[:batch_size]:
            flow.samples[i].claimed_by.add(task_name)
        return KVBatchMeta(partition_id, task_name, free[:batch_size])


@caught_by("every_task_has_a_cursor_of_its_own")
class HasOneCursorForAllTasks(ReferenceClient):
    def grant(self, flow, claim, sample_ids):
        super().grant(flow, claim, sample_ids)
        for sample_id in sample_ids:
            flow.samples[sample_id].claimed_by |= set(flow.tasks)


@caught_by("the_order_does_not_depend_on_names")
class ClaimsInTheOrderOfNames(ReferenceClient):
    def ready(self, flow, claim):
        return sorted(super().ready(flow, claim))


@caught_by("what_is_ready_first_is_claimed_first")
class ClaimsInTheOrderOfFirstWrites(ReferenceClient):
    def place(self, sample, task, required):
        return 1, sample.born_at


@caught_by("a_claim_returns_the_tags_and_lengths_of_its_samples")
class ClaimsWithoutTags(ReferenceClient):
    def claim_meta(self, *args, **kwargs):
        meta = super().claim_meta(*args, **kwargs)
        meta.tags = None
        return meta


@caught_by("the_last_samples_come_as_a_tail", keeps_waiting=True)
class ForgetsTheTail(ReferenceClient):
    def is_tail(self, flow, claim, ready):
        return False


@caught_by("a_flow_past_the_announced_number_gets_full_batches")
class HandsOutTailsForEver(ReferenceClient):
    def is_tail(self, flow, claim, ready):
        return flow.written >= flow.num_samples and bool(ready)


@caught_by("a_tail_waits_until_all_of_it_is_ready")
class HandsOutATailInParts(ReferenceClient):
    def is_tail(self, flow, claim, ready):
        return flow.written == flow.num_samples and bool(ready)


@caught_by("there_is_no_tail_before_everything_was_written")
class HandsOutWhateverIsReady(ReferenceClient):
    def is_tail(self, flow, claim, ready):
        return bool(ready)


@caught_by("there_is_no_tail_of_nothing")
class HandsOutAnEmptyTail(ReferenceClient):
    def is_tail(self, flow, claim, ready):
        return flow.written == flow.num_samples


@caught_by("a_tail_does_not_wait_for_samples_that_were_cleared", keeps_waiting=True)
class ForgetsToLookAfterAClear(ReferenceClient):
    def clear_samples(self, sample_ids, partition_id):
        self.serving = False
        try:
            super().clear_samples(sample_ids, partition_id)
        finally:
            self.serving = True

    def serve(self, flow):
        if getattr(self, "serving", True):
            super().serve(flow)


@caught_by("a_claim_that_times_out_says_how_many_were_ready_and_claims_nothing", keeps_waiting=True)
class IgnoresTimeouts(ReferenceClient):
    def wait_for_batch(self, partition_id, claim, timeout_s):
        super().wait_for_batch(partition_id, claim, 3600.0)


@caught_by("a_claim_that_times_out_says_how_many_were_ready_and_claims_nothing")
class ClaimsAtATimeout(ReferenceClient):
    def wait_for_batch(self, partition_id, claim, timeout_s):
        try:
            super().wait_for_batch(partition_id, claim, timeout_s)
        except ClaimTimeoutError:
            flow = self.flow(partition_id)
            self.grant(flow, claim, self.ready(flow, claim))
            raise


@caught_by("a_claim_that_times_out_says_how_many_were_ready_and_claims_nothing")
class DoesNotSayWhatWasReady(ReferenceClient):
    def wait_for_batch(self, partition_id, claim, timeout_s):
        try:
            super().wait_for_batch(partition_id, claim, timeout_s)
        except ClaimTimeoutError as error:
            raise ClaimTimeoutError("too late") from error


@caught_by("a_claim_that_timed_out_is_not_served_later", keeps_waiting=True)
class ServesClaimsThatTimedOut(ReferenceClient):
    def wait_for_batch(self, partition_id, claim, timeout_s):
        try:
            super().wait_for_batch(partition_id, claim, timeout_s)
        except ClaimTimeoutError:
            self.flow(partition_id).waiting.append(claim)
            raise


@caught_by("a_waiting_claim_is_woken_by_the_write_that_completes_its_batch", keeps_waiting=True)
class NeverWakesAClaim(ReferenceClient):
    def commit(self, flow, sample_ids, rows, tags):
        super().commit(flow, sample_ids, rows, tags)
        flow.waiting.clear()


@caught_by("waiting_claims_are_served_first_come_first_served")
class ServesTheLastFirst(ReferenceClient):
    def serve(self, flow):
        while any(self.try_to_serve(flow, claim) for claim in reversed(flow.waiting)):
            pass
        self.store.changed.notify_all()


@caught_by("a_claim_on_what_does_not_exist_is_refused_at_once", keeps_waiting=True)
class LooksForFieldsAtTheTimeout(ReferenceClient):
    def check_claim(self, flow, task, required, batch_size, where):
        try:
            super().check_claim(flow, task, required, batch_size, where)
        except UnknownFieldError:
            time.sleep(1.1)  # what is left of the timeout, in the scale of these tests
            raise


@caught_by("only_whole_groups_are_handed_out")
class SplitsGroups(ReferenceClient):
    def ready(self, flow, claim):
        size, flow.group_size = flow.group_size, None
        try:
            return super().ready(flow, claim)
        finally:
            flow.group_size = size


@caught_by("the_tag_makes_the_group_and_else_the_id_does", keeps_waiting=True)
class GroupsByIdOnly(ReferenceClient):
    def group(self, sample_id, tag):
        return super().group(sample_id, {}) or tag.get("group")


@caught_by("a_sample_keeps_the_group_of_its_first_write")
class MovesSamplesBetweenGroups(ReferenceClient):
    def merge_tags(self, sample, tags):
        super().merge_tags(sample, tags)
        sample.group = tags.get("group", sample.group)


@caught_by("every_operator_of_a_condition_works")
class IgnoresConditions(ReferenceClient):
    def holds(self, tags, where):
        return True


@caught_by("all_conditions_must_hold")
class IsContentWithOneCondition(ReferenceClient):
    def holds(self, tags, where):
        return not where or any(super(type(self), self).holds(tags, {k: v}) for k, v in where.items())


@caught_by("tags_count_as_they_are_at_the_claim")
class ChecksConditionsWhenWritten(ReferenceClient):
    def merge_tags(self, sample, tags):
        super().merge_tags(sample, {**tags, "first": sample.tags.get("first", dict(tags))})

    def holds(self, tags, where):
        return super().holds(tags["first"], where)


@caught_by("a_sample_without_the_tag_does_not_match")
class TakesAMissingTagForNone(ReferenceClient):
    def holds(self, tags, where):
        return super().holds({**dict.fromkeys(where), **tags}, where)


@caught_by("a_tag_that_cannot_be_compared_does_not_match")
class StumblesOverTagsThatCannotBeCompared(ReferenceClient):
    def holds(self, tags, where):
        for name, condition in where.items():
            for value in condition.values() if isinstance(condition, dict) else ():
                if name in tags:
                    tags[name] < value  # noqa: B015
        return super().holds(tags, where)


@caught_by("every_member_of_a_group_must_match")
class IsContentWithOneMember(ReferenceClient):
    def matches(self, flow, sample, where):
        members = [other for other in flow.samples.values() if other.group == sample.group]
        return any(self.holds(member.tags, where) for member in members)


# Reading.


@caught_by("rows_come_in_the_order_asked_also_twice")
class ReadsInTheOrderOfWrites(ReferenceClient):
    def get_samples(self, sample_ids, partition_id, select_fields):
        order = {sample_id: n for n, sample_id in enumerate(self.flow(partition_id).samples)}
        ids = sorted(sample_ids, key=lambda sample_id: order.get(sample_id, 0))
        return super().get_samples(ids, partition_id, select_fields)


@caught_by("rows_come_in_the_order_asked_also_twice")
class ReadsAnIdOnce(ReferenceClient):
    def get_samples(self, sample_ids, partition_id, select_fields):
        return super().get_samples(list(dict.fromkeys(sample_ids)), partition_id, select_fields)


@caught_by("fields_are_exactly_those_named_in_that_order")
class ReadsAllFields(ReferenceClient):
    def get_samples(self, sample_ids, partition_id, select_fields):
        samples = self.flow(partition_id).samples
        every = [name for i in sample_ids if i in samples for name in samples[i].rows]
        return super().get_samples(sample_ids, partition_id, list(dict.fromkeys([*select_fields, *every])))


@caught_by("a_missing_sample_is_an_error_that_names_it")
class DropsMissingKeys(ReferenceClient):
    def get_samples(self, sample_ids, partition_id, select_fields):
        samples = self.flow(partition_id).samples
        ids = [sample_id for sample_id in sample_ids if sample_id in samples]
        return super().get_samples(ids, partition_id, select_fields)


@caught_by("an_unproduced_field_is_an_error_that_names_it")
class DropsUnproducedFields(ReferenceClient):
    def get_samples(self, sample_ids, partition_id, select_fields):
        samples = self.flow(partition_id).samples
        names = [n for n in select_fields if all(n in samples[i].rows for i in sample_ids if i in samples)]
        return super().get_samples(sample_ids, partition_id, names) if names else TensorDict({}, [0])


@caught_by("rows_of_several_dtypes_are_not_read_as_one_tensor")
class PromotesDtypes(ReferenceClient):
    def join(self, name, rows):
        if len({str(row.value.dtype) for row in rows if isinstance(row.value, torch.Tensor)}) > 1:
            rows = [Row(row.value.float(), row.kind) for row in rows]
        return super().join(name, rows)


@caught_by("a_read_never_moves_a_cursor")
class ClaimsWhatIsRead(ReferenceClient):
    def get_samples(self, sample_ids, partition_id, select_fields):
        batch = super().get_samples(sample_ids, partition_id, select_fields)
        for sample_id in sample_ids:
            self.flow(partition_id).samples[sample_id].claimed_by |= set(self.flow(partition_id).tasks)
        return batch


@caught_by("a_reader_that_changes_what_it_got_changes_nothing_for_others")
class SharesMemoryBetweenReaders(ReferenceClient):
    def get_samples(self, sample_ids, partition_id, select_fields):
        cache = self.store.__dict__.setdefault("cache", {})
        key = (partition_id, tuple(sample_ids), tuple(select_fields))
        if key not in cache:
            cache[key] = super().get_samples(sample_ids, partition_id, select_fields)
        return cache[key]


@caught_by("a_reader_that_changes_what_it_got_changes_nothing_for_others")
class SharesObjectsBetweenReaders(ReferenceClient):
    def copy_out(self, value):
        return value


@caught_by("a_writer_that_changes_what_it_wrote_changes_nothing")
class SharesMemoryWithTheWriter(ReferenceClient):
    def rows(self, name, column):
        if isinstance(column, torch.Tensor) and not column.is_nested:
            return [Row(row, "dense") for row in column.unbind()]
        return super().rows(name, column)


@caught_by("a_writer_that_changes_what_it_wrote_changes_nothing")
class SharesTagsWithTheWriter(ReferenceClient):
    def own(self, value, name):
        return value if name == "tags" else super().own(value, name)


class LendsItsMemory(ReferenceClient):
    """Reads of a dense column of one row are views of what is stored."""

    def get_samples(self, sample_ids, partition_id, select_fields):
        batch = super().get_samples(sample_ids, partition_id, select_fields)
        for name in select_fields:
            rows = [self.flow(partition_id).samples[i].rows[name] for i in sample_ids]
            if rows and rows[0].kind == "nested":
                self.store.__dict__.setdefault("lent", []).append((rows, batch.get(name)))
        return batch


@caught_by("what_was_read_stays_valid_after_a_clear")
class TakesMemoryBackAtAClear(LendsItsMemory):
    def clear_samples(self, sample_ids, partition_id):
        for _, column in self.store.__dict__.pop("lent", ()):
            column.values().fill_(0)
        super().clear_samples(sample_ids, partition_id)


@caught_by("what_was_read_keeps_the_old_values_after_a_later_write")
class WritesIntoWhatWasRead(LendsItsMemory):
    def commit(self, flow, sample_ids, rows, tags):
        for _, column in self.store.__dict__.pop("lent", ()):
            column.values().fill_(77)
        super().commit(flow, sample_ids, rows, tags)


# The rest.


@caught_by("nothing_is_consumed_before_anything_was_written")
class IsConsumedWhenEmpty(ReferenceClient):
    def check_consumption_status(self, partition_id, task_names):
        return not self.flow(partition_id).samples or super().check_consumption_status(
            partition_id, task_names
        )


@caught_by("a_partition_is_consumed_when_every_task_has_claimed_every_live_sample")
class IsConsumedWhenAnyTaskIsDone(ReferenceClient):
    def check_consumption_status(self, partition_id, task_names):
        return any(super(type(self), self).check_consumption_status(partition_id, [t]) for t in task_names)


@caught_by("a_clear_drops_the_samples_it_names_and_ignores_the_rest")
class StumblesOverMissingIds(ReferenceClient):
    def clear_samples(self, sample_ids, partition_id):
        self.check_there(self.flow(partition_id).samples, sample_ids or [], [])
        super().clear_samples(sample_ids, partition_id)


@caught_by("clearing_none_leaves_what_other_clients_wrote")
class ClearsWhatOthersWrote(ReferenceClient):
    def mine_or_all(self, partition_id, flow):
        return list(flow.samples)


@caught_by("clearing_none_clears_everything_for_a_client_that_wrote_nothing")
class ClearsOnlyWhatItWrote(ReferenceClient):
    def mine_or_all(self, partition_id, flow):
        return [i for i in flow.samples if i in self.wrote.get(partition_id, ())]


@caught_by("clearing_none_of_nothing_warns")
class ClearsNothingInSilence(ReferenceClient):
    def clear_samples(self, sample_ids, partition_id):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().clear_samples(sample_ids, partition_id)


@caught_by("a_cleared_id_that_is_written_again_is_a_new_sample")
class RemembersClearedSamples(ReferenceClient):
    def clear_samples(self, sample_ids, partition_id):
        samples = self.flow(partition_id).samples
        graves = self.store.__dict__.setdefault("graves", {})
        graves.update({i: samples[i].claimed_by for i in sample_ids or () if i in samples})
        super().clear_samples(sample_ids, partition_id)

    def commit(self, flow, sample_ids, rows, tags):
        super().commit(flow, sample_ids, rows, tags)
        for sample_id in sample_ids:
            flow.samples[sample_id].claimed_by |= self.store.__dict__.get("graves", {}).get(sample_id, set())


@caught_by("close_may_be_called_twice")
class ClosesOnce(ReferenceClient):
    def close(self):
        self.check_open()
        super().close()


@caught_by("any_call_after_close_raises")
class WorksAfterClose(ReferenceClient):
    def check_open(self):
        pass


@caught_by("the_close_of_a_worker_leaves_the_plane_up")
class AnyCloseEndsThePlane(ReferenceClient):
    def close(self):
        super().close()
        self.store.flows.clear()


@caught_by("errors_are_of_the_classes_in_the_tree")
class RaisesBareKeyErrors(ReferenceClient):
    def flow(self, partition_id):
        return self.store.flows[partition_id]


@caught_by("live_samples_are_listed_in_the_order_of_their_first_write")
class ListsByName(ReferenceClient):
    def list_sample_ids(self, partition_id):
        return sorted(super().list_sample_ids(partition_id))


@caught_by("the_status_of_a_partition_counts_waiting_claims", keeps_waiting=True)
class ForgetsToCountWaitingClaims(ReferenceClient):
    def partition_status(self, partition_id) -> PartitionStatus:
        status = super().partition_status(partition_id)
        for task in status["tasks"].values():
            task["waiting"] = 0
        return status
