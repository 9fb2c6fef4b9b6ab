"""The operations of the state machine that write, read and clear, each compared with the model. Needs
hypothesis. Those that claim are in :mod:`rlplane.testing.random_claims`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tensordict import TensorDict

from rlplane.interfaces import KVBatchMeta
from rlplane.testing.expectations import (
    equal,
    expect,
    has_column,
    has_samples,
    jagged,
    records_warnings,
    refuses,
)
from rlplane.testing.model import ModelPartition
from rlplane.testing.model_flow import ModelFlow
from rlplane.testing.plane_under_test import PartitionUnderTest, PlaneUnderTest
from rlplane.testing.random_values import (
    FIELDS,
    GROUP_SIZE,
    GROUPS,
    IDS,
    ORDERS,
    TASKS,
    Row,
    ages,
    batch,
    column,
    conditions,
    dtypes,
    field_names,
    flows,
    layout,
    policies,
    tag_dicts,
    task_lists,
    written_fields,
)

NEVER = {"v": "no sample has this"}


class RandomOperations(RuleBasedStateMachine):
    """One plane with two partitions, and one model of each."""

    @staticmethod
    def factory() -> Any:
        """The factory of the planes; ``data_plane_state_machine`` sets it."""
        raise NotImplementedError("make a machine with data_plane_state_machine(factory)")

    def __init__(self) -> None:
        super().__init__()
        self.plane = PlaneUnderTest(self.factory())
        self.limitations = set(self.plane.limitations)
        self.parts: dict[str, PartitionUnderTest] = {}
        self.models: dict[str, ModelPartition] = {}
        self.ids = dict(IDS)
        self.own_size: int | None = None  # of the last group
        self.receipts: list[tuple[str, KVBatchMeta]] = []
        self.claims: list[tuple[str, KVBatchMeta]] = []
        self.next_step = 0

    def has(self, feature: str) -> bool:
        """Whether the adapter has a feature: it does not declare it as a limitation."""
        return feature not in self.limitations

    def teardown(self) -> None:
        """Compare everything once more, then close the plane."""
        try:
            for flow, model in self.models.items():
                for name in FIELDS:
                    ids = [i for i, sample in model.samples.items() if name in sample.rows]
                    self._read(flow, ids, [name])
        finally:
            self.plane.close()

    @initialize(announced=st.integers(0, 9), first=st.integers(0, 7), data=st.data())
    def register(self, announced: int, first: int, data: st.DataObject) -> None:
        """Both partitions, with their first two tasks and something to begin with."""
        if self.has("short_groups") and self.has("groups"):
            self.own_size = data.draw(st.sampled_from([None, 1, 2, 3]), "the size of the last group")
            members = range(self.own_size or GROUP_SIZE)
            self.ids["grouped"] = [*IDS["grouped"][:-2], *(f"{GROUPS[-1]}_g{n}" for n in members)]
        for flow in IDS:
            policy = data.draw(policies, f"the policy of {flow}") if self.has("flow") else None
            size = GROUP_SIZE if flow == "grouped" and self.has("groups") else None
            self.models[flow] = ModelPartition(size, announced, list(TASKS[:2]), ModelFlow(policy))
            self.parts[flow] = self.plane.partition(
                FIELDS, announced, TASKS[:2], group_size=size, flow=policy
            )
            self._write(flow, self.ids[flow][:first], ["scalar"], True, data)

    @rule(flow=flows, announced=st.integers(0, 6), tasks=task_lists)
    def register_again(self, flow: str, announced: int, tasks: list[str]) -> None:
        """Another number of samples, other tasks."""
        part, model = self.parts[flow], self.models[flow]
        tasks = list(dict.fromkeys([*tasks, *model.flow.tasks]))
        part.register(FIELDS, announced, tasks, group_size=model.group_size, flow=model.flow.policy)
        model.register(announced, tasks)

    # Writing

    @rule(flow=flows, names=written_fields, with_tags=st.booleans(), data=st.data())
    def put(self, flow: str, names: list[str], with_tags: bool, data: st.DataObject) -> None:
        """Write new samples, and write old ones again; without a name, tags alone."""
        ids = self._draw_ids(flow, data)
        self._write(flow, ids, names, with_tags or not names, data)

    @rule(
        flow=flows,
        count=st.integers(1, 4),
        names=st.sampled_from([["scalar"], ["scalar", "tokens"]]),
        data=st.data(),
    )
    def put_new_samples(self, flow: str, count: int, names: list[str], data: st.DataObject) -> None:
        """What a job does most: write samples that were not there."""
        self._write_new(flow, count, names, data)

    @rule(flow=flows, with_tags=st.booleans(), data=st.data())
    def put_the_rest(self, flow: str, with_tags: bool, data: st.DataObject) -> None:
        """Write exactly what is still expected, so that there is a tail."""
        model = self.models[flow]
        unused = [i for i in self._writable(flow, self.ids[flow]) if i not in model.samples]
        ids = unused[: max(0, model.num_samples - model.written)]
        self._write(flow, ids, ["scalar"], with_tags, data)

    @rule(
        flow=flows,
        fault=st.sampled_from(["an id twice", "a row too many", "a tag too many", "must_exist"]),
        data=st.data(),
    )
    def put_what_may_be_refused(self, flow: str, fault: str, data: st.DataObject) -> None:
        """A bad write, or one that comes late; that it wrote nothing shows in everything that follows."""
        ids = data.draw(self._some_ids(flow), "ids")
        put, columns = self.parts[flow].put, TensorDict({"scalar": torch.full((len(ids),), -1)}, [len(ids)])
        if fault == "must_exist":
            if not self.has("must_exist"):
                return
            if all(i in self.models[flow].samples for i in ids):
                self._write(flow, ids, ["scalar"], True, data, must_exist=True)
            else:
                refuses(KeyError, "a late write", put, ids, columns, must_exist=True)
            return
        if fault == "an id twice":
            ids = [*ids, ids[0]]
        rows = len(ids) + (fault == "a row too many")
        columns = TensorDict({"scalar": torch.full((rows,), -1)}, [rows])
        tags: list[dict[str, Any]] = [{"v": 99} for _ in range(len(ids) + (fault == "a tag too many"))]
        refuses(ValueError, f"a write with {fault}", put, ids, columns, tags)

    @precondition(lambda self: self.has("append_samples"))
    @rule(
        flow=flows,
        finish=st.booleans(),
        dtype=st.sampled_from([torch.float32] * 4 + [torch.bfloat16]),
        data=st.data(),
    )
    def append_a_turn(self, flow: str, finish: bool, dtype: torch.dtype, data: st.DataObject) -> None:
        """A turn behind those that there are; the last one makes the field count as written."""
        ids = self._draw_ids(flow, data)
        if not ids:
            return
        lengths = data.draw(st.lists(st.integers(0, 3), min_size=len(ids), max_size=len(ids)), "lengths")
        turns = [torch.arange(length).to(dtype) for length in lengths]
        samples = self.models[flow].samples
        before = [samples[i].rows.get("tokens") if i in samples else None for i in ids]
        is_refused = any(i in samples and samples[i].has(["tokens"]) for i in ids) or any(
            row is not None and row.value.dtype != dtype for row in before
        )
        tags = self._draw_tags(flow, ids, data)
        columns = TensorDict({"tokens": jagged(turns)}, [len(ids)])
        part = self.parts[flow]

        def append() -> None:
            part.client.append_samples(ids, part.name, columns, tags=tags, finish=finish)

        if is_refused:
            refuses(ValueError, "a turn that does not fit", append)
            return
        append()
        part.written.update(ids)
        old = [torch.empty(0, dtype=dtype) if row is None else row.value for row in before]
        rows = [Row("nested", torch.cat(pair)) for pair in zip(old, turns, strict=True)]
        self.models[flow].put(ids, {"tokens": rows}, tags, is_finished=finish)

    # Reading

    @rule(
        flow=flows,
        where=conditions,
        order=st.sampled_from([None, *ORDERS, "random:7"]),
        limit=st.sampled_from([None, 2]),
        names=st.lists(st.sampled_from(FIELDS), unique=True, max_size=2),
    )
    def look(
        self, flow: str, where: dict[str, Any], order: str | None, limit: int | None, names: list[str]
    ) -> None:
        """What is there, without a claim."""
        part, model = self.parts[flow], self.models[flow]
        where = where if self.has("where") else {}
        wanted = model.matching(where)
        try:
            equal("the number that matches", part.client.count(part.name, where), len(wanted))
            seen = part.client.peek_meta(part.name, where=where, fields=names, order=order, limit=limit)
        except NotImplementedError:
            return  # optional methods
        wanted = [i for i in wanted if model.samples[i].has(names)]
        if order == "random:7":
            expect(set(seen.sample_ids) <= set(wanted), f"a look at {wanted} shows {seen.sample_ids}")
            equal("the size of a look", len(set(seen.sample_ids)), len(wanted[:limit]))
        else:
            has_samples("a look", seen, model.ordered(wanted, order)[:limit])
        equal("the tags of a look", seen.tags or [], [model.samples[i].tags for i in seen.sample_ids])

    @rule(flow=flows, names=field_names, data=st.data())
    def get_samples(self, flow: str, names: list[str], data: st.DataObject) -> None:
        """A read in any order, with repeats, perhaps of what is not there, or by an old receipt."""
        by_receipt = data.draw(st.booleans(), "by a receipt")
        if by_receipt and self.receipts:
            flow, meta = data.draw(st.sampled_from(self.receipts), "receipt")
            if meta.fields:
                self._read(flow, meta.sample_ids, meta.fields, meta)
            return
        live = [i for i, s in self.models[flow].samples.items() if all(name in s.rows for name in names)]
        anything = st.sampled_from(self.ids[flow])
        ids = data.draw(st.lists(st.sampled_from(live) if live else anything, max_size=8), "ids")
        if data.draw(st.integers(0, 9), "one more, perhaps missing") == 0:
            ids.append(data.draw(anything, "the one more"))
        self._read(flow, ids, names)

    @rule(flow=flows, data=st.data())
    def look_at_the_status(self, flow: str, data: st.DataObject) -> None:
        """Whether tasks are done, which samples are live, and what the policy has done."""
        part, model = self.parts[flow], self.models[flow]
        tasks = data.draw(st.lists(st.sampled_from(model.tasks), unique=True, min_size=1), "tasks")
        equal(f"whether {tasks} are done", part.is_consumed(*tasks), model.is_consumed(tasks))
        try:
            equal("the live samples", part.client.list_sample_ids(part.name), list(model.samples))
            status = part.client.partition_status(part.name)
        except NotImplementedError:
            return  # optional methods
        equal("the number that was written", status["written"], model.written)
        if self.has("flow"):
            told, history = status["flow"], model.flow
            equal("the version", told["version"], history.version)
            equal("the number of prompts that were admitted", told["admitted"], history.admitted)
            equal("what was evicted, by reason", told["evicted"], dict(history.evicted))
            equal("the groups that were closed", told["closed_short"], dict(history.closed_short))

    # Clearing

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def clear_a_batch(self, data: st.DataObject) -> None:
        """Drop what was claimed together, as the last stage does."""
        index = data.draw(st.integers(0, len(self.claims) - 1), "claim")
        flow, meta = self.claims.pop(index)
        self._clear(flow, meta.sample_ids)

    @rule(flow=flows, data=st.data())
    def clear(self, flow: str, data: st.DataObject) -> None:
        """Drop a few samples, perhaps some that are not there; now and then, everything."""
        if data.draw(st.integers(0, 9), "everything if 9") == 9:
            self._clear_everything(flow)
        else:
            self._clear(flow, data.draw(self._some_ids(flow), "ids")[:2])

    def _clear_everything(self, flow: str) -> None:
        # This client wrote all there is, so None drops it, or warns that there is nothing.
        with records_warnings() as messages:
            self.parts[flow].clear(None)
        live = len(self.models[flow].samples)
        expect(bool(messages) != bool(live), f"a clear of {live} samples gave the warnings {messages}")
        self.models[flow].clear(list(self.models[flow].samples))

    def _clear(self, flow: str, ids: Sequence[str]) -> None:
        if self.models[flow].group_size:
            # Whole groups, since the contract does not say what becomes of half a group that was claimed.
            gone = {i.rpartition("_g")[0] for i in ids}
            ids = [i for i in self.ids[flow] if i.rpartition("_g")[0] in gone]
        self.parts[flow].clear(ids)
        self.models[flow].clear(ids)

    # What the rules share

    def _some_ids(self, flow: str) -> st.SearchStrategy[list[str]]:
        return st.lists(st.sampled_from(self.ids[flow]), unique=True, min_size=1, max_size=6)

    def _draw_ids(self, flow: str, data: st.DataObject) -> list[str]:
        return self._writable(flow, data.draw(self._some_ids(flow), "ids"))

    def _writable(self, flow: str, ids: Sequence[str]) -> list[str]:
        # Without new members of groups that were closed: what becomes of those is left open.
        model = self.models[flow]
        return [i for i in ids if i in model.samples or i.rpartition("_g")[0] not in model.closed_at]

    def _draw_tags(self, flow: str, ids: Sequence[str], data: st.DataObject) -> list[dict[str, Any]]:
        tags: list[dict[str, Any]] = data.draw(
            st.lists(tag_dicts, min_size=len(ids), max_size=len(ids)), "tags"
        )
        for sample_id, tag in zip(ids, tags, strict=True):
            if self.models[flow].flow.policy is not None:
                age = data.draw(ages, "age")
                if age is not None:
                    tag["weight_version"] = max(self.models[flow].flow.version - age, 0)
            if self._declares_its_size(sample_id):
                tag["group_size"] = self.own_size
        return tags

    def _write_new(self, flow: str, count: int, names: list[str], data: st.DataObject) -> None:
        unused = [i for i in self._writable(flow, self.ids[flow]) if i not in self.models[flow].samples]
        self._write(flow, unused[:count], names, True, data)

    def _declares_its_size(self, sample_id: str) -> bool:
        return self.own_size is not None and sample_id.startswith(f"{GROUPS[-1]}_")

    def _write(
        self,
        flow: str,
        ids: list[str],
        names: list[str],
        with_tags: bool,
        data: st.DataObject,
        must_exist: bool | None = None,
    ) -> None:
        names = [name for name in names if name != "payload" or self.has("objects")]
        rows = (
            {name: data.draw(column(name, len(ids), self.has("trees")), name) for name in names}
            if ids
            else {}
        )
        tags: list[dict[str, Any]] | None = None
        if with_tags or any(map(self._declares_its_size, ids)):
            tags = self._draw_tags(flow, ids, data)
        columns = batch(rows, len(ids)) if rows else None
        receipt = self.parts[flow].put(ids, columns, tags, must_exist=must_exist)
        self.models[flow].put(ids, rows, tags or [{} for _ in ids])
        has_samples("the receipt of a write", receipt, ids)
        if rows:
            equal("the fields of a receipt", sorted(receipt.fields or []), sorted(rows))
            self.receipts.append((flow, receipt))

    def _read(
        self, flow: str, ids: Sequence[str], names: Sequence[str], meta: KVBatchMeta | None = None
    ) -> None:
        part, samples = self.parts[flow], self.models[flow].samples

        def read() -> TensorDict:
            return part.get(ids, names) if meta is None else part.client.get_data(meta)

        if any(i not in samples or name not in samples[i].rows for i in ids for name in names):
            refuses(KeyError, f"a read of {list(names)} of {list(ids)}", read)
            return
        columns: Mapping[str, list[Row]] = {name: [samples[i].rows[name] for i in ids] for name in names}
        if any(len(dtypes(rows)) > 1 for rows in columns.values()):
            refuses(ValueError, f"a read of several dtypes of {list(names)} of {list(ids)}", read)
            return
        found = read()
        equal("the batch size of a read", list(found.batch_size), [len(ids)])
        for name, rows in columns.items() if ids else ():
            has_column(f"a read of {list(ids)}", found, name, [row.value for row in rows], layout(rows))
