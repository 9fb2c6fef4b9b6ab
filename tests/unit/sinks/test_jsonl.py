"""The jsonl sink: complete lines only, whatever rotates, crashes or writes at the same time."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rlplane.errors import ConfigError
from rlplane.sinks.jsonl import JsonlSink, read_records, record_files

# Python 3.12 warns of every fork in a process that has threads, such as those of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def records(*numbers: int) -> list[dict[str, Any]]:
    return [{"kind": "op", "n": number, "text": "x" * 20} for number in numbers]


def numbers_in(path: Path) -> list[int]:
    return [record["n"] for record in read_records(*record_files(path))]


def test_records_come_back_in_order_and_a_later_sink_appends(tmp_path):
    path = tmp_path / "deep" / "down" / "events.jsonl"
    for part in ([1, 2], [3]):
        sink = JsonlSink(path)
        sink.write(records(*part))
        sink.close()
    assert numbers_in(path) == [1, 2, 3]
    assert path.read_bytes().endswith(b"\n")


def test_it_is_on_disk_before_the_sink_is_closed(tmp_path):
    sink = JsonlSink(tmp_path / "e.jsonl", fsync=True)
    sink.write(records(1))
    assert numbers_in(sink.path) == [1]
    sink.close()
    sink.close()


def test_files_rotate_at_their_size_and_only_so_many_are_kept(tmp_path):
    path = tmp_path / "e.jsonl"
    sink = JsonlSink(path, max_bytes=200, backups=2)
    for number in range(30):
        sink.write(records(number))
    sink.close()
    files = record_files(path)
    assert [file.name for file in files] == ["e.jsonl.2", "e.jsonl.1", "e.jsonl"]
    assert all(file.stat().st_size <= 200 for file in files)
    kept = numbers_in(path)
    assert kept == list(range(30 - len(kept), 30))


def test_without_backups_the_file_starts_anew(tmp_path):
    sink = JsonlSink(tmp_path / "e.jsonl", max_bytes=100, backups=0)
    for number in range(5):
        sink.write(records(number))
    sink.close()
    assert os.listdir(tmp_path) == ["e.jsonl"]
    assert numbers_in(sink.path)[-1] == 4


def test_a_torn_line_is_skipped_by_readers_and_cut_off_by_the_next_writer(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2}\n' + b'{"n":3,"text":"' + b"x" * 200_000)
    assert numbers_in(path) == [1, 2]
    sink = JsonlSink(path)
    sink.write(records(4))
    sink.close()
    assert numbers_in(path) == [1, 2, 4]


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_bytes(b"half a line")
    JsonlSink(path).close()
    assert path.read_bytes() == b""


def test_the_path_may_name_the_process(tmp_path):
    sink = JsonlSink(str(tmp_path / "e-{pid}.jsonl"))
    sink.close()
    assert sink.path.name == f"e-{os.getpid()}.jsonl"


def test_what_json_does_not_know_is_written_as_its_repr(tmp_path):
    sink = JsonlSink(tmp_path / "e.jsonl")
    sink.write([{"kind": "op", "odd": object}])
    sink.close()
    (record,) = read_records(sink.path)
    assert record["odd"] == repr(object)


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"backups": -1}])
def test_options_that_cannot_be_are_refused(tmp_path, options):
    with pytest.raises(ConfigError, match="jsonl"):
        JsonlSink(tmp_path / "e.jsonl", **options)


def _write_many(path: str, name: int, count: int) -> None:
    sink = JsonlSink(path, max_bytes=20_000, backups=1000)
    for number in range(count):
        sink.write([{"kind": "op", "n": name * 10_000 + number + part} for part in (0, 5_000)])
    sink.close()


def test_processes_that_write_and_rotate_one_file_lose_and_tear_nothing(tmp_path):
    path = tmp_path / "e.jsonl"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write_many, args=(str(path), name, 400)) for name in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(record_files(path)) > 2
    found = numbers_in(path)
    expected = [
        name * 10_000 + number + part for name in range(4) for number in range(400) for part in (0, 5_000)
    ]
    assert sorted(found) == sorted(expected)


def _write_until_killed(path: str) -> None:
    sink = JsonlSink(path, max_bytes=50_000, backups=100_000)
    number = 0
    while True:
        sink.write(records(*range(number, number + 50)))
        number += 50


def test_a_writer_that_is_killed_leaves_complete_records(tmp_path):
    path = tmp_path / "e.jsonl"
    process = multiprocessing.get_context("fork").Process(target=_write_until_killed, args=(str(path),))
    process.start()
    while not (tmp_path / "e.jsonl.3").exists():
        time.sleep(0.001)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    JsonlSink(path).close()
    for file in record_files(path):
        assert all(json.loads(line)["kind"] == "op" for line in file.read_text().splitlines())
    found = numbers_in(path)
    assert found == list(range(len(found)))


def _write_to_a_full_disk(path: str) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sink = JsonlSink(path)
    sink.write(records(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    with pytest.raises(OSError):
        sink.write(records(*range(2, 10)))
    sink.close()


def test_a_batch_that_does_not_fit_on_the_disk_is_taken_back_whole(tmp_path):
    # A limit on the file's size fails as a full disk does: after a part of the batch was written.
    path = tmp_path / "e.jsonl"
    process = multiprocessing.get_context("fork").Process(target=_write_to_a_full_disk, args=(str(path),))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert numbers_in(path) == [1]
    assert path.read_bytes().count(b"\n") == 1
