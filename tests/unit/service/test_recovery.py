"""A service that was built from a journal is the service that wrote it, wherever the journal ends."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.service.service_harness import FOREVER, ArenaHost, layout_of

from rlplane.control import (
    advancing,
    clearing,
    cursors,
    leaving,
    marking,
    snapshots,
    staging,
    unclaiming,
)
from rlplane.control.line import WaitingLine
from rlplane.control.requests import NOBODY, Batch, Claim
from rlplane.control.rules import PartitionSpec
from rlplane.errors import CheckpointError
from rlplane.service import commits, long_work
from rlplane.service import journal as journal_module
from rlplane.service import protocol as wire
from rlplane.service.clients import PendingRequest
from rlplane.service.commits import PutWork
from rlplane.service.core import ControlService
from rlplane.service.journal import Journal
from rlplane.service.long_work import AdvanceWork, LeaveWork, LineUpWork, LossWork, MarkWork, UnclaimWork
from rlplane.service.recovery import About, JournaledHost, Recovered, recover, resume, unreferenced
from rlplane.service.server import Server
from rlplane.service.sockets import listen
from rlplane.storage.keyed import KeyedHost
from rlplane.storage.places import Loss, Place
from rlplane.storage.shm.arena import PAGE

CAPACITY = 12
CLIENTS = (0, 1, 2)
SHARE = 0.25
UNITS = 5


@pytest.fixture(scope="module", autouse=True)
def the_shortest_slices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clearing, "_SAMPLES_AT_ONCE", 1)
        patch.setattr(staging, "_SAMPLES_AT_ONCE", 1)
        patch.setattr(commits, "_MANY_SAMPLES", 2)
        patch.setattr(long_work, "_AT_ONCE", 3)
        patch.setattr(unclaiming, "_SAMPLES_AT_ONCE", 1)
        patch.setattr(marking, "_SAMPLES_AT_ONCE", 1)
        patch.setattr(leaving, "_SAMPLES_AT_ONCE", 1)
        patch.setattr(advancing, "_SAMPLES_AT_ONCE", 1)
        patch.setattr(cursors, "_VERY_MANY_ROWS", 2)
        patch.setattr(cursors, "_ROWS_A_SLICE", 4)
        patch.setattr(cursors, "_FEWEST_SLICES", 1)
        patch.setattr(commits, "_MANY_TO_FREE", 2)
        patch.setattr(staging, "_FREED_AT_ONCE", 2)
        patch.setattr(snapshots, "_MANY", 1)
        yield


class JournaledDesk:
    """A service with a journal, and a picture of it after each of its inputs."""

    def __init__(self, directory: Path, *, keyed: bool = False, seed: int = 0) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        self.journal = Journal(directory)
        host: Any = KeyedHost(16 * PAGE, lambda place: True, UNITS) if keyed else ArenaHost(16, 4)
        self.has_units = keyed
        self.host = JournaledHost(host, self.journal)
        self.service = ControlService(CAPACITY, self.host, self._send, self.journal, reserve_for_live=SHARE)
        self.answers: dict[tuple[int, int], Any] = {}
        self.spares: dict[int, Place] = {}
        self.places: dict[int, list[Place]] = {client: [] for client in CLIENTS}
        self.leases: dict[int, list[int]] = {client: [] for client in CLIENTS}
        self.asked: list[tuple[int, int, wire.Request, int]] = []
        self.numbers = itertools.count(1)
        self.ends: list[tuple[int, dict[str, Any]]] = []
        for client in CLIENTS:
            self.service.connect(client, f"secret {client}", bootstrap=client == 0)
        self._flush()

    def _send(self, request: PendingRequest, answer: wire.Answer) -> None:
        assert (request.client, request.number) not in self.answers, "answered twice"
        self.answers[request.client, request.number] = answer
        if isinstance(answer, wire.Reserved):
            self.places[request.client].append(answer.place)
        if isinstance(answer, wire.Done) and answer.spare is not None:
            self.spares[request.client] = answer.spare
        if isinstance(answer, wire.Located):
            self.leases[request.client].append(answer.lease)

    def _flush(self) -> None:
        self.journal.flush()
        size = (self.directory / f"journal.{self.journal.generation}").stat().st_size
        self.ends.append((size, picture(self.service)))

    def ask(self, client: int, request: wire.Request, **more: Any) -> None:
        number = next(self.numbers)
        envelope = wire.Envelope(request, more.get("released", []), more.get("abandoned", []))
        body = wire.encode(envelope)
        channel = self.random.randrange(1, 4)
        self.asked.append((client, number, request, channel))
        self.service.handle(PendingRequest(client, number, channel), wire.envelope_decoder.decode(body), body)

    def step(self) -> None:
        """One random input."""
        pick, client = self.random, self.random.choice(CLIENTS)
        self.service.now += pick.choice([0.01, 0.1, 1.0]) * pick.random()
        self.service.wall = self.service.now + 1000
        if client not in self.service.clients:
            self.service.connect(client, f"secret {client}")
            self._flush()
            return
        kind = pick.choices(
            ["register", "reserve", "commit", "claim", "clear", "locate", "release", "abandon", "expire",
             "leave", "unreserve", "lose", "drop", "unclaim", "mark", "advance", "go on"],
            [1, 6, 9, 6, 3, 4, 2, 2, 2,
             0.5, 1, 0.7 * self.has_units, 0.3, 2, 1, 1, 9 * self.service.has_work],
        )[0]  # fmt: skip
        ids = [f"{pick.choice('abc')}_g{n}" for n in pick.sample(range(5), pick.randrange(1, 4))]
        more: dict[str, Any] = {}
        if self.leases[client] and pick.random() < 0.2:
            more["released"] = [self.leases[client].pop()]
        timeout_s = pick.choice([0.5, 3.0, FOREVER])
        match kind:
            case "register":
                flow: dict[str, Any] = {"on_lost": pick.choice(["clear", "keep"])}
                if pick.random() < 0.5:
                    flow |= {"kind": "windowed", "max_staleness": 1, "version_tag": "n", "training_task": "t"}
                spec = PartitionSpec.checked(
                    "p", ["x", "y"], pick.choice([3, 6]), ["t", "u"], None, None, flow
                )
                self.ask(client, wire.Register(spec), **more)
            case "reserve":
                room = pick.randrange(1, 6) * PAGE
                wanted = wire.Reserve(room, timeout_s, pick.choice([None, "p", "p"]), ids)
                self.ask(client, wanted, **more)
            case "commit":
                self._commit(client, ids, timeout_s, more)
            case "claim":
                where = pick.choice([None, None, {"n": {">=": 2}}])
                claim = wire.ClaimRequest(
                    "p", pick.choice("tu"), ["x"], pick.randrange(1, 4), pick.random() < 0.6, timeout_s, where
                )
                if pick.random() < 0.3:
                    claim.order = pick.choice(["lifo", "priority:n"])
                self.ask(client, claim, **more)
            case "clear":
                request = wire.Clear("p", pick.choice([ids, ids, None]))
                if request.ids is not None:
                    request.ids, _, request.named = self._named(client, request.ids, None)
                self.ask(client, request, **more)
            case "unclaim":
                self.ask(client, wire.Unclaim("p", pick.choice("tu"), ids, pick.random() < 0.3), **more)
            case "mark":
                mark = wire.MarkClaimed("p", pick.choice("tu"), ids, pick.random() < 0.6)
                mark.ids, _, mark.named = self._named(client, ids, None)
                if not mark.is_claimed and pick.random() < 0.5:
                    mark.ids, mark.named = None, None
                self.ask(client, mark, **more)
            case "advance":
                self.ask(client, wire.Advance("p", pick.randrange(4)), **more)
            case "drop":
                self.ask(client, wire.DropPartition("p"), **more)
            case "go on":
                self.service.go_on()
            case "locate":
                self.ask(client, wire.Locate("p", ids[:1], ["x"]), **more)
            case "release":
                if self.leases[client]:
                    self.service.release(client, self.leases[client].pop())
            case "abandon":
                # A caller abandons what it asked last over its channel: it has read what came before.
                last = {channel: number for owner, number, _, channel in self.asked if owner == client}
                mine = [number for _, number, _, _ in self.asked[-6:] if number in last.values()]
                if mine:
                    self.service.abandon(client, pick.choice(mine))
            case "expire":
                self.service.now += 1.0
                self.service.expire()
            case "leave":
                self.service.disconnect(client, died=pick.random() < 0.5)
                self.places[client], self.leases[client] = [], []
                self.spares.pop(client, None)
            case "lose":
                chunks = pick.sample(
                    sorted(self.service.table.places), min(1, len(self.service.table.places))
                )
                unit = (pick.randrange(UNITS),)
                loss = Loss(unit, UNITS) if pick.random() < 0.4 else Loss(chunks=tuple(chunks))
                self.ask(client, wire.Lost(loss), **more)
            case "unreserve":
                if self.places[client]:
                    self.ask(client, wire.Unreserve(self.places[client].pop().number), **more)
        self._flush()

    def _commit(self, client: int, ids: list[str], timeout_s: float, more: dict[str, Any]) -> None:
        tags = [{"n": self.random.randrange(4)} for _ in ids] if self.random.random() < 0.5 else None
        place = self.spares.pop(client, None) if self.random.random() < 0.5 else None
        if place is None and self.places[client]:
            place = self.places[client].pop()
        version = getattr(self.service.state.partitions.get("p"), "version", 0)
        names, layouts, used = [], [], 0
        if place is not None:
            used = PAGE * self.random.randrange(1, place.size // PAGE + 1)
            names, layouts = ["x"], [layout_of(used, len(ids))]
        number = None if place is None else place.number
        ids, tags, named = self._named(client, ids, tags)
        request = wire.Commit("p", version, ids, names, layouts, number, used, timeout_s, tags, want=PAGE)
        request.named = named
        self.ask(client, request, **more)

    def _named(
        self, client: int, ids: list[str], tags: list[dict[str, Any]] | None
    ) -> tuple[list[str], list[dict[str, Any]] | None, int | None]:
        """What a request says of its samples: their names, or that these have come before."""
        if self.random.random() < 0.7:
            return ids, tags, None
        named = self.random.randrange(2**62)
        for at, sample_id in enumerate(ids):
            self.ask(client, wire.Naming(named, at, [sample_id], None if tags is None else [tags[at]]))
            self._flush()
        return [], None, named

    def compact(self) -> None:
        about = About({0: "secret 0"}, 0, 3, 9, self.host.in_use, self.host.last_place, self.host.given_back)
        self.journal.compact((tuple(about), self.service.dump()))
        child = self.journal._child
        assert child is not None
        os.waitpid(child, 0)
        self.ends = []
        self._flush()


def picture(service: ControlService) -> dict[str, Any]:
    """Everything that a client could find out, and nothing that depends on who reads at the moment."""
    leased: dict[int, int] = {}
    for held in service.clients.values():
        for numbers in held.leases.values():
            for number in numbers:
                leased[number] = leased.get(number, 0) + 1
    references = {number: count - leased.get(number, 0) for number, count in service.table.references.items()}
    return {
        "partitions": {name: partition_picture(p) for name, p in service.state.partitions.items()},
        "live": service.state.live,
        "events": {name: p.table.events for name, p in service.state.partitions.items()},
        "waiting": [(token.client, token.number) for token in service.state.waiting()],  # type: ignore[attr-defined]
        "reservations": [
            (w.request.client, w.request.number, w.nbytes) for w in service.reservations.waiting
        ],
        "lines": [line_picture(service.reservations.waiting), line_picture(service.state._waiting_puts)],
        "unanswered": sorted(service.unanswered),
        "work": [work_picture(work) for work in service.work],
        "blocks": dict(service.table.blocks),
        "lost": (service.dead, service.lost),
        "places": {n: service.table.places[n] for n, count in references.items() if count},
        "references": {n: count for n, count in references.items() if count},
        "clients": {
            client: (
                dict(held.reserved),
                held.spare,
                dict(held.answers),
                list(held.abandoned),
                str(held.named),
            )
            for client, held in service.clients.items()
        },
    }


def work_picture(work: Any) -> list[Any]:
    if isinstance(work, LossWork):  # who waits for it asks again
        losing = work._losing
        return [work._blocks, sorted(work._lost), losing and (losing._at, losing.count)]
    asked = [(request.client, request.number, request.remembered) for request in work.requests]
    if isinstance(work, UnclaimWork):
        ending = work._unclaiming
        return [asked, list(ending._which), ending._at, ending._owner, ending._before, ending.is_finished]
    if isinstance(work, MarkWork):
        marking = work._marking
        ids = None if marking._ids is None else list(marking._ids)
        return [asked, ids, marking._rows.tolist(), marking._serials.tolist()]
    if isinstance(work, AdvanceWork):
        return [asked, [(each._version, partition_picture(each.partition)) for each in work._advancings]]
    if isinstance(work, LineUpWork):
        return [work._task.name, work._task.to_line_up, partition_picture(work._partition)]
    if isinstance(work, LeaveWork):
        held = [
            (part.spec.partition_id, task.name, rows.tolist()) for part, task, rows in work._leaving._held
        ]
        return [held, work._leaving.count]
    if isinstance(work, PutWork):
        staged = work._staging
        return [
            asked,
            staged._at,
            staged.rows.tolist(),
            dict(staged._names),
            sorted(staged._touched),
            staged.sizes,
        ]
    return [
        asked,
        [
            (each._rows.tolist(), list(each._ids), each._at, each.count, partition_picture(each.partition))
            for each in work._clearings
        ],
    ]


def line_picture(line: WaitingLine[Any]) -> list[Any]:
    if not line:
        return []
    entries = [(entry.patience, entry.overtaken, entry.refused_at) for entry in line._entries]
    return [line.due, line._quiet_since, line._room, entries]


def partition_picture(partition: Any) -> dict[str, Any]:
    rows = partition.live_rows(None)
    return {
        "spec": partition.spec,
        "version": partition.version,
        "evicted": (dict(partition.flow.evicted), list(partition.table.lost_ids)),
        "flow": (partition.flow.version, list(partition.flow.reported)),
        "written": partition.table.written,
        "ids": partition.ids[rows].tolist(),
        "tags": partition.tags[rows].tolist(),
        "born": partition.table.born[rows].tolist(),
        "fields": {
            name: (c.block[rows].tolist(), c.position[rows].tolist(), c.produced, c.stamped, set(c.lost))
            for name, c in partition.columns.items()
        },
        "tasks": {
            name: (t.claimed[rows].tolist(), t.owner[rows].tolist(), t.count, t.claims, t.to_line_up)
            for name, t in partition.tasks.items()
        },
    }


def ended_at(directory: Path, size: int, scratch: Path) -> Recovered:
    """What is recovered from the journal as it was when it had ``size`` bytes."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(directory, scratch)
    newest = max(scratch.glob("journal.*"), key=lambda path: int(path.suffix[1:]))
    os.truncate(newest, size)
    return recover(scratch, CAPACITY, 16 * PAGE, SHARE)


def drained(service: ControlService) -> list[list[str]]:
    """The order in which everything that is ready is handed out."""
    handed = []
    for partition in service.state.partitions.values():
        for task in partition.tasks:
            claim = Claim("p", task, ["x"], 100, owner=7)
            for _, batch in service.state.claim(claim, blocking=False).answers:
                assert isinstance(batch, Batch)
                handed.append(list(batch.ids))
    return handed


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(5, 60), keyed=st.booleans(), compacts=st.booleans())
def test_wherever_the_journal_is_cut_the_service_is_the_one_that_it_was_then(
    seed: int, steps: int, keyed: bool, compacts: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory, scratch = Path(name) / "plane", Path(name) / "cut"
        directory.mkdir()
        desk = JournaledDesk(directory, keyed=keyed, seed=seed)
        for step in range(steps):
            if compacts and step == steps // 2:
                desk.compact()
            desk.step()
        sizes = [size for size, _ in desk.ends]
        chosen = desk.random.sample(range(len(desk.ends)), min(len(desk.ends), 6))
        for at in chosen:
            size, expected = desk.ends[at]
            assert picture(ended_at(directory, size, scratch).service) == expected
            if at + 1 < len(sizes) and sizes[at + 1] > size:
                torn = desk.random.randrange(size + 1, sizes[at + 1])
                assert picture(ended_at(directory, torn, scratch).service) == expected
        whole = ended_at(directory, sizes[-1], scratch)
        assert {**whole.places} == desk.host.in_use
        _repeat_some_requests(desk, whole.service)
        assert drained(whole.service) == drained(desk.service)
        desk.journal.close()


def _repeat_some_requests(desk: JournaledDesk, service: ControlService) -> None:
    """Requests whose answers a client may not have read are answered as before, and change nothing."""
    before = picture(service)
    again: list[Any] = []
    service.deliver = lambda request, answer: again.append(answer)
    for client, number, request, _ in desk.asked[-8:]:
        held = service.clients.get(client)
        if held is None or type(request) not in wire.CHANGES:
            continue
        is_known = number in held.answers or (client, number) in service.unanswered
        if not is_known and service._at_work_for(client, number) is None:
            continue
        again.clear()
        service.handle(PendingRequest(client, number, 50), wire.Envelope(request))
        expected = desk.answers.get((client, number))
        if expected is not None and hasattr(expected, "waited_s"):  # told once, to whoever waited
            expected = msgspec.structs.replace(expected, waited_s=0.0)
        assert again == ([] if expected is None else [expected])
    assert picture(service) == before


def test_claims_are_recovered_with_their_owner_and_go_back_when_it_does_not_return(tmp_path: Path) -> None:
    desk = JournaledDesk(tmp_path)
    desk.ask(0, wire.Register(PartitionSpec.checked("p", ["x"], 9, ["t"], None, None)))
    desk.ask(1, wire.Reserve(PAGE, 1.0))
    place = desk.places[1][0]
    desk.ask(1, wire.Commit("p", 1, ["a", "b"], ["x"], [layout_of(PAGE, 2)], place.number, PAGE, 1.0))
    desk.ask(2, wire.ClaimRequest("p", "t", ["x"], 1, False, 0.0))
    desk.journal.flush()
    service = recover(tmp_path, CAPACITY, 16 * PAGE).service
    task = service.state.partition("p").task("t")
    assert sorted(task.owner[service.state.partition("p").live_rows(None)].tolist()) == [NOBODY, 2]
    service.disconnect(2, died=True)
    assert drained(service) == [["a", "b"]]


def test_a_place_on_which_a_missing_client_may_have_a_lease_is_not_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = JournaledDesk(tmp_path)
    desk.ask(0, wire.Register(PartitionSpec.checked("p", ["x"], 9, ["t"], None, None)))
    desk.ask(1, wire.Reserve(PAGE, 1.0))
    place = desk.places[1][0]
    desk.ask(1, wire.Commit("p", 1, ["a"], ["x"], [layout_of(PAGE, 1)], place.number, PAGE, 1.0))
    desk.ask(2, wire.Locate("p", ["a"], ["x"]))
    desk.journal.flush()
    recovered = recover(tmp_path, CAPACITY, 16 * PAGE)
    service = recovered.service
    freed: list[Place] = []
    monkeypatch.setattr(service.storage, "free", freed.append)
    service.handle(PendingRequest(1, 99, 7), wire.Envelope(wire.Clear("p", ["a"])))
    assert freed == []
    resume(service, 2, {desk.leases[2][0]: [place.number]}, [], recovered.places)
    service.table.stop_keeping(service.storage)
    assert unreferenced(service, recovered.places) == []
    service.release(2, desk.leases[2][0])
    assert [freed_place.number for freed_place in freed] == [place.number]


def test_a_request_that_was_abandoned_unheard_is_undone_when_its_client_resumes(tmp_path: Path) -> None:
    desk = JournaledDesk(tmp_path)
    desk.ask(0, wire.Register(PartitionSpec.checked("p", ["x"], 9, ["t"], None, None)))
    desk.ask(1, wire.Commit("p", 1, ["a"], [], [], None, 0, 1.0))
    desk.ask(2, wire.ClaimRequest("p", "t", [], 1, False, 0.0))
    desk.journal.flush()
    _, number, _, _ = desk.asked[-1]
    recovered = recover(tmp_path, CAPACITY, 16 * PAGE)
    assert recovered.service.state.partition("p").task("t").count == 1
    resume(recovered.service, 2, {}, [number], recovered.places)
    assert recovered.service.state.partition("p").task("t").count == 0


def test_each_of_several_claims_that_waited_is_undone_when_it_is_abandoned(tmp_path: Path) -> None:
    """All were answered before their client was back, and so over no channel."""
    desk = JournaledDesk(tmp_path)
    desk.ask(0, wire.Register(PartitionSpec.checked("p", ["x"], 9, ["t"], None, None)))
    for _ in range(2):
        desk.ask(2, wire.ClaimRequest("p", "t", [], 1, True, FOREVER))
    numbers = [number for _, number, _, _ in desk.asked[-2:]]
    desk.journal.flush()
    recovered = recover(tmp_path, CAPACITY, 16 * PAGE)
    service = recovered.service
    commit = wire.Commit("p", 1, ["a", "b"], [], [], None, 0, 1.0)
    service.handle(PendingRequest(1, 99, 7), wire.Envelope(commit))
    assert service.state.partition("p").task("t").count == 2
    resume(service, 2, {}, numbers, recovered.places)
    assert service.state.partition("p").task("t").count == 0


def test_a_waiting_claim_is_the_same_claim_after_a_dump() -> None:
    claim = Claim(
        "p", "t", ["x"], 8, {"n": {"in": [1, 2]}},
        owner=3, max_tokens=99, order="priority:n", step="s1", dp_rank=1, dp_world=4,
    )  # fmt: skip
    again: Any = pickle.loads(pickle.dumps(claim))
    assert again.order.text == "priority:n"
    assert again.condition({"n": 2}) and not again.condition({"n": 3})
    for name in set(Claim.__slots__) - {"order", "condition"}:
        assert getattr(again, name) == getattr(claim, name), name


def test_a_journal_that_cannot_be_written_is_given_up_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk = JournaledDesk(tmp_path)

    def full(fd: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    desk.ask(0, wire.Register(PartitionSpec.checked("p", ["x"], 9, ["t"], None, None)))
    desk.journal.flush()
    monkeypatch.undo()
    assert "cannot be written" in caplog.text
    desk.ask(1, wire.Commit("p", 1, ["a"], [], [], None, 0, 1.0))
    desk.journal.flush()
    assert desk.service.state.live == 1
    assert list(tmp_path.iterdir()) == []


def test_a_dump_that_refers_to_code_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    journal_module.write_dump(tmp_path, 0, os.system)
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        recover(tmp_path, CAPACITY, None)


def test_a_place_that_changed_hands_while_a_client_was_missing_is_not_freed_twice(tmp_path: Path) -> None:
    """It was reserved before the service died. While another client is still missing it is committed, which
    makes it shorter, and cleared, and what came free is given to somebody else."""
    desk = JournaledDesk(tmp_path)
    spec = PartitionSpec.checked("p", ["x"], 3, ["t"], None, None)
    desk.ask(1, wire.Register(spec))
    desk.ask(1, wire.Reserve(3 * PAGE, FOREVER))
    (place,) = desk.places[1]
    desk.ask(1, wire.Reserve(PAGE, FOREVER))
    unused = desk.places[1][-1]
    desk.journal.flush()
    recovered = recover(tmp_path, CAPACITY, desk.host.limit, SHARE)
    listener, _ = listen(f"unix://{tmp_path}/control")
    host = ArenaHost(16, 4)
    assert isinstance(desk.host._host, ArenaHost)
    host.segments.update(desk.host._host.segments)
    data = {number: [(0, size)] for number, size in host.segments.items()}
    host.arena.adopt(dict(host.segments), recovered.places.values(), unused.number, data, {})
    journal = Journal(tmp_path, recovered.generation)
    server = Server(CAPACITY, host, listener, journal=journal, recovered=recovered, reconnect_timeout_s=600)

    def ask(client: int, number: int, request: wire.Request) -> None:
        server.service.handle(PendingRequest(client, number, 1), wire.Envelope(request), b"\xc0")

    for client in (1, 2):
        del server._missing[client]
        resume(server.service, client, {}, [], server._still_in_use())
    layout = layout_of(PAGE, 1)
    ask(1, 1001, wire.Commit("p", 1, ["a"], ["x"], [layout], place.number, PAGE, FOREVER))
    ask(1, 1002, wire.Unreserve(unused.number))
    ask(1, 1003, wire.Clear("p", ["a"]))
    ask(2, 1001, wire.Reserve(2 * PAGE, FOREVER))
    ask(2, 1002, wire.Reserve(PAGE, FOREVER))
    assert host.used == 4 * PAGE, "what was cleared is kept for who may read it"
    server._missing.clear()
    server._finish_recovery()
    assert host.used == 3 * PAGE
    server.close()
