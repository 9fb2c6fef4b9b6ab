"""The operations of the state machine, and how each is compared with the model. Needs hypothesis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tensordict import TensorDict

from rlplane.errors import ClaimTimeoutError
from rlplane.interfaces import KVBatchMeta
from rlplane.testing.expectations import (
    equal,
    expect,
    has_column,
    has_samples,
    jagged,
    objects,
    records_warnings,
    refuses,
)
from rlplane.testing.model import ModelPartition
from rlplane.testing.plane_under_test import PartitionUnderTest, PlaneUnderTest
from rlplane.testing.promises import BrokenPromise

__all__ = ["DataPlaneMachine"]

FIELDS = ("scalar", "tokens", "payload")
TASKS = ("train", "eval", "extra")
GROUP_SIZE = 2
IDS = {"plain": [f"s{i}" for i in range(7)], "grouped": [f"p{i}_g{j}" for i in range(3) for j in range(2)]}


class Row(NamedTuple):
    """What the model keeps of a row."""

    kind: str  # "dense", "nested" or "object"
    value: Any


flows = st.sampled_from(["plain", "grouped"])
field_names = st.lists(st.sampled_from(FIELDS), unique=True, min_size=1, max_size=3)
no_fields: st.SearchStrategy[list[str]] = st.just([])
written_fields = st.one_of(
    st.just(["scalar"]), st.just(["tokens"]), st.just(list(FIELDS)), field_names, no_fields
)
task_lists = st.one_of(
    st.just(list(TASKS[:2])), st.lists(st.sampled_from(TASKS), unique=True, min_size=1, max_size=3)
)
tag_dicts = st.fixed_dictionaries(
    {},
    optional={
        "v": st.integers(0, 3),
        "w": st.sampled_from(["x", "y", 1]),
        "input_lengths": st.integers(0, 9),
    },
)
some_conditions = st.fixed_dictionaries(
    {},
    optional={
        "v": st.one_of(
            st.integers(0, 3),
            st.dictionaries(
                st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), st.integers(0, 3), min_size=1, max_size=2
            ),
            st.fixed_dictionaries({"in": st.lists(st.integers(0, 3), max_size=3)}),
            st.fixed_dictionaries({"not in": st.lists(st.integers(0, 3), max_size=3)}),
        ),
        "w": st.one_of(st.sampled_from(["x", "y", 1]), st.fixed_dictionaries({"<": st.just("y")})),
    },
)
no_condition: st.SearchStrategy[dict[str, Any]] = st.just({})
conditions = st.one_of(no_condition, no_condition, some_conditions)
payloads = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text(max_size=3), st.binary(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)
with_tensors = st.builds(
    lambda length, dtype, inner: {
        "tensor": torch.arange(length).to(dtype),
        "inner": [inner, torch.ones(1, 2)],
    },
    st.integers(0, 40),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    payloads,
)


def some_ids(flow: str) -> st.SearchStrategy[list[str]]:
    """Ids of one call."""
    return st.lists(st.sampled_from(IDS[flow]), unique=True, min_size=1, max_size=6)


class DataPlaneMachine(RuleBasedStateMachine):
    """One plane and one model of it."""

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
        self.receipts: list[tuple[str, KVBatchMeta]] = []
        self.steps = 0

    def teardown(self) -> None:
        """Compare everything once more, then close the plane."""
        try:
            for flow, model in self.models.items():
                for name in FIELDS:
                    ids = [i for i, sample in model.samples.items() if name in sample.rows]
                    self._read(flow, ids, [name])
        finally:
            self.plane.close()

    @initialize(announced=st.integers(0, 6), first=st.integers(0, 6), data=st.data())
    def register(self, announced: int, first: int, data: st.DataObject) -> None:
        """Both partitions, with their first two tasks and something to begin with."""
        for flow in IDS:
            has_groups = flow == "grouped" and "groups" not in self.limitations
            size = GROUP_SIZE if has_groups else None
            self.models[flow] = ModelPartition(size, announced, list(TASKS[:2]))
            self.parts[flow] = self.plane.partition(FIELDS, announced, TASKS[:2], group_size=size)
            self._write(flow, IDS[flow][:first], ["scalar"], True, data)

    @rule(flow=flows, announced=st.integers(0, 4), tasks=task_lists)
    def register_again(self, flow: str, announced: int, tasks: list[str]) -> None:
        """Another number of samples, other tasks."""
        size = self.models[flow].group_size
        self.parts[flow].register(FIELDS, announced, tasks, group_size=size)
        self.models[flow].register(announced, list(tasks))

    @rule(flow=flows, names=written_fields, with_tags=st.booleans(), data=st.data())
    def put(self, flow: str, names: list[str], with_tags: bool, data: st.DataObject) -> None:
        """Write new samples, and write old ones again; without a name, tags alone."""
        ids = data.draw(some_ids(flow), "ids")
        self._write(flow, ids, names, with_tags or not names, data)

    @rule(flow=flows, with_tags=st.booleans(), data=st.data())
    def put_the_rest(self, flow: str, with_tags: bool, data: st.DataObject) -> None:
        """Write exactly what is still expected, so that there is a tail."""
        model = self.models[flow]
        unused = [i for i in IDS[flow] if i not in model.samples]
        ids = unused[: max(0, model.num_samples - model.written)]
        self._write(flow, ids, ["scalar"], with_tags, data)

    @rule(
        flow=flows, fault=st.sampled_from(["an id twice", "a row too many", "a tag too many"]), data=st.data()
    )
    def put_what_is_refused(self, flow: str, fault: str, data: st.DataObject) -> None:
        """A bad write; that it wrote nothing shows in everything that follows."""
        ids = data.draw(some_ids(flow), "ids")
        if fault == "an id twice":
            ids = [*ids, ids[0]]
        rows = len(ids) + (fault == "a row too many")
        columns = TensorDict({"scalar": torch.full((rows,), -1)}, [rows])
        tags: list[dict[str, Any]] = [{"v": 99} for _ in range(len(ids) + (fault == "a tag too many"))]
        refuses(ValueError, f"a write with {fault}", self.parts[flow].put, ids, columns, tags)

    @rule(where=conditions, data=st.data())
    def claim_what_is_ready(self, where: dict[str, Any], data: st.DataObject) -> None:
        """A claim that does not wait."""
        flow, task, required, size = self._draw_claim(data)
        where = {} if "where" in self.limitations else where
        wanted = self.models[flow].ready(task, required, where)[:size]
        meta = self.parts[flow].claim_ready(size, task=task, required=required, where=where or None)
        self._claimed(flow, task, required, meta, wanted)

    @rule(where=conditions, data=st.data())
    def claim_a_batch_or_the_tail(self, where: dict[str, Any], data: st.DataObject) -> None:
        """A claim that waits. If the model says that it would wait for ever, it must time out."""
        flow, task, required, size = self._draw_claim(data)
        where = {} if "where" in self.limitations else where
        part, model = self.parts[flow], self.models[flow]
        wanted = model.full_batch_or_tail(task, required, size, where)
        how: dict[str, Any] = {"task": task, "required": required, "where": where or None}
        if wanted is None:
            too_short = self.plane.short / 10
            error = refuses(
                ClaimTimeoutError, f"a claim of {size}", part.claim, size, timeout_s=too_short, **how
            )
            equal("the number that was ready", error.ready, len(model.ready(task, required, where)))
            return
        try:
            meta = part.claim(size, **how)
        except ClaimTimeoutError as exc:
            raise BrokenPromise(f"a claim of {size} timed out, and it should have {wanted}: {exc}") from exc
        self._claimed(flow, task, required, meta, wanted)

    @precondition(lambda self: "max_tokens" not in self.limitations)
    @rule(blocking=st.booleans(), tokens=st.integers(1, 20), data=st.data())
    def claim_a_number_of_tokens(self, blocking: bool, tokens: int, data: st.DataObject) -> None:
        """A claim that is bounded by the lengths of its samples."""
        flow, task, required, size = self._draw_claim(data)
        part, model = self.parts[flow], self.models[flow]
        ready = model.ready(task, required, {})
        wanted, is_full = model.fitting(ready, size, tokens)
        how: dict[str, Any] = {"task": task, "required": required, "max_tokens": tokens}
        if wanted is None:
            claim = part.claim if blocking else part.claim_ready
            refuses(ValueError, f"a claim of {tokens} tokens", claim, size, **how)
            return
        if blocking and not is_full and model.full_batch_or_tail(task, required, size, {}) is None:
            vain = self.plane.short / 10
            refuses(ClaimTimeoutError, f"a claim of {tokens} tokens", part.claim, size, timeout_s=vain, **how)
            return
        meta = part.claim(size, **how) if blocking else part.claim_ready(size, **how)
        self._claimed(flow, task, required, meta, wanted)

    @precondition(lambda self: "order" not in self.limitations)
    @rule(order=st.sampled_from(["lifo", "priority:v"]), data=st.data())
    def claim_in_another_order(self, order: str, data: st.DataObject) -> None:
        """A claim that is not first ready, first claimed."""
        flow, task, required, size = self._draw_claim(data)
        model = self.models[flow]
        wanted = model.in_order(model.ready(task, required, {}), order)[:size]
        meta = self.parts[flow].claim_ready(size, task=task, required=required, order=order)
        self._claimed(flow, task, required, meta, wanted)

    @precondition(lambda self: "ranks" not in self.limitations)
    @rule(data=st.data())
    def claim_as_two_ranks(self, data: st.DataObject) -> None:
        """A batch that two ranks share, each of which asks twice."""
        flow, task, required, size = self._draw_claim(data)
        model = self.models[flow]
        wanted = model.shared(task, required, 2 * size, 2)
        self.steps += 1
        how: dict[str, Any] = {"task": task, "required": required, "dp_world": 2, "step": self.steps}
        parts = [self.parts[flow].claim_ready(2 * size, dp_rank=r, **how).sample_ids for r in (1, 0, 1, 0)]
        equal("the parts, asked for again", parts[2:], parts[:2])
        equal("the sizes of the parts", [len(part) for part in parts[:2]], [len(wanted) // 2] * 2)
        equal("the parts together", sorted(parts[0] + parts[1]), sorted(wanted))
        model.mark_claimed(task, wanted)

    @rule(flow=flows, where=conditions, names=st.lists(st.sampled_from(FIELDS), unique=True, max_size=2))
    def look(self, flow: str, where: dict[str, Any], names: list[str]) -> None:
        """What is there, without a claim."""
        part, model = self.parts[flow], self.models[flow]
        where = {} if "where" in self.limitations else where
        wanted = model.matching(where)
        try:
            equal("the number that matches", part.client.count(part.name, where), len(wanted))
            seen = part.client.peek_meta(part.name, where=where, fields=names)
        except NotImplementedError:
            return  # optional methods
        has_samples(
            "a look", seen, [i for i in wanted if all(name in model.samples[i].rows for name in names)]
        )
        equal("the tags of a look", seen.tags or [], [model.samples[i].tags for i in seen.sample_ids])

    @precondition(lambda self: "must_exist" not in self.limitations)
    @rule(flow=flows, data=st.data())
    def put_what_must_exist(self, flow: str, data: st.DataObject) -> None:
        """A write that may come late."""
        ids = data.draw(some_ids(flow), "ids")
        if all(i in self.models[flow].samples for i in ids):
            self._write(flow, ids, ["scalar"], True, data, must_exist=True)
            return
        columns = TensorDict({"scalar": torch.full((len(ids),), -1)}, [len(ids)])
        refuses(KeyError, "a late write", self.parts[flow].put, ids, columns, must_exist=True)

    @rule(flow=flows, names=field_names, data=st.data())
    def get_samples(self, flow: str, names: list[str], data: st.DataObject) -> None:
        """A read in any order, with repeats, perhaps of what is not there."""
        live = [i for i, s in self.models[flow].samples.items() if all(name in s.rows for name in names)]
        anything = st.sampled_from(IDS[flow])
        ids = data.draw(st.lists(st.sampled_from(live) if live else anything, max_size=8), "ids")
        if data.draw(st.integers(0, 9), "one more, perhaps missing") == 0:
            ids.append(data.draw(anything, "the one more"))
        self._read(flow, ids, names)

    @precondition(lambda self: self.receipts)
    @rule(data=st.data())
    def get_data(self, data: st.DataObject) -> None:
        """A read by an old receipt, which may be out of date."""
        flow, meta = data.draw(st.sampled_from(self.receipts), "receipt")
        if meta.fields:
            self._read(flow, meta.sample_ids, meta.fields, meta)

    @precondition(lambda self: self.receipts)
    @rule(data=st.data())
    def clear_a_batch(self, data: st.DataObject) -> None:
        """Drop what was written or claimed together, as the last stage does."""
        index = data.draw(st.integers(0, len(self.receipts) - 1), "receipt")
        flow, meta = self.receipts.pop(index)
        self._clear(flow, meta.sample_ids)

    @rule(flow=flows, data=st.data())
    def clear(self, flow: str, data: st.DataObject) -> None:
        """Drop some samples, perhaps some that are not there; now and then, everything."""
        if data.draw(st.integers(0, 4), "everything if 4") == 4:
            self._clear_everything(flow)
        else:
            self._clear(flow, data.draw(some_ids(flow), "ids"))

    @rule(flow=flows, data=st.data())
    def look_at_the_status(self, flow: str, data: st.DataObject) -> None:
        """Whether tasks are done, and which samples are live."""
        part, model = self.parts[flow], self.models[flow]
        tasks = data.draw(st.lists(st.sampled_from(model.tasks), unique=True, min_size=1), "tasks")
        equal(f"whether {tasks} are done", part.is_consumed(*tasks), model.is_consumed(tasks))
        try:
            listed = part.client.list_sample_ids(part.name)
        except NotImplementedError:
            return  # an optional method
        equal("the live samples", listed, list(model.samples))

    def _write(
        self,
        flow: str,
        ids: list[str],
        names: list[str],
        with_tags: bool,
        data: st.DataObject,
        must_exist: bool | None = None,
    ) -> None:
        names = [name for name in names if name != "payload" or "objects" not in self.limitations]
        trees = "trees" not in self.limitations
        rows = {name: data.draw(_rows(name, len(ids), trees), name) for name in names} if ids else {}
        tags: list[dict[str, Any]] | None = None
        if with_tags:
            tags = data.draw(st.lists(tag_dicts, min_size=len(ids), max_size=len(ids)), "tags")
        batch = _batch(rows, len(ids)) if rows else None
        receipt = self.parts[flow].put(ids, batch, tags, must_exist=must_exist)
        self.models[flow].put(ids, rows, tags or [{} for _ in ids])
        has_samples("the receipt of a write", receipt, ids)
        if rows:
            equal("the fields of a receipt", sorted(receipt.fields or []), sorted(rows))
            self.receipts.append((flow, receipt))

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
            ids = [i for i in IDS[flow] if i.rpartition("_g")[0] in gone]
        self.parts[flow].clear(ids)
        self.models[flow].clear(ids)

    def _draw_claim(self, data: st.DataObject) -> tuple[str, str, list[str], int]:
        """Mostly a claim that finds something: at random, hardly any would."""
        promising = [
            (flow, task, list(required))
            for flow, model in self.models.items()
            for task in model.tasks
            for required in ((), ("scalar",), ("tokens",), ("scalar", "tokens"), FIELDS)
            if model.ready(task, required, {})
        ]
        if promising and data.draw(st.integers(0, 3), "something is ready unless 3") < 3:
            flow, task, required = data.draw(st.sampled_from(promising), "claim")
        else:
            flow = data.draw(flows, "flow")
            task = data.draw(st.sampled_from(self.models[flow].tasks), "task")
            required = data.draw(st.lists(st.sampled_from(FIELDS), unique=True), "required")
        size = data.draw(st.one_of(st.just(8), st.integers(1, 3)), "size")
        return flow, task, required, size * (self.models[flow].group_size or 1)

    def _claimed(
        self, flow: str, task: str, required: list[str], meta: KVBatchMeta, wanted: list[str]
    ) -> None:
        model = self.models[flow]
        has_samples(f"a claim of {task!r} on {required}", meta, wanted)
        tags = [model.samples[i].tags for i in wanted]
        equal("the tags of a claim", meta.tags or [], tags)
        equal("the task of a claim", meta.task_name, task)
        equal("the fields of a claim", meta.fields, required)
        if wanted:
            lengths = [tag.get("input_lengths") for tag in tags]
            equal("the lengths of a claim", meta.sequence_lengths, None if None in lengths else lengths)
            self.receipts.append((flow, meta))
        model.mark_claimed(task, wanted)

    def _read(
        self, flow: str, ids: Sequence[str], names: Sequence[str], meta: KVBatchMeta | None = None
    ) -> None:
        part, samples = self.parts[flow], self.models[flow].samples

        def read() -> TensorDict:
            return part.get(ids, names) if meta is None else part.client.get_data(meta)

        if any(i not in samples or name not in samples[i].rows for i in ids for name in names):
            refuses(KeyError, f"a read of {list(names)} of {list(ids)}", read)
            return
        columns = {name: [samples[i].rows[name] for i in ids] for name in names}
        if any(len(_dtypes(rows)) > 1 for rows in columns.values()):
            refuses(ValueError, f"a read of several dtypes of {list(names)} of {list(ids)}", read)
            return
        batch = read()
        equal("the batch size of a read", list(batch.batch_size), [len(ids)])
        for name, rows in columns.items() if ids else ():
            has_column(f"a read of {list(ids)}", batch, name, [row.value for row in rows], _layout(rows))


def _rows(name: str, count: int, trees: bool) -> st.SearchStrategy[list[Row]]:
    """Rows of one column of one write. With ``trees``, objects may have tensors in them."""
    if name == "payload":
        rows = st.one_of(payloads, with_tensors) if trees else payloads
        return st.lists(rows.map(lambda value: Row("object", value)), min_size=count, max_size=count)
    number = st.integers(-100, 100)
    if name == "scalar":
        return st.lists(number.map(lambda n: Row("dense", torch.tensor(n))), min_size=count, max_size=count)
    dtype = st.sampled_from([torch.float32, torch.float32, torch.float32, torch.bfloat16])
    dense_lengths = st.integers(0, 3).map(lambda n: ("dense", [n] * count))
    nested_lengths = st.lists(st.integers(0, 4), min_size=count, max_size=count).map(lambda n: ("nested", n))
    return st.builds(
        lambda start, dtype, kind_and_lengths: [
            Row(kind_and_lengths[0], (torch.arange(length) + start + index).to(dtype))
            for index, length in enumerate(kind_and_lengths[1])
        ],
        number,
        dtype,
        st.one_of(dense_lengths, nested_lengths),
    )


def _batch(columns: Mapping[str, Sequence[Row]], count: int) -> TensorDict:
    made = {}
    for name, rows in columns.items():
        values = [row.value for row in rows]
        build = {"object": objects, "nested": jagged, "dense": torch.stack}[rows[0].kind]
        made[name] = build(values)  # type: ignore[operator]
    return TensorDict(made, [count])


def _dtypes(rows: Sequence[Row]) -> set[torch.dtype]:
    return {row.value.dtype for row in rows if isinstance(row.value, torch.Tensor)}


def _layout(rows: Sequence[Row]) -> str:
    if rows[0].kind == "object":
        return "objects"
    alike = all(row.kind == "dense" for row in rows) and len({row.value.shape for row in rows}) == 1
    return "dense" if alike else "jagged"
