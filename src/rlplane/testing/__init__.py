"""Checks that any implementation of the data plane can be run against.

``check_data_plane(factory)`` runs the contract against the planes that a factory makes, and
``pytest --data-plane mypkg:make_client`` does the same with one test per promise. ``docs/testing.md`` tells
the author of an adapter how to use both.

    promises.py       what a promise and a check are, and how one is run
    plane.py          the plane under test, as the checks see it
    expectations.py   what the checks expect, in words
    suite/            the checks, one file per subject
    model.py          a partition as a dictionary, and
    random_operations.py  the operations that are compared with it, as a hypothesis
    state_machine.py  state machine
    table.py          the table of promises in docs/promises.md
    plugin.py         the pytest plugin, loaded into every pytest run: it imports nothing heavy
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplane.testing.promises import (
    BrokenPromise,
    BrokenPromises,
    Check,
    Outcome,
    check_data_plane,
    checks,
    run_check,
)

if TYPE_CHECKING:
    from rlplane.testing.plane import PlaneFactory
    from rlplane.testing.state_machine import data_plane_state_machine

__all__ = [
    "BrokenPromise",
    "BrokenPromises",
    "Check",
    "Outcome",
    "PlaneFactory",
    "check_data_plane",
    "checks",
    "data_plane_state_machine",
    "run_check",
]


def __getattr__(name: str) -> object:
    # These load torch or hypothesis, and the plugin is loaded into pytest runs that need neither.
    if name == "PlaneFactory":
        from rlplane.testing.plane import PlaneFactory

        return PlaneFactory
    if name == "data_plane_state_machine":
        from rlplane.testing.state_machine import data_plane_state_machine

        return data_plane_state_machine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
