"""The directory of a plane, how a dead one is told from a living one, and what the doctor says."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplane.errors import PlaneConnectionError
from rlplane.storage.shm import directory, doctor
from rlplane.storage.shm.directory import PlaneDirectory, remove_if_dead, stale_planes

MINE = f"{directory.PREFIX}{os.getuid()}-"


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of one's own in place of /dev/shm, so that no real plane is touched."""
    base = tmp_path / "shm"
    base.mkdir()
    monkeypatch.setattr(directory, "SHM", base)
    monkeypatch.setattr(doctor, "SHM", base)
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    return base


@pytest.fixture
def service(shm: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that holds a plane's directory, as a control service does."""
    code = (
        "import pathlib, signal, sys\n"
        "from rlplane.storage.shm import directory\n"
        "directory.SHM = pathlib.Path(sys.argv[1])\n"
        "plane = directory.PlaneDirectory.create()\n"
        "print(plane.path, flush=True)\n"
        "signal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(shm)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.wait()
    process.stdout.close()


def check(name: str) -> doctor.Check:
    return next(check for check in doctor.inspect() if check.name == name)


def test_a_plane_has_a_directory_that_only_its_user_can_enter(shm: Path) -> None:
    plane = PlaneDirectory.create()
    assert plane.path.parent == shm and plane.path.name.startswith(f"{MINE}{os.getpid()}-")
    assert stat.S_IMODE(plane.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((plane.path / "lock").stat().st_mode) == 0o600
    assert json.loads((plane.path / "plane.json").read_text())["pid"] == os.getpid()
    assert plane.address == f"shm://{plane.path}" and plane.socket == f"unix://{plane.path}/control"
    files = {plane.segment(1), plane.segment(2), plane.client_file(1), plane.client_file(2)}
    assert len(files) == 4
    plane.remove()
    assert list(shm.iterdir()) == []


def test_a_plane_is_found_by_its_address(shm: Path) -> None:
    plane = PlaneDirectory.create()
    assert PlaneDirectory.at(plane.address).path == PlaneDirectory.at(str(plane.path)).path == plane.path
    with pytest.raises(
        PlaneConnectionError, match=r"'tcp://somewhere:1' is not the address .* looks like shm://"
    ):
        PlaneDirectory.at("tcp://somewhere:1")
    with pytest.raises(PlaneConnectionError, match=r"there is no plane at .*its control service has ended"):
        PlaneDirectory.at(f"shm://{shm}/gone")


def test_a_living_plane_is_not_stale_and_a_killed_one_is(
    service: tuple[subprocess.Popen[str], Path],
) -> None:
    process, path = service
    (path / "segment-0").write_bytes(b"x" * 10_000)
    assert stale_planes() == [] and not remove_if_dead(path) and doctor.clean() == []
    assert check("stale planes").status == "ok"
    process.send_signal(signal.SIGSTOP)
    assert stale_planes() == [], "a stopped one is not dead"
    process.kill()
    process.wait()
    assert stale_planes() == [path]
    found = check("stale planes")
    assert (
        found.status == "warning" and path.name in found.detail and "rlplane doctor --clean" in found.detail
    )
    assert doctor.clean() == [path] and not path.exists()
    assert doctor.clean() == [] and not remove_if_dead(path)


def test_a_directory_that_is_being_made_is_left_alone_for_a_while(shm: Path) -> None:
    young = shm / f".{MINE}1-abc"
    young.mkdir()
    assert stale_planes() == []
    os.utime(young, (time.time() - 100, time.time() - 100))
    assert stale_planes() == [young] and doctor.clean() == [young]


def test_only_ones_own_planes_are_looked_at(shm: Path) -> None:
    for name in ("other", f"{directory.PREFIX}{os.getuid() + 1}-1-abc", f"x{MINE}1-abc"):
        (shm / name).mkdir()
    (shm / f"{MINE}file").write_text("not a directory")
    broken = shm / f"{MINE}1-nolock"
    broken.mkdir()
    assert stale_planes() == [broken]


def test_many_stale_planes_are_counted_and_a_few_named(shm: Path) -> None:
    for number in range(5):
        stale = shm / f"{MINE}{number}-abc"
        stale.mkdir()
        (stale / "segment-0").write_bytes(b"x" * 2**20)
    detail = check("stale planes").detail
    assert detail.startswith("5 (5.0 MiB)") and f"{MINE}2-abc, …" in detail and f"{MINE}3-abc" not in detail


def test_a_stale_plane_that_somebody_removes_meanwhile_is_no_problem(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "stale_planes", lambda: [shm / f"{MINE}1-gone"])
    assert check("stale planes").status == "warning"
    assert doctor.clean() == []


def test_a_service_that_is_just_dying_is_waited_for(
    service: tuple[subprocess.Popen[str], Path],
) -> None:
    process, path = service
    assert not remove_if_dead(path, 0.05) and path.exists()
    killer = threading.Timer(0.2, process.kill)
    killer.start()
    assert remove_if_dead(path, 20.0) and not path.exists()
    started = time.monotonic()
    assert not remove_if_dead(path, 20.0)
    assert time.monotonic() - started < 10, "there is nothing to wait for"


def test_a_machine_that_has_everything_is_well(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SMALL_SHM", 1)
    monkeypatch.setattr(doctor, "_FEW_FILES", 1)
    checks = doctor.inspect()
    assert [check.name for check in checks if check.status == "problem"] == []
    assert {check.name: check.status for check in checks if check.name not in ("mappings", "copies")} == {
        "platform": "ok",
        "shared memory": "ok",
        "shared memory is writable": "ok",
        "file descriptors": "ok",
        "stale planes": "ok",
    }
    assert list(shm.iterdir()) == [], "the probe is removed"


@pytest.mark.parametrize("native", [True, False])
def test_it_says_whether_large_copies_are_as_fast_as_they_can_be(
    shm: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr(doctor, "is_native", lambda: native)
    found = check("copies")
    assert found.status == ("ok" if native else "warning")
    assert native or "install gcc" in found.detail


def test_little_shared_memory_is_a_warning_that_says_what_to_do(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_SMALL_SHM", 2**62)
    found = check("shared memory")
    assert (
        found.status == "warning" and "global_segment_size" in found.detail and "--shm-size" in found.detail
    )


def test_no_shared_memory_is_a_problem(shm: Path) -> None:
    shm.rmdir()
    assert check("shared memory").status == "problem"
    found = check("shared memory is writable")
    assert found.status == "problem" and "No such file or directory" in found.detail


def test_few_file_descriptors_are_a_warning_with_the_limit(shm: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        found = check("file descriptors")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (
        found.status == "warning"
        and found.detail.startswith("512 open files")
        and "ulimit -n" in found.detail
    )


def test_another_platform_is_a_problem_that_names_the_other_backend(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    found = check("platform")
    assert found.status == "problem" and "backend memory" in found.detail
