"""Checks that any implementation of the data plane can be run against.

``check_data_plane(factory)`` runs the contract against the planes that a factory makes, and
``pytest --data-plane mypkg:make_client`` does the same with one test per promise. ``docs/testing.md`` tells
the author of an adapter how to use both.

    promises.py           what a promise and its check are, and how a check is run
    plane_under_test.py   the plane that is checked, as the checks use it
    expectations.py       what the checks assert, with messages that say what should have happened
    suite/                the checks, one file per subject
    state_machine.py      random operations, as a hypothesis state machine
    random_operations.py  those that write, read and clear; random_claims.py has those that claim
    random_values.py      the names, tags, conditions and rows that they use
    model.py              what they are compared with: a partition as a dictionary
    model_flow.py         the same for flow policies
    plugin.py             the pytest plugin. It is loaded into every pytest run, so it imports nothing heavy
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplane.testing.promises import (
    BrokenPromise,
    BrokenPromises,
    CheckOutcome,
    PromiseCheck,
    check_data_plane,
    checks,
    run_check,
)

if TYPE_CHECKING:
    from rlplane.testing.plane_under_test import PlaneFactory
    from rlplane.testing.state_machine import data_plane_state_machine

__all__ = [
    "BrokenPromise",
    "BrokenPromises",
    "CheckOutcome",
    "PlaneFactory",
    "PromiseCheck",
    "check_data_plane",
    "checks",
    "data_plane_state_machine",
    "run_check",
]


def __getattr__(name: str) -> object:
    # These load torch or hypothesis, and the plugin is loaded into pytest runs that need neither.
    if name == "PlaneFactory":
        from rlplane.testing.plane_under_test import PlaneFactory

        return PlaneFactory
    if name == "data_plane_state_machine":
        from rlplane.testing.state_machine import data_plane_state_machine

        return data_plane_state_machine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
