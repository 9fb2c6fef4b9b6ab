"""The suite can fail: every adapter that is broken on purpose is caught by the check that is meant for it."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.unit import broken_adapters
from tests.unit.broken_adapters import CAUGHT_BY, KEEP_WAITING
from tests.unit.reference_adapter import ReferenceClient, ReferencePlanes

from rlplane.errors import UnsupportedOperationError
from rlplane.testing import BrokenPromise, BrokenPromises, check_data_plane, checks, run_check
from rlplane.testing import data_plane_state_machine as state_machine

BY_NAME = {check.name: check for check in checks()}
# A deadline of half a second, for adapters that let a check wait for it.
HURRY = 0.05


@pytest.mark.parametrize(
    ("adapter", "name"), CAUGHT_BY.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_the_check_that_is_meant_for_it_catches(adapter, name):
    check = BY_NAME[name]
    with pytest.raises(BrokenPromise) as caught:
        run_check(check, ReferencePlanes(adapter, time_scale=HURRY if adapter in KEEP_WAITING else 1.0))
    message = str(caught.value)
    assert adapter.__name__ in message
    assert check.sentence in message
    assert check.quotes[0] in message


@pytest.mark.parametrize(
    "adapter",
    [
        broken_adapters.ClaimsTwice,
        broken_adapters.QueuesOverwrittenSamplesAgain,
        broken_adapters.ForgetsTheTail,
        broken_adapters.RegistrationDropsCursors,
        broken_adapters.ReadsAnIdOnce,
        broken_adapters.DropsMissingKeys,
        broken_adapters.ChecksConditionsWhenWritten,
        broken_adapters.LosesObjects,
        broken_adapters.PadsNestedRows,
    ],
)
def test_the_state_machine_catches(adapter):
    machine = state_machine(ReferencePlanes(adapter, time_scale=HURRY))
    thorough = settings(
        max_examples=300,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises(BrokenPromise):
        run_state_machine_as_test(machine, settings=thorough)


def test_all_broken_promises_are_reported_together():
    with pytest.raises(BrokenPromises) as caught:
        check_data_plane(ReferencePlanes(broken_adapters.ClosesOnce))
    assert isinstance(caught.value, AssertionError)
    assert any("close may be called twice" in str(broken) for broken in caught.value.exceptions)


class HasNoConditions(ReferenceClient):
    limitations = frozenset({"where"})

    def claim_meta(self, *args, where=None, **kwargs):
        if where:
            raise UnsupportedOperationError("HasNoConditions does not support where")
        return super().claim_meta(*args, **kwargs)


def test_a_declared_limitation_that_is_refused_loudly_is_no_broken_promise():
    check = BY_NAME["tags_count_as_they_are_at_the_claim"]
    assert run_check(check, ReferencePlanes(HasNoConditions)).result == "refused"
    assert run_check(BY_NAME["tags_are_merged"], ReferencePlanes(HasNoConditions)).result == "kept"


def test_a_refusal_that_is_not_declared_is_a_broken_promise():
    class SaysNothing(HasNoConditions):
        limitations = frozenset()

    with pytest.raises(BrokenPromise, match="does not declare"):
        run_check(BY_NAME["tags_count_as_they_are_at_the_claim"], ReferencePlanes(SaysNothing))


def test_a_declared_limitation_does_not_excuse_a_wrong_answer():
    check = BY_NAME["every_operator_of_a_condition_works"]
    with pytest.raises(BrokenPromise, match="must raise NotImplementedError"):
        run_check(check, ReferencePlanes(broken_adapters.IgnoresConditions), limitations=["where"])


def test_a_limitation_that_is_none_must_not_be_declared():
    with pytest.raises(BrokenPromise, match="take the declaration away"):
        run_check(BY_NAME["tags_are_merged"], ReferencePlanes(), limitations=["tags_are_merged"])


def test_what_an_adapter_does_not_promise_is_not_run_and_has_its_reason():
    class ClaimsInAnyOrder(ReferenceClient):
        not_promised: ClassVar = {"what_is_ready_first_is_claimed_first": "it has no clock"}

    check = BY_NAME["what_is_ready_first_is_claimed_first"]
    outcome = run_check(check, ReferencePlanes(ClaimsInAnyOrder))
    assert (outcome.result, outcome.reason) == ("not promised", "it has no clock")
    assert run_check(BY_NAME["tags_are_merged"], ReferencePlanes(ClaimsInAnyOrder)).result == "kept"


def test_a_limitation_that_nobody_knows_is_an_error_with_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'where'"):
        check_data_plane(ReferencePlanes(), limitations=["were"])


def test_an_optional_method_that_is_absent_makes_its_checks_not_applicable():
    class HasNoStatus(ReferenceClient):
        def partition_status(self, partition_id):
            raise self._unsupported("partition_status")

    check = BY_NAME["the_status_of_a_partition_counts_waiting_claims"]
    outcome = run_check(check, ReferencePlanes(HasNoStatus))
    assert (outcome.result, outcome.reason) == (
        "not applicable",
        "HasNoStatus does not have partition_status",
    )
    waits = BY_NAME["a_waiting_claim_is_woken_by_the_write_that_completes_its_batch"]
    assert run_check(waits, ReferencePlanes(HasNoStatus)).result == "kept"
