"""Who is not trusted gets nothing: other users, and answers that point outside of the plane's memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tensordict import TensorDict

from rlplane.config import load_config
from rlplane.errors import DataPlaneError, PlaneConnectionError
from rlplane.factory import build_data_plane_client
from rlplane.service import protocol as wire
from rlplane.service.sockets import connect, listen
from rlplane.storage.places import FieldRows, Layout, Located, Place
from rlplane.storage.shm.host import ShmHost, read_spare

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def plane() -> Iterator[Any]:
    with build_data_plane_client(load_config("shm", {"global_segment_size": "64 MiB"})) as client:
        client.register_partition("p", ["x"], 10**6, ["t"])
        ids = [f"s{n}" for n in range(64)]
        client.put_samples(ids, "p", TensorDict({"x": torch.arange(64 * 8).view(64, 8)}, batch_size=[64]))
        yield client


def as_nobody(do: Callable[[], None]) -> str:
    """What ``do`` raised in a child that belongs to another user, or "" if it went through."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            do()
        except BaseException as error:
            os.write(write, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as told:
        return told.read()


@as_root
def test_another_user_cannot_enter_the_directory_of_a_plane(plane: Any) -> None:
    path = Path(plane.controller_address.removeprefix("shm://"))
    assert as_nobody(lambda: print(os.listdir(path))) == "PermissionError"
    assert as_nobody(lambda: connect(f"unix://{path}/control").close()) == "PermissionError"


@as_root
def test_a_directory_that_another_user_made_is_not_a_plane(tmp_path: Path) -> None:
    theirs = tmp_path / "rlplane-theirs"
    theirs.mkdir(mode=0o700)
    (theirs / "lock").touch()
    os.chown(theirs, NOBODY, NOBODY)
    config = load_config("shm", {"controller_address": f"shm://{theirs}"})
    with pytest.raises(PlaneConnectionError, match="belongs to this user alone"):
        build_data_plane_client(config, bootstrap=False)


def test_a_directory_that_others_may_enter_is_not_a_plane(tmp_path: Path) -> None:
    open_to_all = tmp_path / "rlplane-open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (open_to_all / "lock").touch()
    config = load_config("shm", {"controller_address": f"shm://{open_to_all}"})
    with pytest.raises(PlaneConnectionError, match="belongs to this user alone"):
        build_data_plane_client(config, bootstrap=False)


@as_root
def test_a_socket_that_another_user_serves_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    address = f"unix://{tmp_path}/control"
    ready, told = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            listener, _ = listen(address)
            told.send(b"!")
            listener.settimeout(10)
            listener.accept()
        finally:
            os._exit(0)
    ready.settimeout(10)
    assert ready.recv(1) == b"!"
    with pytest.raises(PermissionError, match="belongs to user 65534"):
        connect(address)
    os.waitpid(child, 0)


def moved(place: Place, **changes: Any) -> Place:
    return msgspec.structs.replace(place, **changes)


CRAFTED: dict[str, Callable[[Located], Located]] = {
    "a place behind the end of its segment": lambda answer: msgspec.structs.replace(
        answer, places=[moved(answer.places[0], at=(answer.places[0].at[0], 1 << 40, 1))]
    ),
    "a place before the start of its segment": lambda answer: msgspec.structs.replace(
        answer, places=[moved(answer.places[0], at=(answer.places[0].at[0], -4096, 1))]
    ),
    "a place that is longer than its segment": lambda answer: msgspec.structs.replace(
        answer, places=[moved(answer.places[0], size=1 << 40)]
    ),
    "a block behind the end of its place": lambda answer: msgspec.structs.replace(
        answer, blocks={number: (0, 1 << 30, layout) for number, (_, _, layout) in answer.blocks.items()}
    ),
    "a block before the start of its place": lambda answer: msgspec.structs.replace(
        answer, blocks={number: (0, -64, layout) for number, (_, _, layout) in answer.blocks.items()}
    ),
    "rows behind the end of their block": lambda answer: msgspec.structs.replace(
        answer, rows=[FieldRows(64, answer.rows[0].block, 1 << 20)]
    ),
    "rows before the start of their block": lambda answer: msgspec.structs.replace(
        answer, rows=[FieldRows(64, answer.rows[0].block, -8)]
    ),
    "scattered rows behind the end of their block": lambda answer: msgspec.structs.replace(
        answer,
        rows=[
            FieldRows(
                2,
                blocks=torch.full((2,), answer.rows[0].block).numpy().tobytes(),
                positions=torch.tensor([0, 1 << 20], dtype=torch.int32).numpy().tobytes(),
            )
        ],
    ),
    "values that are longer than their block": lambda answer: msgspec.structs.replace(
        answer,
        blocks={
            number: (0, start, Layout("dense", layout.dtype, (1 << 30,), layout.rows, layout.values_nbytes))
            for number, (_, start, layout) in answer.blocks.items()
        },
    ),
}


@pytest.mark.parametrize("crafted", CRAFTED)
def test_an_answer_that_points_outside_of_its_memory_is_refused(
    plane: Any, crafted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = plane._link().connection
    original = connection.exchange

    def craft(request: wire.Request, **more: Any) -> wire.Answer:
        answer: wire.Answer = original(request, **more)
        return CRAFTED[crafted](answer) if isinstance(answer, Located) else answer

    monkeypatch.setattr(connection, "exchange", craft)
    with pytest.raises(DataPlaneError):
        plane.get_samples([f"s{n}" for n in range(64)], "p", ["x"])


def test_a_place_to_write_to_that_is_outside_of_its_segment_is_refused(
    plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = plane._link().connection
    original = connection.exchange

    def craft(request: wire.Request, **more: Any) -> wire.Answer:
        answer: wire.Answer = original(request, **more)
        if isinstance(answer, wire.Reserved):
            return wire.Reserved(moved(answer.place, at=(answer.place.at[0], 1 << 40, 1)))
        return answer

    monkeypatch.setattr(connection, "exchange", craft)
    with pytest.raises(PlaneConnectionError, match="does not lie in segment"):
        plane.put_samples(["big"], "p", TensorDict({"x": torch.zeros(1, 1 << 20)}, batch_size=[1]))


def test_no_two_clients_share_the_number_of_their_spare_place(plane: Any) -> None:
    directory = plane._link().storage._segments._directory
    host = ShmHost(directory, 1 << 20)
    far = 65536 + plane._link().connection.client
    with open(directory.client_file(plane._link().connection.client), "rb") as file:
        before = read_spare(file.fileno())
        host.join(far)
        host.offer_spare(far, Place(4711, 4096, (0, 0, 0)))
        assert read_spare(file.fileno()) == before
        assert host.revoke_spare(far)
        host.leave(far)
