"""Starting an aggregator from a program, and getting the report from it at the end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

import msgspec

from rlplane.errors import PlaneConnectionError
from rlplane.metrics.discovery import RunInfo
from rlplane.metrics.event_publisher import METRICS_ADDRESS_VARIABLE, EventPublisherService
from rlplane.metrics.events import SESSION_ROLE, SessionEvent
from rlplane.metrics.publisher import FINAL_SNAPSHOT_NAME
from rlplane.metrics.subscriber import MetricsSnapshotSubscriber

if TYPE_CHECKING:
    from rlplane.report import Report

EVENT_LOG_NAME = "events.jsonl"


def start_aggregator(
    *,
    out_dir: Path | str | None = None,
    run_id: str | None = None,
    refresh_hz: float = 4.0,
    drain_timeout_s: float = 30.0,
    jsonl: bool = False,
    prometheus_port: int | None = None,
    token_file: Path | str | None = None,
    no_token: bool = False,
    events_address: str | None = None,
    snapshot_address: str | None = None,
    ready_timeout_s: float = 30.0,
    set_environment: bool = True,
    resume: bool = False,
) -> AggregatorHandle:
    """Start an aggregator process and wait until it takes events.

    The run is STARTED when this returns. With ``set_environment`` the address is in
    ``RLPLANE_METRICS_ADDRESS`` until :meth:`AggregatorHandle.finish`, for this process and its children.
    With ``jsonl`` the events go to ``events.jsonl`` in ``out_dir``. With ``prometheus_port`` there is
    ``/metrics`` on this machine, for whoever has the token: that of ``token_file``, else of the environment
    variable ``RLPLANE_TOKEN``, else a new one; ``no_token`` asks for none. With ``resume`` the run whose
    events and final snapshot are there goes on: what was measured before is part of it. The process ends by
    itself when this one is gone.

    Raises ``PlaneConnectionError`` with the reason when it does not start in ``ready_timeout_s``.
    """
    directory = None if out_dir is None else Path(out_dir)
    read_end, write_end = os.pipe()
    try:
        process = _start(
            directory,
            write_end,
            refresh_hz=refresh_hz,
            drain_timeout=drain_timeout_s,
            run_id=run_id,
            prometheus_port=prometheus_port,
            token_file=token_file,
            events_address=events_address,
            snapshot_address=snapshot_address,
            jsonl=directory / EVENT_LOG_NAME if jsonl and directory is not None else None,
            resume=resume or None,
            no_token=no_token or None,
        )
        os.close(write_end)
        write_end = -1
        try:
            info = _wait_until_ready(read_end, process, ready_timeout_s)
        except BaseException:
            process.kill()
            process.wait()
            raise
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)
    return AggregatorHandle(info, process, directory, set_environment)


def spawn_aggregator(
    *,
    out_dir: Path | None,
    run_id: str,
    events_address: str,
    snapshot_address: str,
    plane: str,
    remote_host: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start an aggregator process at addresses that the caller has chosen, and do not wait for it.

    It ends by itself when this process is gone. With ``remote_host`` other machines can send events to it
    and watch it; where, is in the file that it leaves for others to find it.
    """
    return _start(
        out_dir,
        events_address=events_address,
        snapshot_address=snapshot_address,
        run_id=run_id,
        plane=plane,
        remote_host=remote_host,
    )


def _start(out_dir: Path | None, ready_fd: int | None = None, **options: object) -> subprocess.Popen[bytes]:
    """Start the process with these of its options, None being left out and True a flag."""
    command = [sys.executable, "-m", "rlplane.metrics.aggregator", "--parent-pid", str(os.getpid())]
    for name, value in {**options, "out": out_dir, "ready_fd": ready_fd}.items():
        if value is not None:
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    with _log_file(out_dir) as log:
        return subprocess.Popen(
            command,
            pass_fds=[] if ready_fd is None else [ready_fd],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # A group of its own: a Ctrl-C before it can ignore it would end it.
            process_group=0,
        )


def begin_session(events_address: str) -> EventPublisherService:
    """Tell an aggregator that the run has STARTED; with what is returned it is told how the run ends."""
    session = EventPublisherService(events_address, f"session:{os.getpid()}", role=SESSION_ROLE)
    session.record(SessionEvent("STARTED", time.time_ns()))
    return session


def end_process(process: subprocess.Popen[bytes], timeout: float) -> None:
    """Wait for the end of a process; when that takes too long, bring it about."""
    for signal_number in (0, signal.SIGTERM, signal.SIGKILL):
        if signal_number:
            process.send_signal(signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
            return


class AggregatorHandle:
    """A running aggregator. As a context manager it is finished at the end of the block.

    Attributes:
        metrics_address: The URL of ``/metrics``; empty if it is not served.
        token_file: Where the token for it is; None if it asks for none.
    """

    def __init__(
        self,
        info: RunInfo,
        process: subprocess.Popen[bytes],
        out_dir: Path | None,
        set_environment: bool,
    ) -> None:
        self.run_id = info.run_id
        self.events_address = info.events_address
        self.snapshot_address = info.snapshot_address
        self.metrics_address = info.metrics_address
        self.token_file = Path(info.token_file) if info.token_file else None
        self.out_dir = out_dir
        self.process = process
        self.subscriber = MetricsSnapshotSubscriber(info.snapshot_address, run_id=info.run_id)
        self._session = begin_session(info.events_address)
        self._report: Report | None = None
        self._former_address: str | None = None
        self._set_environment = set_environment
        if set_environment:
            self._former_address = os.environ.get(METRICS_ADDRESS_VARIABLE)
            os.environ[METRICS_ADDRESS_VARIABLE] = info.events_address

    @property
    def event_log_path(self) -> Path | None:
        """Where the events are, if they are recorded."""
        return None if self.out_dir is None else self.out_dir / EVENT_LOG_NAME

    def report_error(self, message: str) -> None:
        """Tell the aggregator that something went wrong in the run as a whole."""
        self._session.record(SessionEvent("ERROR", time.time_ns(), message))

    def finish(self, timeout: float = 60.0) -> Report:
        """End the run and return its report; the same one when called again.

        It is the COMPLETE snapshot if that arrives, else the file, else the latest live snapshot, marked as
        incomplete. The aggregator's process has ended when this returns. Close the workers' clients first:
        what they have not sent by then is not in it.
        """
        if self._report is None:
            self._session.record(SessionEvent("ENDED", time.time_ns()))
            self._session.close()
            self._report = self._collect(timeout)
        return self._report

    def interrupt(self, timeout: float = 30.0) -> Report:
        """End the run as INTERRUPTED and return its report."""
        if self._report is None:
            self._session.close()
            if self.process.poll() is None:
                self.process.terminate()
            self._report = self._collect(timeout)
        return self._report

    def _collect(self, timeout: float) -> Report:
        from rlplane.report import find_report

        deadline = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < deadline:
            if self.subscriber.wait_for_complete(0.1) is not None:
                break
        final = None if self.out_dir is None else self.out_dir / FINAL_SNAPSHOT_NAME
        try:
            # The last frame may still be on its way from a process that has just ended.
            return find_report(self.run_id, subscriber=self.subscriber, final_path=final, timeout=1.0)
        finally:
            end_process(self.process, max(1.0, deadline - time.monotonic()))
            self.subscriber.close()
            self._restore_environment()

    def _restore_environment(self) -> None:
        if self._set_environment and os.environ.get(METRICS_ADDRESS_VARIABLE) == self.events_address:
            if self._former_address is None:
                del os.environ[METRICS_ADDRESS_VARIABLE]
            else:
                os.environ[METRICS_ADDRESS_VARIABLE] = self._former_address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *rest: object) -> None:
        self.interrupt() if exc_type is not None else self.finish()


def _log_file(directory: Path | None) -> contextlib.AbstractContextManager[IO[bytes] | int]:
    """Where the process logs to: its own file beside the results, since stderr may be a terminal display."""
    if directory is not None:
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            return (directory / "aggregator.log").open("wb")
    return contextlib.nullcontext(subprocess.DEVNULL)


def _wait_until_ready(fd: int, process: subprocess.Popen[bytes], timeout_s: float) -> RunInfo:
    deadline = time.monotonic() + timeout_s
    answer = b""
    while not answer.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            raise PlaneConnectionError(f"the aggregator was not ready within {timeout_s:g} s")
        part = os.read(fd, 65536)
        if not part:
            process.wait()
            raise PlaneConnectionError(f"the aggregator ended at once, with exit code {process.returncode}")
        answer += part
    try:
        return msgspec.json.decode(answer, type=RunInfo)
    except msgspec.ValidationError:
        reason = msgspec.json.decode(answer).get("error")
        raise PlaneConnectionError(f"the aggregator cannot start: {reason}") from None
