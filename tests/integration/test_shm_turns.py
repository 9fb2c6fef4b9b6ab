"""Requests that wait for their turn in the controller, and what becomes of them when their client goes."""

from __future__ import annotations

import os
import threading

import pytest
from tests.integration import shm_workers as workers
from tests.integration.shm_workers import FIELDS, batch, is_whole, wait_until

from rlplane.adapters.local import turns as turns_module
from rlplane.adapters.local.connection import Connection
from rlplane.adapters.local.server import Server
from rlplane.adapters.local.turns import CROWD_PER_CORE
from rlplane.config import load_config
from rlplane.factory import build_data_plane_client

IDS = [f"s{row}" for row in range(8)]


@pytest.fixture
def server(monkeypatch):
    """A controller in a thread, in which a client that has asked once waits from then on."""
    server = Server(load_config("shm", {"global_segment_size": "64 MiB"}))
    thread = threading.Thread(target=server.run)
    thread.start()
    producer = workers.connect(server.dir.address)
    producer.register_partition("flow", FIELDS, 10**9, ["train"])
    producer.put_samples(IDS, "flow", batch(IDS))
    monkeypatch.setattr(turns_module, "TURN_S", 0.0)
    monkeypatch.setattr(turns_module, "QUIET_S", 3600.0)
    monkeypatch.setattr(turns_module, "IDLE_S", 3600.0)
    server._turns.crowd = server._turns.seats = 0
    server._turns.pace_s = 3600.0
    yield server
    server._turns.crowd = 100
    producer.close()
    server.stop()
    thread.join(20)
    assert not thread.is_alive()


def clear_in_line(server):
    """A client whose clear waits for its turn, the thread that waits for it, and how that ended."""
    client, ended = workers.connect(server.dir.address), []

    def clear():
        try:
            ended.append(client.clear_samples(IDS, "flow"))
        except ConnectionError as error:
            ended.append(error)

    client.list_sample_ids("flow")
    thread = threading.Thread(target=clear)
    thread.start()
    wait_until(lambda: len(server._turns) == 1)
    return client, thread, ended


def resident(server):
    """What a newcomer sees, who has its turn at once."""
    newcomer = workers.connect(server.dir.address)
    try:
        return newcomer.list_sample_ids("flow")
    finally:
        newcomer.close()


def test_a_request_in_line_is_served_when_its_turn_comes(server):
    client, thread, ended = clear_in_line(server)
    assert ended == [] and resident(server) == IDS
    server._turns.crowd = 100
    thread.join(20)
    assert ended == [None] and resident(server) == []
    client.close()


def test_claims_are_not_in_line_because_they_go_by_who_came_first(server):
    client, thread, _ = clear_in_line(server)
    assert client.claim_meta("flow", "train", ["a"], 8, timeout_s=20).sample_ids == IDS
    server._turns.crowd = 100
    thread.join(20)
    client.close()


def test_a_read_that_is_interrupted_in_line_holds_nothing(server, monkeypatch):
    client = workers.connect(server.dir.address)
    client.list_sample_ids("flow")

    def interrupted(*_):
        wait_until(lambda: len(server._turns) == 1)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.get_samples(IDS, "flow", ["a"])
    wait_until(lambda: len(server._turns) == 0)
    newcomer = workers.connect(server.dir.address)
    assert newcomer.arena_status()["leases"] == 0
    newcomer.close()
    client.close()


def test_a_client_that_is_closed_in_line_is_told(server):
    client, thread, ended = clear_in_line(server)
    client.close()
    thread.join(20)
    assert len(ended) == 1 and isinstance(ended[0], ConnectionError)
    wait_until(lambda: len(server._turns) == 0)


def test_a_client_that_dies_in_line_has_not_asked(server):
    process = workers.start(workers.list_and_clear, server.dir.address, IDS)
    wait_until(lambda: len(server._turns) == 1, 60)
    workers.kill(process)
    wait_until(lambda: len(server._turns) == 0)
    assert resident(server) == IDS


def test_many_more_busy_clients_than_cores_all_get_on():
    """For real: a controller of its own, and twice as many clients as are a crowd."""
    plane = build_data_plane_client(load_config("shm", {"global_segment_size": "256 MiB"}))
    plane.register_partition("flow", FIELDS, 10**9, ["train"])
    count = 2 * CROWD_PER_CORE * min(len(os.sched_getaffinity(0)), 4)
    clients = [workers.connect(plane.controller_address) for _ in range(count)]
    done = [0] * count
    wrong = []

    def work(number):
        client = clients[number]
        for cycle in range(30):
            ids = [f"{number}-{cycle}-{row}" for row in range(4)]
            client.put_samples(ids, "flow", batch(ids))
            meta = client.claim_meta("flow", "train", FIELDS, 4, timeout_s=60)
            if not is_whole(meta.sample_ids, client.get_data(meta)):
                wrong.append(meta.sample_ids)
            client.clear_samples(meta.sample_ids, "flow")
            done[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert done == [30] * count and not wrong
    assert plane.list_sample_ids("flow") == []
    for client in clients:
        client.close()
    plane.close()
