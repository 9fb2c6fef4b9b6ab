"""Which address a process announces, how Mooncake travels, and the pin of TransferQueue's actors."""

from __future__ import annotations

import socket
from importlib import metadata

import pytest

from rlplane.adapters import transfer_queue
from rlplane.adapters.transfer_queue import runtime_env
from rlplane.errors import ConfigError
from rlplane.storage.mooncake import network

UNREACHABLE = ["127.0.0.1", "127.1.2.3", "169.254.10.1", "::1", "fe80::1", "fe80::1%eth0", "0.0.0.0", "::"]


@pytest.fixture
def host(monkeypatch):
    """A host whose name, routes and interfaces give the addresses that a test says."""

    def make(name=(), routes=(), interfaces=()):
        monkeypatch.setattr(network, "_addresses_of_host_name", lambda: list(name))
        monkeypatch.setattr(network, "_addresses_that_route_out", lambda: iter(routes))
        monkeypatch.setattr(network, "_addresses_of_interfaces", lambda: iter(interfaces))

    return make


@pytest.mark.parametrize("address", UNREACHABLE)
def test_an_address_that_others_cannot_reach_is_passed_over(host, address):
    host(name=[address], routes=["10.0.0.7"])
    assert transfer_queue._get_local_node_ip() == "10.0.0.7"


@pytest.mark.parametrize("address", ["10.1.2.3", "192.168.0.5", "2001:db8::5", "fd00::2"])
def test_what_the_host_name_resolves_to_comes_first(host, address):
    host(name=["127.0.0.1", address], routes=["10.0.0.7"])
    assert transfer_queue._get_local_node_ip() == address


def test_a_host_without_a_route_out_has_the_address_of_an_interface(host):
    host(name=["127.0.0.1"], interfaces=["127.0.0.1", "10.9.0.2"])
    assert transfer_queue._get_local_node_ip() == "10.9.0.2"


def test_a_host_with_no_address_names_what_it_found_and_the_key_to_set(host):
    host(name=["127.0.0.1"], routes=["169.254.1.1"])
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1.*169\.254\.1\.1.*transfer_queue\.node_ip"):
        transfer_queue._get_local_node_ip()


def test_asking_for_the_route_out_sends_nothing(monkeypatch):
    def refuse(*args):
        raise AssertionError("something was sent")

    for name in ("send", "sendto", "sendall", "sendmsg"):
        monkeypatch.setattr(socket.socket, name, refuse)
    assert all(isinstance(address, str) for address in network._addresses_that_route_out())


def test_the_interfaces_of_this_host_include_loopback():
    assert "127.0.0.1" in list(network._addresses_of_interfaces())


def test_a_name_that_does_not_resolve_gives_no_address(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: (_ for _ in ()).throw(socket.gaierror("no")))
    assert network._addresses_of_host_name() == []


def test_mooncake_travels_over_tcp_unless_told_otherwise():
    assert transfer_queue._mooncake_transport_config() == {"protocol": "tcp", "device_name": ""}


@pytest.fixture
def devices(tmp_path, monkeypatch):
    """RDMA devices of this host, by name and state."""

    def make(**states):
        for name, state in states.items():
            port = tmp_path / name / "ports" / "1"
            port.mkdir(parents=True)
            (port / "state").write_text(state)
        monkeypatch.setattr(network, "_INFINIBAND", tmp_path)

    return make


def test_rdma_finds_the_active_devices(devices):
    devices(mlx5_0="4: ACTIVE\n", mlx5_1="1: DOWN\n", mlx5_2="4: ACTIVE\n")
    found = transfer_queue._mooncake_transport_config({"mooncake_protocol": "rdma"})
    assert found == {"protocol": "rdma", "device_name": "mlx5_0,mlx5_2"}


def test_rdma_takes_the_device_that_is_named(devices):
    devices(mlx5_0="4: ACTIVE\n")
    options = {"mooncake_protocol": "rdma", "mooncake_device": "mlx5_7"}
    assert transfer_queue._mooncake_transport_config(options)["device_name"] == "mlx5_7"


def test_rdma_without_a_device_is_an_error(devices):
    devices(mlx5_0="1: DOWN\n")
    with pytest.raises(ConfigError, match="no active device"):
        transfer_queue._mooncake_transport_config({"mooncake_protocol": "rdma"})


def test_an_unknown_protocol_is_an_error():
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        transfer_queue._mooncake_transport_config({"mooncake_protocol": "carrier-pigeon"})


def test_the_announced_address_replaces_an_inherited_one(monkeypatch):
    monkeypatch.setenv("MC_TCP_BIND_ADDRESS", "10.0.0.1")
    monkeypatch.delenv("MC_STORE_MEMCPY", raising=False)
    monkeypatch.delenv("MC_LOG_LEVEL", raising=False)
    network.set_mooncake_environment("10.0.0.2", quiet=True)
    import os

    assert os.environ["MC_TCP_BIND_ADDRESS"] == "10.0.0.2"
    assert os.environ["MC_STORE_MEMCPY"] == "1"


def test_the_pin_is_the_requirement_of_our_own_metadata():
    pin = transfer_queue._resolve_tq_pin()
    declared = [r for r in metadata.requires("rlplane") or [] if r.lower().startswith("transferqueue")]
    assert pin.lower().startswith("transferqueue==")
    assert any(r.split(";")[0].replace(" ", "") == pin for r in declared)


def test_metadata_without_the_requirement_is_an_error(monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch>=2.6", "notTransferQueue==1"])
    with pytest.raises(ConfigError, match="no requirement on TransferQueue"):
        transfer_queue._resolve_tq_pin()


class _Actor:
    def __init__(self):
        self.calls = []

    def options(self, **kwargs):
        self.calls.append(kwargs)
        return self


@pytest.fixture
def actors(monkeypatch):
    """TransferQueue's two actor classes, replaced by ones that remember how they were started."""
    controller = pytest.importorskip("transfer_queue.controller")
    storage = pytest.importorskip("transfer_queue.storage.simple_storage")
    pair = _Actor(), _Actor()
    monkeypatch.setattr(controller, "TransferQueueController", pair[0])
    monkeypatch.setattr(storage, "SimpleStorageUnit", pair[1])
    monkeypatch.setattr(runtime_env, "_TQ_RUNTIME_ENV_PATCHED", False)
    return pair


def test_the_pin_goes_to_both_actors_and_keeps_what_is_there(actors):
    transfer_queue._patch_tq_actor_runtime_env()
    assert transfer_queue._TQ_RUNTIME_ENV_PATCHED is True
    pin = transfer_queue._resolve_tq_pin()
    actors[0].options(name="a")
    actors[1].options(name="b", runtime_env={"env_vars": {"X": "1"}, "pip": ["numpy"]})
    assert actors[0].calls == [{"name": "a", "runtime_env": {"pip": [pin]}}]
    assert actors[1].calls == [{"name": "b", "runtime_env": {"env_vars": {"X": "1"}, "pip": ["numpy", pin]}}]


def test_patching_twice_patches_once(actors):
    transfer_queue._patch_tq_actor_runtime_env()
    once = actors[0].options
    transfer_queue._patch_tq_actor_runtime_env()
    assert actors[0].options is once


def test_classes_that_have_changed_are_left_alone_with_a_warning(actors, monkeypatch, caplog):
    import transfer_queue.controller as controller

    monkeypatch.setattr(controller, "TransferQueueController", object())
    transfer_queue._patch_tq_actor_runtime_env()
    assert "not pinned" in caplog.text
    assert transfer_queue._TQ_RUNTIME_ENV_PATCHED is False
