"""Random operations on a plane, each compared with a dictionary model: a hypothesis state machine.

``TestMyPlane = data_plane_state_machine(factory).TestCase`` is a test that pytest and unittest find.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlplane.errors import MissingExtraError

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine


def data_plane_state_machine(factory: Any) -> type[RuleBasedStateMachine]:
    """The state machine for the planes that ``factory`` makes; see ``check_data_plane`` for factories.

    It writes dense, jagged and object columns, turns and tags, overwrites them, reads in any order, clears
    and registers again; it claims with and without conditions, groups, orders, budgets, reuse and ranks, and
    gives claims back; it advances versions under every kind of flow policy, closes groups and ends flows; all
    that on two partitions with two tasks and more. A feature that the adapter declares as a limitation is
    left out.

    Raises:
        MissingExtraError: hypothesis is not installed.
    """
    try:
        import hypothesis  # noqa: F401
    except ImportError as exc:
        raise MissingExtraError(
            "the state machine needs hypothesis, which is not installed: pip install hypothesis"
        ) from exc
    from rlplane.testing.random_claims import DataPlaneMachine

    # In a function: as a class attribute, the factory itself could become a method.
    return type("DataPlaneMachine", (DataPlaneMachine,), {"factory": staticmethod(lambda: factory)})
