"""Deaths, stops and malice, made for real: what was committed stays, what was not never appears."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import select
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tests.integration import shm_workers as workers
from tests.integration.shm_workers import FIELDS, batch, is_whole, kill, start, wait_until

from rlplane.adapters.local.shm import ShmDataPlaneClient
from rlplane.config import load_config
from rlplane.factory import build_data_plane_client
from rlplane.service import protocol as wire
from rlplane.service.connection import SocketConnection
from rlplane.service.framing import message
from rlplane.service.sockets import connect as connect_socket
from rlplane.storage import copying, layout
from rlplane.storage.shm import client as shm_client
from rlplane.storage.shm.directory import PlaneDirectory, stale_planes
from rlplane.storage.shm.doctor import clean, inspect
from rlplane.storage.shm.mapping import Segments


@pytest.fixture
def plane():
    client = build_data_plane_client(load_config("shm", {"global_segment_size": "256 MiB"}))
    client.register_partition("flow", FIELDS, 10**9, ["train"])
    yield client
    assert isinstance(client, ShmDataPlaneClient) and client.controller_address is not None
    path = Path(client.controller_address.removeprefix("shm://"))
    client.close()
    assert not path.exists()


def wait_for_clients(plane, number):
    wait_until(lambda: plane.service_status()["clients"] == number)


STEPS = [
    "before the memory is reserved",
    "before the pages exist",
    "in the middle of the copy",
    "before the commit is sent",
]


@pytest.mark.parametrize("step", STEPS)
def test_a_put_that_is_killed_before_its_commit_never_appears(plane, step):
    ids = [f"lost-{row}" for row in range(64)]
    process = start(workers.die_while_putting, plane.controller_address, step, ids)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    wait_for_clients(plane, 1)
    assert plane.list_sample_ids("flow") == []
    status = plane.service_status()
    assert (status["storage"]["used"], status["reserved"], status["leases"]) == (0, 0, 0)


def test_a_put_that_is_killed_after_its_commit_is_there_whole(plane):
    ids = [f"kept-{row}" for row in range(64)]
    start(workers.die_after_the_commit, plane.controller_address, ids).join(20)
    wait_for_clients(plane, 1)
    assert plane.list_sample_ids("flow") == ids
    assert is_whole(ids, plane.get_samples(ids, "flow", FIELDS))


def test_claims_of_a_dead_worker_go_to_the_front_of_the_queue_in_their_order(plane):
    ids = [f"s{row}" for row in range(20)]
    plane.put_samples(ids, "flow", batch(ids))
    ready = workers.context.Queue()
    process = start(workers.claim_and_wait, plane.controller_address, ready, 8)
    assert ready.get(timeout=300) == ids[:8]
    assert plane.claim_meta("flow", "train", ["a"], 4).sample_ids == ids[8:12]
    kill(process)
    wait_for_clients(plane, 1)
    assert plane.claim_meta("flow", "train", ["a"], 16).sample_ids == ids[:8] + ids[12:]


def test_what_a_dead_worker_had_written_to_is_not_handed_out_again(plane):
    plane.register_partition("flow", [*FIELDS, "done"], 10**9, ["train"])
    ids = [f"s{row}" for row in range(12)]
    plane.put_samples(ids, "flow", batch(ids))
    ready = workers.context.Queue()
    process = start(workers.claim_and_wait, plane.controller_address, ready, 8, "write")
    ready.get(timeout=300)
    kill(process)
    wait_for_clients(plane, 1)
    assert plane.claim_meta("flow", "train", ["a"], 8).sample_ids == ids[4:]


def test_a_claim_that_a_dead_worker_waited_in_takes_nothing_with_it(plane):
    ready = workers.context.Queue()
    process = start(workers.wait_in_a_claim, plane.controller_address, ready)
    ready.get(timeout=300)
    wait_until(lambda: plane.partition_status("flow")["tasks"]["train"]["waiting"] == 1)
    kill(process)
    wait_for_clients(plane, 1)
    ids = [f"s{row}" for row in range(64)]
    plane.put_samples(ids, "flow", batch(ids))
    assert plane.claim_meta("flow", "train", ["a"], 64).sample_ids == ids


def test_the_leases_of_a_dead_reader_are_returned(plane):
    ids = [f"s{row}" for row in range(512)]
    plane.put_samples(ids, "flow", batch(ids))
    ready = workers.context.Queue()
    process = start(workers.read_and_hold, plane.controller_address, ready, ids)
    assert ready.get(timeout=300) == int(batch(ids)["b"].sum())
    plane.clear_samples(ids, "flow")
    held = plane.service_status()
    assert held["leases"] == 1 and held["storage"]["used"] - held["reserved"] > 0
    kill(process)
    wait_for_clients(plane, 1)
    status = plane.service_status()
    assert status["leases"] == 0 and status["storage"]["used"] == status["reserved"]


def test_nothing_committed_is_lost_or_changed_while_workers_die_under_load(plane, tmp_path):
    address, stop = plane.controller_address, tmp_path / "stop"
    put_log, read_log = tmp_path / "put", tmp_path / "read"
    producers = [start(workers.produce, address, f"p{number}", 150, put_log) for number in range(3)]
    consumers = [start(workers.consume, address, stop, read_log) for _ in range(3)]
    chooser = random.Random(7)
    for victim in range(16):
        time.sleep(chooser.uniform(0.05, 0.2))
        place = chooser.randrange(3)
        kill(consumers[place])
        consumers[place] = start(workers.consume, address, stop, read_log)
        if victim % 4 == 3:
            kill(producers[place])
            producers[place] = start(workers.produce, address, f"again{victim}", 20, put_log)
    for process in producers:
        process.join(60)
        assert process.exitcode == 0
    wait_until(lambda: not plane.list_sample_ids("flow") or not all(c.is_alive() for c in consumers), 60)
    assert [process.exitcode for process in consumers] == [None] * 3
    stop.touch()
    for process in consumers:
        process.join(120)
        assert process.exitcode == 0
    committed = set(put_log.read_text().split())
    lines = [line.split() for line in read_log.read_text().splitlines()]
    assert {line[-1] for line in lines} == {"whole"}
    read = {sample_id for line in lines for sample_id in line[:-1]}
    assert len(committed) >= 8 * 60
    assert committed <= read
    # A producer that was killed between its commit and its note leaves at most one batch beyond.
    assert len(read - committed) <= 8 * 4
    wait_for_clients(plane, 1)
    status = plane.service_status()
    assert (
        status["leases"] == 0 and status["storage"]["used"] == status["reserved"] and status["samples"] == 0
    )


def test_every_client_hears_at_once_that_a_service_which_does_not_come_back_was_killed():
    plane = ShmDataPlaneClient(load_config("shm", {"reconnect_timeout_s": 0}))
    plane.register_partition("flow", FIELDS, 10**9, ["train"])
    ready = workers.context.Queue()
    waiting = [start(workers.wait_in_a_claim, plane.controller_address, ready) for _ in range(3)]
    for _ in waiting:
        assert ready.get(timeout=300) is True
    wait_until(lambda: plane.partition_status("flow")["tasks"]["train"]["waiting"] == 3)
    os.kill(plane.service_status()["pid"], signal.SIGKILL)
    for _ in waiting:
        assert ConnectionError in ready.get(timeout=300)
    with pytest.raises(ConnectionError, match="has ended or died"):
        plane.list_sample_ids("flow")
    for process in waiting:
        process.join(120)
    assert not Path(str(plane.controller_address).removeprefix("shm://")).exists()
    plane.close()


def test_the_next_start_removes_what_a_killed_service_left(plane):
    process = start(workers.bootstrap_and_wait, ready := workers.context.Queue())
    address, service = ready.get(timeout=300)
    path = Path(address.removeprefix("shm://"))
    os.kill(process.pid, signal.SIGSTOP)  # so that it cannot clean up
    os.kill(service, signal.SIGKILL)
    wait_until(lambda: path in stale_planes())
    assert any(check.status == "warning" and path.name in check.detail for check in inspect())
    other = build_data_plane_client(load_config("shm"))
    assert not path.exists()
    other.close()
    os.kill(process.pid, signal.SIGKILL)
    process.join(120)
    assert clean() == []


def test_the_death_of_the_bootstrap_process_ends_the_service():
    process = start(workers.bootstrap_and_wait, ready := workers.context.Queue())
    address, service = ready.get(timeout=300)
    worker = workers.connect(address)
    kill(process)
    path = Path(address.removeprefix("shm://"))
    wait_until(lambda: not path.exists())
    wait_until(lambda: not Path(f"/proc/{service}").exists() or _is_zombie(service))
    with pytest.raises(ConnectionError):
        worker.list_sample_ids("flow")
    worker.close()


def _is_zombie(pid):
    return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()


def test_a_stopped_client_holds_up_nobody(plane):
    ready = workers.context.Queue()
    process = start(workers.wait_in_a_claim, plane.controller_address, ready)
    ready.get(timeout=300)
    wait_until(lambda: plane.partition_status("flow")["tasks"]["train"]["waiting"] == 1)
    os.kill(process.pid, signal.SIGSTOP)
    plane.register_partition("other", ["a"], 10**9, ["train"])
    for step in range(200):
        ids = [f"{step}-{row}" for row in range(8)]
        plane.put_samples(ids, "other", TensorDict({"a": torch.arange(8)}, batch_size=[8]))
        meta = plane.claim_meta("other", "train", ["a"], 8)
        assert torch.equal(plane.get_data(meta)["a"], torch.arange(8))
        plane.clear_samples(meta.sample_ids, "other")
    os.kill(process.pid, signal.SIGCONT)
    ids = [f"s{row}" for row in range(64)]
    plane.put_samples(ids, "flow", batch(ids))
    assert ready.get(timeout=300) == "claimed"
    process.join(120)


def test_leases_that_are_released_while_the_service_is_stopped_arrive_although_the_client_stays_idle(plane):
    """More than its socket holds. Nothing is asked any more by the client that has released them."""
    plane.put_samples(["s0"], "flow", batch(["s0"]))
    idle = workers.connect(plane.controller_address)
    link = idle._link()
    leases = [link.request(wire.Locate("flow", ["s0"], ["a"]), wire.Located).lease for _ in range(3000)]
    assert plane.service_status()["leases"] == 3000
    service = plane.service_status()["pid"]
    os.kill(service, signal.SIGSTOP)
    try:
        for lease in leases:
            link.connection.release(lease)
    finally:
        os.kill(service, signal.SIGCONT)
    wait_until(lambda: plane.service_status()["leases"] == 0)
    assert plane.service_status()["clients"] == 2
    idle.close()
    wait_for_clients(plane, 1)


def test_a_slow_reader_delays_only_the_recycling_of_what_it_reads(plane):
    ids = [f"s{row}" for row in range(256)]
    plane.put_samples(ids, "flow", batch(ids))
    ready = workers.context.Queue()
    process = start(workers.read_and_hold, plane.controller_address, ready, ids)
    ready.get(timeout=300)
    plane.clear_samples(ids, "flow")
    held = plane.service_status()["storage"]["used"]
    for step in range(50):
        more = [f"{step}-{row}" for row in range(256)]
        plane.put_samples(more, "flow", batch(more))
        plane.clear_samples(more, "flow")
    status = plane.service_status()
    assert status["storage"]["used"] <= 2 * held + status["reserved"]
    kill(process)


def test_the_directory_is_0700_and_what_is_in_it_0600(plane):
    ids = ["s0"]
    plane.put_samples(ids, "flow", batch(ids))
    path = Path(plane.controller_address.removeprefix("shm://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    files = [file for file in path.iterdir() if file.is_file()]
    assert any(file.name.startswith("segment-") for file in files)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files if file.name != "plane.json"} == {0o600}


@pytest.fixture(scope="module")
def attacked():
    client = build_data_plane_client(load_config("shm"))
    client.register_partition("flow", FIELDS, 10**9, ["train"])
    yield client
    client.close()


def knock(client):
    """A bare socket to the service, as anybody with the same user could open one."""
    attacker = connect_socket(PlaneDirectory.at(client.controller_address).socket)
    attacker.settimeout(20)
    return attacker


def introduce(client, /, **hello):
    """A bare socket that has introduced itself: as a new client, or as a channel of one."""
    attacker = knock(client)
    attacker.sendall(message(0, wire.encode(wire.Hello(wire.PROTOCOL_VERSION, "", **hello))))
    return attacker


def channel_of(client):
    connection = client._link().connection
    return introduce(client, client=connection.client, secret=connection._secret)


# As whom the attacker speaks: unknown, as a client over its lifeline, or as a client over a channel.
ENTRANCES: dict[str, Callable[[Any], socket.socket]] = {
    "unknown": knock,
    "lifeline": introduce,
    "channel": channel_of,
}
entrances = pytest.mark.parametrize("entrance", list(ENTRANCES))


def check_service(client):
    ids = ["s0", "s1"]
    client.put_samples(ids, "flow", batch(ids))
    assert is_whole(ids, client.get_samples(ids, "flow", FIELDS))
    client.clear_samples(ids, "flow")


@entrances
def test_100_000_random_frames_are_refused_and_service_goes_on(attacked, entrance):
    noise = random.Random(3)
    for _ in range(10):
        # Anew each time: who does not introduce itself is hung up on after a while.
        with ENTRANCES[entrance](attacked) as attacker:
            for _ in range(10_000):
                attacker.sendall(message(noise.randrange(2**64), noise.randbytes(noise.randrange(64))))
            check_service(attacked)


@entrances
def test_random_bytes_that_are_not_even_frames_are_refused_and_service_goes_on(attacked, entrance):
    noise = random.Random(4)
    for number in range(2_000):
        with ENTRANCES[entrance](attacked) as attacker, contextlib.suppress(OSError):
            for _ in range(noise.randrange(4)):
                # Every other one begins with a length that is small enough to be believed.
                length = noise.randrange(99).to_bytes(4, "little") if number % 2 else b""
                attacker.sendall(length + noise.randbytes(noise.randrange(64)))
        if number % 200 == 0:
            check_service(attacked)
    check_service(attacked)


def test_who_sends_requests_and_never_reads_the_answers_fills_no_memory(attacked):
    ids = [f"a-long-name-of-a-sample-{row}" for row in range(1_000)]
    attacked.put_samples(ids, "flow", batch(ids))
    ask = message(1, wire.encode(wire.Envelope(wire.ListIds("flow"))))
    with channel_of(attacked) as attacker:
        attacker.settimeout(2)
        service = psutil.Process(attacked._supervisor.pid)
        before = service.memory_info().rss
        with contextlib.suppress(TimeoutError):
            attacker.sendall(ask * 100_000)  # each answer is a thousand times as long
        check_service(attacked)
        assert service.memory_info().rss - before < 2**26
    attacked.clear_samples(ids, "flow")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)
REQUESTS = [kind.__name__ for kind in get_args(wire.Request)]
NOTICES = [kind.__name__ for kind in (wire.Release, wire.Abandon, wire.Goodbye)]


@entrances
@given(st.lists(PLAIN, max_size=10), st.sampled_from(REQUESTS), st.sampled_from(NOTICES))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_frames_that_look_like_messages_are_refused_and_service_goes_on(
    attacked, entrance, parts, request_, notice
):
    with ENTRANCES[entrance](attacked) as attacker, contextlib.suppress(ConnectionError):
        if request_ != "Shutdown":  # which is the one request that is meant to end it
            attacker.sendall(message(1, msgspec.msgpack.encode([[request_, *parts]])))
            attacker.sendall(message(1, msgspec.msgpack.encode([[request_, *parts], parts, parts])))
        attacker.sendall(message(0, msgspec.msgpack.encode([notice, *parts])))
        attacker.sendall(message(0, msgspec.msgpack.encode([wire.PROTOCOL_VERSION, *parts])))
        while select.select([attacker], [], [], 0)[0] and attacker.recv(2**20):
            pass
    attacked.check_consumption_status("flow", ["train"])


@entrances
def test_truncated_and_oversized_messages_are_refused(attacked, entrance):
    enter = ENTRANCES[entrance]
    body = wire.encode(wire.Envelope(wire.Locate("flow", ["s0"] * 1000, ["a"])))
    with enter(attacked) as attacker:
        for cut in range(0, len(body), 97):
            attacker.sendall(message(1, body[:cut]))
            with enter(attacked) as hasty:
                hasty.sendall(message(1, body)[:cut])
    check_service(attacked)
    with enter(attacked) as boaster:
        boaster.sendall((257 * 2**20).to_bytes(4, "little") + bytes(1000))
        while boaster.recv(100):
            pass  # until the service hangs up
    check_service(attacked)


def test_a_claim_that_was_interrupted_gives_its_samples_back(plane, monkeypatch):
    ids = [f"s{row}" for row in range(8)]
    plane.put_samples(ids, "flow", batch(ids))
    receive = SocketConnection._receive

    def interrupted(self, channel, number, waits_s):
        receive(self, channel, number, waits_s)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SocketConnection, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            plane.claim_meta("flow", "train", ["a"], 8)
    assert plane.claim_meta("flow", "train", ["a"], 8, timeout_s=120).sample_ids == ids


@pytest.mark.parametrize("how", ["cannot be encoded", "interrupted before it is sent", "sent in part"])
def test_a_call_that_never_reached_the_service_does_not_undo_the_claim_before_it(plane, how, monkeypatch):
    ids = [f"s{row}" for row in range(8)]
    plane.put_samples(ids, "flow", batch(ids))
    worker = workers.connect(plane.controller_address)
    assert worker.claim_meta("flow", "train", ["a"], 8).sample_ids == ids
    if how == "cannot be encoded":
        with pytest.raises(ValueError, match="cannot be sent"):
            worker.claim_meta("flow", "train", ["a"], 8, where={"a tag": 2**70})
    elif how == "interrupted before it is sent":
        with monkeypatch.context() as patch:
            patch.setattr("rlplane.service.connection._Channel.send", interrupt)
            with pytest.raises(KeyboardInterrupt):
                worker.get_samples(ids, "flow", ["a"])
    else:
        # A stopped service does not read, so a long request fills the socket and no more.
        os.kill(plane._supervisor.pid, signal.SIGSTOP)
        worker._link().connection._ack_timeout_s = 0.5
        with pytest.raises(ConnectionError, match="has not answered"):
            worker.get_samples([f"sample-{row:0100}" for row in range(20_000)], "flow", ["a"])
        os.kill(plane._supervisor.pid, signal.SIGCONT)
        worker._link().connection._ack_timeout_s = 20
    assert worker.get_samples(ids, "flow", ["a"])["a"].tolist() == batch(ids)["a"].tolist()
    assert plane.claim_meta("flow", "train", ["a"], 8, blocking=False).size == 0
    worker.close()


def interrupt(*_):
    raise KeyboardInterrupt


def test_what_a_dead_client_has_finished_is_not_handed_out_again(plane):
    """Its channels end one after the other, in whatever order, and its claim was read by one of them."""
    ids = [f"s{row}" for row in range(8)]
    for _ in range(10):
        plane.put_samples(ids, "flow", batch(ids))
        ready = workers.context.Queue()
        process = start(workers.claim_in_one_thread_and_write_in_another, plane.controller_address, ready)
        assert ready.get(timeout=300) == ids
        kill(process)
        wait_until(lambda: plane.service_status()["clients"] == 1)
        assert plane.claim_meta("flow", "train", ["a"], 8, blocking=False).size == 0
        plane.clear_samples(ids, "flow")


def test_a_claim_that_close_interrupts_is_not_lost_when_it_was_just_answered(plane):
    ids = [f"s{row}" for row in range(8)]
    worker = workers.connect(plane.controller_address)
    got = []

    def claim():
        with contextlib.suppress(ConnectionError):
            got.extend(worker.claim_meta("flow", "train", ["a"], 8, timeout_s=600).sample_ids)

    thread = threading.Thread(target=claim)
    thread.start()
    wait_until(lambda: plane.partition_status("flow")["tasks"]["train"]["waiting"] == 1)
    # The put and the close are both there when the service goes on: the put comes first.
    os.kill(plane._supervisor.pid, signal.SIGSTOP)
    putting = threading.Thread(target=lambda: plane.put_samples(ids, "flow", batch(ids)))
    putting.start()
    time.sleep(0.2)
    closing = threading.Thread(target=worker.close)
    closing.start()
    time.sleep(0.2)
    os.kill(plane._supervisor.pid, signal.SIGCONT)
    for ended in (putting, closing, thread):
        ended.join(120)
    again = [] if got else plane.claim_meta("flow", "train", ["a"], 8, timeout_s=120).sample_ids
    assert sorted(got + again) == ids


def test_closing_a_client_ends_its_calls_that_wait_in_other_threads(plane):
    worker = workers.connect(plane.controller_address)
    failed = []

    def claim():
        with pytest.raises(ConnectionError):
            worker.claim_meta("flow", "train", ["a"], 8, timeout_s=600)
        failed.append(True)

    thread = threading.Thread(target=claim)
    thread.start()
    wait_until(lambda: plane.partition_status("flow")["tasks"]["train"]["waiting"] == 1)
    worker.close()
    thread.join(120)
    assert failed == [True]
    wait_until(lambda: plane.partition_status("flow")["tasks"]["train"]["waiting"] == 0)


class SlowCopies:
    """Copies that begin when they are told to."""

    def __init__(self, monkeypatch):
        self.begun, self.go, self.done = threading.Event(), threading.Event(), False
        monkeypatch.setattr(layout, "copy_all", self._slow(copying.copy_all))
        monkeypatch.setattr(shm_client, "memmove", self._slow(ctypes.memmove))

    def _slow(self, copy):
        def copy_when_told(*args):
            self.begun.set()
            assert self.go.wait(120)
            copy(*args)
            self.done = True

        return copy_when_told


def after_reserving(monkeypatch, what):
    """Call ``what(connection, place)`` when a place was reserved and nothing was written yet."""
    exchange = SocketConnection.exchange

    def reserve_and_more(self, body, **more):
        answer = exchange(self, body, **more)
        if isinstance(answer, wire.Reserved):
            what(self, answer.place)
        return answer

    monkeypatch.setattr(SocketConnection, "exchange", reserve_and_more)


@pytest.mark.parametrize("call", ["put", "read"])
def test_closing_a_client_waits_until_another_thread_has_copied(plane, monkeypatch, call):
    plane.put_samples(["there"], "flow", batch(["there"]))
    other = workers.connect(plane.controller_address)
    copies = SlowCopies(monkeypatch)
    ended = []

    def use():
        try:
            if call == "put":
                other.put_samples(["new"], "flow", batch(["new"]))
            else:
                ended.append(other.get_samples(["there"], "flow", FIELDS))
        except ConnectionError as error:
            ended.append(error)

    using = threading.Thread(target=use)
    using.start()
    assert copies.begun.wait(120)
    closing = threading.Thread(target=other.close)
    closing.start()
    time.sleep(0.3)
    assert closing.is_alive() and plane.service_status()["clients"] == 2, "its memory is still its own"
    copies.go.set()
    closing.join(120)
    assert not closing.is_alive() and copies.done
    using.join(120)
    if call == "put":
        assert plane.list_sample_ids("flow") in (["there"], ["there", "new"])
    elif not isinstance(ended[0], ConnectionError):
        assert is_whole(["there"], ended[0])
    wait_for_clients(plane, 1)
    assert plane.service_status()["leases"] == 0


def test_a_put_that_was_about_to_copy_when_its_client_was_closed_copies_nothing(plane, monkeypatch):
    other = workers.connect(plane.controller_address)
    monkeypatch.setattr(Segments, "back", lambda *_: pytest.fail("it went on"))

    def close(link, place):
        closing = threading.Thread(target=other.close)
        closing.start()
        closing.join(120)

    after_reserving(monkeypatch, close)
    with pytest.raises(ConnectionError):
        other.put_samples(["new"], "flow", batch(["new"]))
    wait_for_clients(plane, 1)
    assert plane.service_status()["reserved"] == 0 and plane.list_sample_ids("flow") == []


def test_memory_that_somebody_removed_before_it_was_filled_goes_back(plane, monkeypatch):
    other = workers.connect(plane.controller_address)
    directory = PlaneDirectory.at(plane.controller_address)
    after_reserving(monkeypatch, lambda link, place: os.unlink(directory.segment(place.at[0])))
    with pytest.raises(ConnectionError, match="somebody removed it"):
        other.put_samples(["new"], "flow", batch(["new"]))
    status = plane.service_status()
    assert status["clients"] == 2 and status["reserved"] == status["storage"]["used"] == 0
    other.close()


def test_a_signal_handler_may_close_a_client_in_the_middle_of_a_copy(plane, monkeypatch):
    other = workers.connect(plane.controller_address)
    copy_all = copying.copy_all

    def close_and_copy(copies):
        started = time.monotonic()
        other.close()
        assert time.monotonic() - started < 10, "it waited for itself"
        copy_all(copies)

    monkeypatch.setattr(layout, "copy_all", close_and_copy)
    with pytest.raises(ConnectionError):
        other.put_samples(["new"], "flow", batch(["new"]))
    wait_for_clients(plane, 1)
    assert plane.list_sample_ids("flow") == []


@pytest.mark.parametrize("backend", ["local", "shm"])
def test_a_default_device_of_the_users_changes_nothing(backend):
    ids = [f"s{row}" for row in range(8)]
    values = torch.arange(8 * 400.0).view(8, 400)
    client = build_data_plane_client(load_config(backend))
    try:
        client.register_partition("flow", ["x"], 0, ["train"])
        with torch.device("meta"):
            client.put_samples(ids, "flow", TensorDict({"x": values}, batch_size=[8]))
            for wanted in (ids, ids[::-1], ids[2:5]):
                read = client.get_samples(wanted, "flow", ["x"])["x"]
                assert read.tolist() == values[[ids.index(i) for i in wanted]].tolist()
    finally:
        client.close()
