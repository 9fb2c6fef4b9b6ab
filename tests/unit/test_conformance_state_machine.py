"""The state machine, run against the reference adapter."""

from __future__ import annotations

import builtins

import pytest
from hypothesis import settings
from tests.unit.reference_adapter import ReferencePlanes

from rlplane.errors import MissingExtraError
from rlplane.testing import data_plane_state_machine

TestReferencePlane = data_plane_state_machine(ReferencePlanes()).TestCase
TestReferencePlane.settings = settings(TestReferencePlane.settings, max_examples=60, stateful_step_count=40)


def test_without_hypothesis_the_error_says_what_to_install(monkeypatch):
    def no_hypothesis(name, *args, **kwargs):
        if name.partition(".")[0] == "hypothesis":
            raise ImportError(name)
        return builtins_import(name, *args, **kwargs)

    builtins_import = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", no_hypothesis)
    with pytest.raises(MissingExtraError, match="pip install hypothesis"):
        data_plane_state_machine(ReferencePlanes())
