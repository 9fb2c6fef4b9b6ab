"""The control service's log never stands in its way."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from tests.warm_workers import WarmProcess

from rlplane.adapters.local.logs import StderrHandler

ROOT = Path(__file__).parents[2]

# Each of the clients dies with a claim, which is a line in the service's log.
JOB = """
import socket
from pathlib import Path
from rlplane.config import load_config
from rlplane.factory import build_data_plane_client
plane = build_data_plane_client(load_config("shm"))
plane.register_partition("flow", ["x"], 100, ["train"])
plane.put_samples(["a"], "flow", None, [{"v": 1}])
worker = load_config("shm", {"controller_address": plane.controller_address})
for _ in range(1200):
    doomed = build_data_plane_client(worker, bootstrap=False)
    doomed.claim_meta("flow", "train", [], 1, timeout_s=20)
    doomed._link().connection._lifeline._socket.shutdown(socket.SHUT_RDWR)
plane.claim_meta("flow", "train", [], 1, timeout_s=20)
log = (Path(plane.controller_address.removeprefix("shm://")) / "service.log").read_text()
print(log.count("claimed samples are handed out again"), flush=True)
plane.close()
"""


def test_a_stderr_that_nobody_reads_does_not_stop_the_plane() -> None:
    job = WarmProcess([sys.executable, "-c", JOB], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    with job:
        assert job.stdout is not None and int(job.stdout.readline()) == 1200
        # Not before it ends: this pipe is the one that nobody reads.
        assert job.wait(30) == 0


def test_lines_that_nobody_reads_are_dropped_and_counted() -> None:
    read_end, write_end = os.pipe()
    handler = StderrHandler(write_end)
    line = logging.makeLogRecord({"msg": "x" * 1000})
    for _ in range(5000):
        handler.emit(line)
    assert handler.dropped > 3000
    with os.fdopen(read_end, "rb") as pipe:
        text = b""
        while b"lines were dropped" not in text:
            text += pipe.read1(1 << 20)
        while b"the last one" not in text:
            # It is dropped as long as the lines before it have not been read.
            handler.emit(logging.makeLogRecord({"msg": "the last one"}))
            text += pipe.read1(1 << 20)
