"""The names of very many samples, in dictionaries none of which becomes so large that to grow takes long."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplane.control import names
from rlplane.control.names import Names

LARGEST = 16
IDS = st.lists(st.integers(0, 60).map(str), unique=True, max_size=LARGEST)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["add", "add many", "remove", "move"]), IDS), max_size=40))
def test_it_is_a_dictionary_whatever_comes_and_goes(history: list[tuple[str, list[str]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "_LARGEST", LARGEST)
        patch.setattr(names, "_MOVED_AT_ONCE", 3)
        known, model = Names(), dict[str, int]()
        for number, (kind, ids) in enumerate(history):
            new = [sample_id for sample_id in ids if sample_id not in model]
            rows = [100 * number + at for at in range(len(new))]
            if kind == "add":
                known.add(new, rows)
            elif kind == "add many":
                many = Names()
                for at in range(0, len(new), 3):
                    many.add(new[at : at + 3], rows[at : at + 3])
                known.add_many(many)
            elif kind == "move":
                known.move(len(ids))
                continue
            if kind == "remove":
                gone = [sample_id for sample_id in ids if sample_id in model]
                known.remove(gone)
                for sample_id in gone:
                    del model[sample_id]
            else:
                model.update(zip(new, rows, strict=True))
            check(known, model)


def check(known: Names, model: dict[str, int]) -> None:
    assert dict(known) == model and len(known) == len(model)
    asked = [str(number) for number in range(61)]
    assert known.find(iter(asked)) == [model.get(sample_id) for sample_id in asked]
    assert [sample_id in known for sample_id in asked] == [sample_id in model for sample_id in asked]
    if known.by_birth is not None:
        assert list(known.by_birth) == list(model.values())
    assert known.first in (None, next(iter(model.values()), None))
    parts: list[Any] = [known._rows, *known._large, *known._apart]
    assert max(map(len, parts)) <= LARGEST
    # Each of the large ones has enough names, so there are never very many.
    assert all(len(part) >= max(LARGEST // 16, 1) for part in known._large)


def test_the_first_name_is_known_as_long_as_none_came_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_LARGEST", LARGEST)
    known = Names()
    for number in range(50):
        known.add([str(number)], [number])
    assert known.first == 0 and known.by_birth is None and list(known) == [str(n) for n in range(50)]
    known.remove([str(number) for number in range(20)])
    assert known.first == 20
    known.add_many(Names())
    assert known.first is None
