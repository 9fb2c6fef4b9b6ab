"""What ``clear_samples`` promises."""

from __future__ import annotations

from rlplane.testing.expectations import equal, expect, has_samples, records_warnings, refuses
from rlplane.testing.plane_under_test import PlaneUnderTest
from rlplane.testing.promises import promise

ABSENT = "`clear_samples`: ids that are not there are ignored."
NONE = (
    "`None` clears what this client wrote and is still there, or, if it wrote nothing here, everything "
    "in the partition; if there is nothing, it warns."
)
AGAIN = "A cleared id may be written again: it is a new sample."


@promise(ABSENT)
def a_clear_drops_the_samples_it_names_and_ignores_the_rest(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("abcd")
    part.clear(["b", "nobody", "d"])
    part.clear(["b"])
    part.clear([])
    equal("what is left", part.numbers("ac"), [0.0, 2.0])
    for gone in "bd":
        refuses(KeyError, "reading a sample that was cleared", part.get, gone)
    has_samples("a claim after a clear", part.claim_ready(), "ac")


@promise(NONE)
def clearing_none_clears_what_this_client_wrote(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    elsewhere = plane.partition()
    part.put_numbers("abc")
    elsewhere.put_numbers("a")
    part.clear("b")
    with records_warnings() as messages:
        part.clear(None)
    expect(not messages, f"a clear of two samples warned: {messages}")
    has_samples("a claim after the clear", part.claim_ready(), [])
    equal("another partition", elsewhere.numbers("a"), [0.0])


@promise(NONE)
def clearing_none_leaves_what_other_clients_wrote(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    other = part.on(plane.worker())
    part.put_numbers("ab")
    other.put_numbers("cd")
    other.clear(None)
    has_samples("a claim after the other client's clear", part.claim_ready(), "ab")
    refuses(KeyError, "reading what was cleared", part.get, "c")


@promise(NONE)
def clearing_none_clears_everything_for_a_client_that_wrote_nothing(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    other = part.on(plane.worker())
    part.put_numbers("ab")
    other.clear(None)
    has_samples("a claim after the clear", part.claim_ready(), [])


@promise(NONE)
def clearing_none_of_nothing_warns(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    with records_warnings() as messages:
        part.clear(None)
    expect(messages, "a clear of nothing gave no warning")
    part.put_numbers("a")
    part.clear(None)
    with records_warnings() as messages:
        part.clear(None)
    expect(messages, "a second clear gave no warning")


@promise(AGAIN)
def a_cleared_id_that_is_written_again_is_a_new_sample(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"])
    part.put_numbers("ab")
    part.put("a", None, [{"v": 1}])
    part.put_numbers("a", field="y")
    has_samples("the first claim", part.claim_ready(), "ab")
    part.clear("a")
    part.put_numbers("c")
    part.put_numbers("a", start=7)
    equal("its value", part.numbers("a"), [7.0])
    refuses(KeyError, "reading a field that the new sample does not have", part.get, "a", ["y"])
    has_samples("a claim after that", part.claim_ready(), "ca", [{}, {}])
