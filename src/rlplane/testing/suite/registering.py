"""What registering a partition promises, the first time and again."""

from __future__ import annotations

from typing import Any

import torch

from rlplane.testing.expectations import (
    equal,
    expect,
    has_column,
    has_samples,
    objects,
    records_warnings,
    refuses,
    times_out,
)
from rlplane.testing.plane_under_test import PlaneUnderTest
from rlplane.testing.promises import promise

REPLACES = "Registering again replaces the schema and the task list."
CURSORS = (
    "The cursor of a task that stays is kept; a task that was dropped loses its cursor, "
    "and one that comes back starts anew."
)
CONTRADICTIONS = (
    "A field, task or enum value named twice, an empty name, a negative `num_samples`, a `grpo_group_size` "
    "below 1, an enum for a field that is not declared: `ValueError`."
)


@promise(REPLACES)
def registering_again_replaces_the_task_list(plane: PlaneUnderTest) -> None:
    part = plane.partition(tasks=["old"])
    part.register(tasks=["new"])
    part.put_numbers("a")
    refuses(KeyError, "a claim of a task that was dropped", part.claim_ready, task="old")
    has_samples("a claim of the task that came", part.claim_ready(task="new"), "a")


@promise(REPLACES)
def registering_again_replaces_the_schema(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "gone"])
    part.register(fields=["x", "came"])
    has_samples("a claim on a field that came", part.claim_ready(required=["came"]), [])
    what = "a claim on a field that is neither declared any more nor was ever written"
    refuses(KeyError, what, part.claim_ready, required=["gone"])


@promise("Live samples stay.")
def live_samples_survive_a_registration(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"])
    part.put_numbers("ab", start=3)
    part.put("ab", None, [{"v": 1}, {"v": 2}])
    part.register(fields=["y"], tasks=["other"])
    equal("a live sample after a registration", part.numbers("ab"), [3.0, 4.0])
    claimed = part.claim_ready(task="other", required=[])
    has_samples("a claim after a registration", claimed, "ab", [{"v": 1}, {"v": 2}])


@promise(CURSORS)
def a_task_that_stays_keeps_its_cursor(plane: PlaneUnderTest) -> None:
    part = plane.partition(tasks=["train"])
    part.put_numbers("abc")
    has_samples("the first claim", part.claim_ready(2), "ab")
    part.register(tasks=["train", "eval"])
    has_samples("a claim of the task that stayed", part.claim_ready(), "c")
    has_samples("a claim of the task that came", part.claim_ready(task="eval"), "abc")


@promise(CURSORS)
def a_task_that_comes_back_starts_anew(plane: PlaneUnderTest) -> None:
    part = plane.partition(tasks=["train"])
    part.put_numbers("ab")
    has_samples("the first claim", part.claim_ready(), "ab")
    part.register(tasks=["eval"])
    part.register(tasks=["train", "eval"])
    has_samples("a claim of the task that came back", part.claim_ready(), "ab")


@promise("Declared fields exist at once.")
def a_declared_field_exists_before_anything_is_written(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"])
    has_samples("a claim on fields that nobody has written", part.claim_ready(required=["x", "y"]), [])
    with records_warnings() as messages:
        part.put_numbers("a")
    expect(not messages, f"writing a declared field warned: {messages}")


@promise(
    "A field nobody declared may be written; the writer gets one warning per partition and field.",
)
def an_undeclared_field_may_be_written_with_one_warning(plane: PlaneUnderTest) -> None:
    for part in (plane.partition(), plane.partition()):
        with records_warnings() as messages:
            part.put_numbers("a", field="extra")
            part.put_numbers("ab", start=1, field="extra")
        about = [message for message in messages if "extra" in message]
        equal(f"the number of warnings about an undeclared field ({messages})", len(about), 1)
        equal("an undeclared field", part.numbers("ab", "extra"), [1.0, 2.0])
        has_samples("a claim on an undeclared field", part.claim_ready(required=["extra"]), "ab")


@promise(CONTRADICTIONS)
def a_registration_that_contradicts_itself_is_refused_and_changes_nothing(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("ab")
    has_samples("the first claim", part.claim_ready(1), "a")
    wrong: list[dict[str, Any]] = [
        {"fields": ["x", "x"]},
        {"fields": [""]},
        {"tasks": ["train", "train"]},
        {"tasks": [""]},
        {"num_samples": -1},
        {"group_size": 0},
        {"group_size": -2},
    ]
    for arguments in wrong:
        refuses(ValueError, f"registering with {arguments}", part.register, **arguments)
    register = part.client.register_partition
    refuses(ValueError, "registering a partition with an empty name", register, "", ["x"], 1, ["train"])
    has_samples("a claim after registrations that were refused", part.claim_ready(), "b")


@promise(CONTRADICTIONS, feature="enums")
def an_enum_that_contradicts_itself_is_refused(plane: PlaneUnderTest) -> None:
    register = plane.partition().register
    refuses(ValueError, "an enum value twice", register, enums={"x": ["yes", "yes"]})
    refuses(ValueError, "an enum for a field that is not declared", register, enums={"y": ["yes", "no"]})


@promise("For each field named here, the strings that it may hold.", feature="enums")
def an_enum_field_takes_the_strings_of_its_vocabulary_and_gives_them_back(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "reason"], enums={"reason": ["stop", "length", "abort"]})
    part.put("abc", {"reason": objects(["length", "stop", "length"])})
    part.put("d", {"reason": objects(["abort"])})
    batch = part.get("dcba", ["reason"])
    has_column("a read of an enum field", batch, "reason", ["abort", "length", "stop", "length"], "objects")
    has_samples("a claim on an enum field", part.claim_ready(required=["reason"]), "abcd")


@promise("For each field named here, the strings that it may hold.", feature="enums")
def a_string_outside_an_enum_is_refused_and_nothing_is_written(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "reason"], enums={"reason": ["stop", "length"]})
    part.put("a", {"reason": objects(["stop"])})
    for bad in ("crash", "", 1, None):
        columns = {"reason": objects(["length", bad]), "x": torch.zeros(2)}
        refuses(ValueError, f"writing {bad!r} to an enum field", part.put, "ab", columns)
    has_column("the enum field afterwards", part.get("a", ["reason"]), "reason", ["stop"], "objects")
    refuses(KeyError, "reading the row that was refused", part.get, "b", ["x"])


@promise(
    "`num_samples` counts the samples that are expected *from this registration on*: the count of new "
    "samples starts at zero when a partition is registered again."
)
def the_count_of_expected_samples_starts_again_with_a_registration(plane: PlaneUnderTest) -> None:
    part = plane.partition(num_samples=2)
    part.put_numbers("ab")
    has_samples("the tail of the first registration", part.claim(4), "ab")
    part.register(num_samples=2)
    part.put_numbers("c")
    part.claim_ready(task="train", required=["x"], batch_size=1)
    part.put_numbers("d")
    has_samples("the tail of the second registration", part.claim(4), "d")
    part.register(num_samples=1)
    part.put_numbers("ab", start=9)  # not new
    times_out("a claim before the expected sample was written", part, 4, ready=0)
    part.put_numbers("e")
    has_samples("the tail of the third registration", part.claim(4), "e")
