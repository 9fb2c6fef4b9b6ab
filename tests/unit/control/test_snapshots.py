"""Answers that name very many samples are read in slices, and say what was there at one moment."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.control import at_once

from rlplane.control import snapshots
from rlplane.control.requests import Batch, Claim, Put
from rlplane.control.rules import PartitionSpec
from rlplane.control.snapshots import SampleColumn
from rlplane.control.state import ControlState

IDS = [f"s{number}_g{number % 2}" for number in range(12)]


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_MANY", 1)


def plane(group_size: int | None = None) -> ControlState:
    state = ControlState()
    state.register(PartitionSpec.checked("p", ["x"], 0, ["t", "u"], group_size))
    tags = [{"group": str(at // 2), "n": at} for at in range(len(IDS))]
    state.put(Put("p", IDS, {"x": 1}, tags))
    return state


def claim(state: ControlState, size: int = len(IDS), task: str = "t", **how: Any) -> Batch:
    ((_, batch),) = state.claim(Claim("p", task, [], size, **how), blocking=False).answers
    assert isinstance(batch, Batch)
    return batch


changes = st.lists(
    st.tuples(
        st.sampled_from(["read", "put", "put many", "clear", "clear and put", "unclaim", "grow", "close"]),
        st.lists(st.sampled_from(IDS), min_size=1, max_size=5, unique=True),
        st.integers(1, 5),
    ),
    max_size=8,
)


@given(changes, st.sampled_from(["claim", "peek", "peek by n", "names", "random", "inspect"]))
def test_what_is_read_in_slices_is_what_was_there_whatever_happens_between(
    history: list[tuple[str, list[str], int]], what: str
) -> None:
    state = plane(group_size=2)
    rows = state.partition("p").live_rows(None)
    table = state.partition("p").table
    if what == "names":
        columns: list[Any] = [state.partition("p").names()]
    elif what == "inspect":
        seen = state.partition("p").inspect(rows)
        columns = [seen["ids"], seen["tags"], seen["numbers"]]
    else:
        how: dict[str, Any] = {"order": "random:3"} if what == "random" else {}
        if what.startswith("peek"):
            batch = state.peek("p", order="priority:n" if what == "peek by n" else None)
        else:
            batch = claim(state, **how)
        columns = [batch.ids, batch.tags]
    by_id = dict(zip(table.ids[rows].tolist(), table.tags[rows].tolist(), strict=True))
    at = 0
    for kind, ids, number in history:
        if kind == "read":
            for column in columns:
                assert len(column[at : at + number]) == min(number, len(IDS) - at)
            at = min(at + number, len(IDS))
        elif kind == "put":
            state.put(Put("p", ids, {}, [{"n": -number, "group": "g"}] * len(ids)))
        elif kind == "put many":
            put = Put("p", ids, {}, [{"n": -number, "group": "g"}] * len(ids))
            staging = state.begin_put(put)
            while not staging.is_over:
                staging.make_some_ready()
            state.put(put)
        elif kind.startswith("clear"):
            at_once.clear(state, "p", ids)
            if kind != "clear":
                state.put(Put("p", [f"n{number}_g0", *ids], {}, [{"group": "g"}] * (1 + len(ids))))
        elif kind == "unclaim":
            at_once.unclaim(state, "p", "t", ids, -1)
        elif kind == "grow":
            state.put(Put("p", [f"{number}-{more}_g0" for more in range(70)], {}))
        elif state.partition("p").groups.of(str(number)):
            state.close_group("p", str(number), "failed", ["x"])
    ids = list(columns[0])
    wanted = IDS[::-1] if what == "peek by n" else IDS
    assert sorted(ids) == sorted(IDS) and (what == "random" or ids == wanted)
    if what != "names":
        assert list(columns[1]) == [by_id[sample_id] for sample_id in ids]
    if what == "inspect":
        assert list(columns[2]) == list(range(len(IDS)))


def test_a_table_forgets_who_reads_it_when_nobody_does_any_more() -> None:
    state = plane()
    batch, names = claim(state), state.partition("p").names()
    readers = state.partition("p").table.readers
    assert isinstance(names, SampleColumn) and names[:3] == IDS[:3] and len(readers) == 2
    gc.disable()  # without its help
    try:
        del batch
        assert len(readers) == 1
        del names
        assert not readers
    finally:
        gc.enable()


def test_a_dump_has_what_was_not_read_yet() -> None:
    state = plane()
    batch = claim(state)
    assert batch.ids[:3] == IDS[:3]
    again, ids, tags = pickle.loads(pickle.dumps((state, batch.ids, batch.tags)))
    assert ids == IDS and [tag["n"] for tag in tags] == list(range(len(IDS)))
    assert again.partition("p").table.readers == []
    at_once.clear(again, "p", None)


def test_ranks_that_share_a_step_get_lists() -> None:
    state = plane()
    parts: list[str] = []
    for rank in range(2):
        asked = Claim("p", "t", [], 12, step="1", dp_rank=rank, dp_world=2, token=rank)
        ((_, part),) = state.claim(asked, blocking=True).answers
        assert isinstance(part, Batch)
        parts += part.ids
    assert sorted(parts) == sorted(IDS)


def test_a_peek_in_the_order_of_age_or_against_it_needs_no_sorting() -> None:
    state = plane()
    at_once.clear(state, "p", IDS[:2])
    state.put(Put("p", IDS[:1], {}))  # in a row that was used before
    assert list(state.peek("p").ids) == [*IDS[2:], IDS[0]]
    assert list(state.peek("p", order="lifo", limit=3).ids) == [IDS[0], *IDS[:-3:-1]]
