"""The contract holds with the measuring client around an engine: here memory, with every kind of listener."""

from __future__ import annotations

import uuid

import pytest

from rlplane.config import load_config
from rlplane.factory import build_data_plane_client
from rlplane.observability import MetricsDataPlaneClient
from rlplane.testing import checks, run_check

# All that a machine without an accelerator cannot show.
NEEDS_A_DEVICE = "what_is_on_a_device_is_moved_to_the_host"


class ObservedPlanes:
    """Every client gets a plane of its own, and is built as a user's config would build it."""

    def __init__(self):
        self.configs = {}

    def client(self, **config):
        observed = {
            "controller_address": f"observed-{uuid.uuid4().hex}",
            "observability.enabled": True,
            "observability.sinks": ["logging"],
            "observability.track_partitions": ["*"],
            "observability.verify": True,
        }
        cfg = load_config("local", {**observed, **config})
        client = build_data_plane_client(cfg)
        assert isinstance(client, MetricsDataPlaneClient)
        self.configs[client] = cfg
        return client

    def worker(self, client):
        return build_data_plane_client(self.configs[client], bootstrap=False)


@pytest.mark.parametrize("check", checks(), ids=str)
def test_an_observed_engine_keeps_the_promise_that(check):
    planes = ObservedPlanes()
    outcome = run_check(check, planes)
    assert outcome.result == "kept" or check.name == NEEDS_A_DEVICE
    # Whatever kind of row it wrote and read: the bytes are found to be right.
    assert [client.snapshot()["rows_mismatched"] for client in planes.configs] == [0] * len(planes.configs)
