"""A file is there whole or not at all."""

import os
from pathlib import Path
from typing import BinaryIO

import pytest

from rlplane.atomic_file import write_atomically


def test_bytes_and_what_a_writer_writes_replace_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"first")
    assert path.read_bytes() == b"first"
    write_atomically(path, lambda file: file.write(b"second"))
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_fails_leaves_the_former_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"former")

    def broken(file: BinaryIO) -> None:
        file.write(b"half")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_atomically(path, broken)
    assert path.read_bytes() == b"former"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    write_atomically(tmp_path / "file", b"")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "final.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if step != "write":
        monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, fail if step == "write" else b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["final.json"]
    assert path.read_text() == "old"
