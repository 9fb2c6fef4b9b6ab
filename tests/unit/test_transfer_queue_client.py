"""The cluster client without a cluster: which Ray it looks for, what planes have to agree about, its end."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from rlplane.adapters.transfer_queue import TQDataPlaneClient, plane
from rlplane.config import load_config
from rlplane.errors import ClientClosedError, ConfigError
from rlplane.interfaces import ADDRESS_VARIABLE

LOCAL_PLANES = [
    "shm:///dev/shm/rlplane-1/p",
    "unix:///run/p",
    "ipc:///run/p",
    "tcp://10.0.0.1:7001",
    "/run/p",
]


def address_for(**keys: Any) -> str | None:
    return plane._address(load_config("cluster-simple", keys))


def test_a_closed_client_refuses_and_does_not_pickle() -> None:
    made = TQDataPlaneClient.__new__(TQDataPlaneClient)
    made._cfg, made._bootstrap = load_config("cluster-simple"), False
    made._set_up_unconnected()
    made.close()
    with pytest.raises(ClientClosedError):
        made.list_sample_ids("p")
    with pytest.raises(ClientClosedError):
        pickle.dumps(made)
    made.close()


@pytest.mark.parametrize("address", LOCAL_PLANES)
def test_the_address_of_a_local_plane_is_no_ray_cluster(address: str) -> None:
    with pytest.raises(ConfigError, match="address of a Ray cluster"):
        address_for(controller_address=address)


def test_the_address_of_the_config_comes_before_the_inherited_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    assert address_for() is None
    assert address_for(controller_address="10.0.0.1:6379") == "10.0.0.1:6379"
    monkeypatch.setenv(ADDRESS_VARIABLE, "10.0.0.2:6379")
    assert address_for() == "10.0.0.2:6379"
    assert address_for(controller_address="10.0.0.1:6379") == "10.0.0.1:6379"


@pytest.mark.parametrize("address", LOCAL_PLANES)
def test_a_local_planes_address_that_is_inherited_is_not_for_this_client(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, address)
    assert address_for() is None
    assert address_for(controller_address="10.0.0.1:6379") == "10.0.0.1:6379"


def test_the_time_an_answer_may_take_is_that_of_the_config() -> None:
    assert plane.ack_timeout_s(load_config("cluster-simple", {"ack_timeout_ms": 1500})) == 1.5
    assert plane.ack_timeout_s(load_config("cluster-simple")) == 30.0


@pytest.mark.parametrize("backend", ["cluster-simple", "cluster-mooncake"])
def test_only_what_a_plane_is_made_from_has_to_agree(backend: str) -> None:
    def made_from(**keys: Any) -> dict[str, Any]:
        return plane.plane_config(load_config(backend, keys))

    assert made_from(local_buffer_size=1, allow_pickle=True) == made_from(ack_timeout_ms=7)
    assert made_from(storage_capacity=5) != made_from()
    assert made_from(num_storage_units=5) != made_from()
    # The bytes of a plane are bounded on both backends, by this.
    assert made_from(global_segment_size=64 << 20) != made_from()


def test_how_mooncake_travels_matters_to_a_plane_on_mooncake_only() -> None:
    port = {"transfer_queue.mooncake_master_port": 50051}
    assert plane.plane_config(load_config("cluster-mooncake", port)) != plane.plane_config(
        load_config("cluster-mooncake")
    )
    assert plane.plane_config(load_config("cluster-simple", port)) == plane.plane_config(
        load_config("cluster-simple")
    )


def test_a_plane_does_not_show_its_token() -> None:
    made = plane.Plane("n", "simple", {}, {}, {"address": "tcp://h:1", "token": "secret"}, None, "node")
    assert "secret" not in repr(made)
