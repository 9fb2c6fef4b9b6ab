"""The aggregator process: collects the events of all workers, publishes snapshots, leaves the final one.

::

    INITIALIZE ──STARTED, or a first event──▶ LIVE ──ENDED──▶ DRAINING ──▶ COMPLETE
         └───────────────────┴────── SIGTERM, or the parent is gone ──┴──▶ INTERRUPTED

Run it with ``python -m rlplane.metrics.aggregator``, or from a program with :func:`start_aggregator`. SIGINT
is ignored: Ctrl-C reaches the whole process group, and the workers' last events are still to come.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from rlplane.atomic_file import write_atomically
from rlplane.errors import DataPlaneError, MissingExtraError
from rlplane.metrics.discovery import RunInfo, announce, remember, runtime_directory, withdraw
from rlplane.metrics.event_logger import EventLoggerService, read_event_log
from rlplane.metrics.events import EventBatch, EventRecordCodec, SessionEvent
from rlplane.metrics.launcher import AggregatorHandle, start_aggregator
from rlplane.metrics.publisher import FINAL_SNAPSHOT_NAME, MetricsPublisher, read_final_snapshot
from rlplane.metrics.run_state import RunState
from rlplane.metrics.snapshot import MetricsSnapshot, MetricsSnapshotCodec, SessionState
from rlplane.metrics.values import DEFAULT_MAX_IN_MEMORY
from rlplane.transport import Pattern, ZmqMessagePublisher, ZmqMessageSubscriber
from rlplane.transport.gate import TOKEN_VARIABLE, choose_token, with_token

__all__ = ["AggregatorHandle", "MetricsAggregatorService", "main", "new_run_id", "start_aggregator"]

logger = logging.getLogger(__name__)

# Workers flush within 0.1 s: after ENDED, this long without an event means that theirs are all here.
_QUIET_S = 0.25
# Workers that go on after ENDED do not keep the run open for longer than this.
_LONGEST_QUIET_WAIT_S = 5.0


class MetricsAggregatorService:
    """One run's aggregator.

    Args:
        run_id: The run's name.
        events_address: Where workers send; a Unix socket in the runtime directory by default.
        snapshot_address: Where viewers subscribe; likewise.
        out_dir: Where ``final_snapshot.json`` goes; None for no file.
        refresh_hz: Snapshots per second.
        drain_timeout_s: How long DRAINING waits for async triggers; 0 for as long as it takes.
        jsonl: Write all events to this file.
        parent_pid: End, as INTERRUPTED, when this process is gone.
        prometheus_port: Serve ``/metrics`` on this port of the loopback interface.
        token: What ``/metrics`` requires; None: nothing.
        token_file: Where that token is. None: it is left in a file of the runtime directory.
        max_values_in_memory: Raw values kept in memory; more are spilled to disk.
        allow_remote: Permit addresses that other machines can reach.
        remote_host: An address of this machine at which others may send events and subscribe to snapshots,
            encrypted, and each with a key of its own.
        linger_s: How long the end waits for slow subscribers to take the final frame.
        plane: The plane whose processes are to find this run by its name.
        resume: Go on with the run that was interrupted in ``out_dir``: its name, its events in ``jsonl``.

    Raises:
        ValueError: There is nothing to go on with.
    """

    def __init__(
        self,
        run_id: str,
        *,
        events_address: str | None = None,
        snapshot_address: str | None = None,
        out_dir: Path | None = None,
        refresh_hz: float = 4.0,
        drain_timeout_s: float = 30.0,
        jsonl: Path | None = None,
        parent_pid: int | None = None,
        prometheus_port: int | None = None,
        token: str | None = None,
        token_file: Path | None = None,
        max_values_in_memory: int = DEFAULT_MAX_IN_MEMORY,
        allow_remote: bool = False,
        remote_host: str | None = None,
        linger_s: float = 3.0,
        resume: bool = False,
        plane: str = "",
    ) -> None:
        self._plane = plane
        earlier = _interrupted_run(out_dir, jsonl) if resume else None
        self.run_id = run_id = earlier.run_id if earlier is not None else run_id
        self.state = SessionState.INITIALIZE
        self._began_ns = time.time_ns()
        self._refresh_hz = refresh_hz
        self._drain_timeout_s = drain_timeout_s
        self._parent_pid = parent_pid
        self._out_dir = out_dir
        self._ended = asyncio.Event()
        self._interrupted = asyncio.Event()
        self._last_event = time.monotonic()
        self._announced: Path | None = None
        self._n_failed_batches = 0
        self._pidfd = -1
        self._metrics_address = ""
        self._token_file, self._keep_token = token_file, token_file is not None
        self._event_logger: EventLoggerService | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        # Apart, since a context has one authenticator: the key of a viewer lets nobody send events.
        self._viewers_context: zmq.Context[Any] = zmq.Context()
        self._remote_address = self._remote_snapshots = ""
        with contextlib.ExitStack() as undo:
            undo.callback(self._viewers_context.destroy, 0)
            undo.callback(self._context.destroy, 0)
            self._events: ZmqMessageSubscriber[EventBatch] = ZmqMessageSubscriber(
                EventRecordCodec(),
                events_address or _default_address("events"),
                pattern=Pattern.COLLECT,
                allow_remote=allow_remote,
                context=self._context,
            )
            undo.callback(self._events.close)
            self._snapshots: ZmqMessagePublisher[MetricsSnapshot] = ZmqMessagePublisher(
                MetricsSnapshotCodec(),
                snapshot_address or _default_address("snapshots"),
                linger=int(linger_s * 1000),
                resend_last=True,
                allow_remote=allow_remote,
                context=self._viewers_context,
            )
            undo.callback(self._snapshots.close)
            if remote_host:
                self._listen_to_others(remote_host)
            final_path = self._prepare_directory(out_dir)
            self._publisher = MetricsPublisher(
                self._snapshots, self._make_snapshot, refresh_hz=refresh_hz, final_path=final_path
            )
            self.run_state = RunState(
                run_id,
                on_session=self._on_session,
                spill_directory=_writable(out_dir),
                max_values_in_memory=max_values_in_memory,
            )
            if jsonl is not None:
                if earlier is not None:
                    self.run_state.continue_from(earlier, read_event_log(jsonl))
                try:
                    self._event_logger = EventLoggerService(jsonl, append=resume)
                except OSError as exc:
                    self.run_state.log("warning", f"the events are not recorded: {exc}")
                    logger.warning("cannot write the events to %s: %s", jsonl, exc)
            if prometheus_port is not None:
                self._start_prometheus(prometheus_port, token)
            undo.pop_all()

    def _listen_to_others(self, host: str) -> None:
        try:
            self._remote_address = self._events.listen_encrypted(host)
            self._remote_snapshots = self._snapshots.listen_encrypted(host)
        except DataPlaneError as exc:
            logger.warning("processes on other machines are not seen: %s", exc)

    def _prepare_directory(self, out_dir: Path | None) -> Path | None:
        if out_dir is None:
            return None
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            logger.warning("the final snapshot will only be published: cannot make %s: %s", out_dir, exc)
        return out_dir / FINAL_SNAPSHOT_NAME

    def _start_prometheus(self, port: int, token: str | None) -> None:
        try:
            # By name: the collector is built on snapshots, so nothing here may depend on it.
            start_http = importlib.import_module("rlplane.sinks.prometheus").start_http
        except MissingExtraError:
            raise
        except ImportError as exc:
            raise MissingExtraError(
                f"--prometheus-port needs prometheus_client: pip install 'rlplane[prometheus]' ({exc})"
            ) from exc
        server = start_http(port, lambda: self._publisher.latest, token)
        self._metrics_address = server.address
        if token is not None and self._token_file is None:
            # Prometheus reads it at each scrape (credentials_file), so a new one at each start does no harm.
            self._token_file = runtime_directory() / f"metrics-{server.port}.token"
            write_atomically(self._token_file, token.encode(), mode=0o600)

    @property
    def info(self) -> RunInfo:
        """Where this aggregator can be reached."""
        return RunInfo(
            run_id=self.run_id,
            pid=os.getpid(),
            events_address=self._events.address,
            snapshot_address=self._snapshots.address,
            started_ns=self._began_ns,
            out_dir=str(self._out_dir.absolute()) if self._out_dir is not None else "",
            plane=self._plane,
            metrics_address=self._metrics_address,
            token_file=str(self._token_file.absolute()) if self._token_file is not None else "",
            remote_address=self._remote_address,
            remote_snapshots=self._remote_snapshots,
        )

    async def run(self, on_ready: Callable[[RunInfo], None] | None = None) -> SessionState:
        """Serve until the run has ended; the final state."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.interrupt, "SIGTERM")
        self._watch_parent(loop)
        self._events.attach(loop, self._on_batch, self._on_bad_batch)
        self._snapshots.attach(loop)
        try:
            self._announced = announce(self.info)
        except (OSError, DataPlaneError) as exc:
            logger.warning("viewers will not find this run by themselves: %s", exc)
        self._publisher.start()
        if on_ready is not None:
            on_ready(self.info)
        try:
            await self._until_end()
        finally:
            self._close(loop)
        return self.state

    def interrupt(self, reason: str) -> None:
        """End the run now, as INTERRUPTED, unless its final snapshot is being made already."""
        if not self._interrupted.is_set():
            self.run_state.log("warning", f"interrupted: {reason}")
            self._interrupted.set()

    async def _until_end(self) -> None:
        await _first(self._ended.wait(), self._interrupted.wait())
        if not self._interrupted.is_set():
            self.state = SessionState.DRAINING
            await _first(self._drain(), self._interrupted.wait())
        self._read_remaining()
        pending = self.run_state.table.in_flight_tasks_count
        self.run_state.table.cancel_all_tasks()
        self.state = SessionState.INTERRUPTED if self._interrupted.is_set() else SessionState.COMPLETE
        await self._publisher.publish_final(lambda: self._final_snapshot(pending))

    async def _drain(self) -> None:
        """Wait until the workers' last events are here and the async triggers are done."""
        longest = time.monotonic() + _LONGEST_QUIET_WAIT_S
        self._last_event = time.monotonic()
        while (left := self._last_event + _QUIET_S - time.monotonic()) > 0:
            if time.monotonic() > longest:
                self.run_state.log("warning", "workers still sent events when the run was closed")
                break
            await asyncio.sleep(left)
        left_over = await self.run_state.table.drain_tasks(self._drain_timeout_s or None)
        if left_over:
            self.run_state.log(
                "warning", f"{left_over} tasks had not ended after {self._drain_timeout_s:g} s"
            )

    def _read_remaining(self) -> None:
        """Read what has arrived already; not what goes on arriving for ever."""
        deadline = time.monotonic() + 1.0
        while self._events.receive_available() and time.monotonic() < deadline:
            pass

    # Events.

    def _on_batch(self, batch: EventBatch) -> None:
        if len(batch):
            self._last_event = time.monotonic()
        if self._event_logger is not None:
            self._event_logger.write(batch)
        if self.state is SessionState.INITIALIZE and batch.ops is not None:
            self.state = SessionState.LIVE
        self.run_state.add_batch(batch)

    def _on_session(self, event: SessionEvent) -> None:
        if event.kind == "STARTED" and self.state is SessionState.INITIALIZE:
            self.state = SessionState.LIVE
        elif event.kind == "ENDED":
            self._ended.set()

    def _on_bad_batch(self, exc: Exception) -> None:
        self._n_failed_batches += 1
        self.run_state.log("error", f"a batch could not be counted: {exc!r}")
        logger.error("a batch could not be counted", exc_info=exc)

    # Snapshots.

    def _make_snapshot(self) -> MetricsSnapshot:
        self._note_bad_frames()
        if self._event_logger is not None:
            self._event_logger.flush()
        return self.run_state.snapshot(self.state, refresh_hz=self._refresh_hz)

    def _final_snapshot(self, pending: int) -> MetricsSnapshot:
        self._note_bad_frames()
        if self._event_logger is not None:
            self._event_logger.close()
        try:
            return self.run_state.snapshot(
                self.state, exact=True, refresh_hz=self._refresh_hz, n_pending_tasks=pending
            )
        except Exception:
            # A final picture that is not exact says so, and is better than none.
            logger.exception("the exact figures could not be computed")
            return self.run_state.snapshot(self.state, refresh_hz=self._refresh_hz, n_pending_tasks=pending)

    def _note_bad_frames(self) -> None:
        bad = self._events.n_decode_errors + self._n_failed_batches
        if bad > self.run_state.bad_frames.value:
            self.run_state.log("warning", f"{bad - self.run_state.bad_frames.value} frames could not be read")
            self.run_state.bad_frames.value = bad

    # The end.

    def _watch_parent(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._parent_pid is None:
            return
        reason = f"the parent process {self._parent_pid} is gone"
        try:
            self._pidfd = os.pidfd_open(self._parent_pid)
        except ProcessLookupError:
            self.interrupt(reason)
            return

        def gone() -> None:
            loop.remove_reader(self._pidfd)
            self.interrupt(reason)

        loop.add_reader(self._pidfd, gone)

    def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # What is left to do is bounded, and must be done.
        if self._pidfd >= 0:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        if self._event_logger is not None:
            self._event_logger.close()
        self._events.close()
        self._snapshots.close()
        self.run_state.close()
        self._context.term()
        self._viewers_context.term()
        if self._token_file is not None and not self._keep_token:
            self._token_file.unlink(missing_ok=True)
        if self._announced is not None:
            withdraw(self._announced)
            if self._out_dir is not None and self.state.is_final:
                with contextlib.suppress(OSError, DataPlaneError):
                    remember(self.info.without_secrets())


def _interrupted_run(out_dir: Path | None, jsonl: Path | None) -> MetricsSnapshot:
    if out_dir is None or jsonl is None or not jsonl.exists():
        raise ValueError(
            f"there is no run to go on with: --resume needs --out and --jsonl of one, not {jsonl}"
        )
    path = out_dir / FINAL_SNAPSHOT_NAME
    snapshot = read_final_snapshot(path)
    path.unlink()  # It is not the last word any more.
    return snapshot


async def _first(*either: Coroutine[Any, Any, object]) -> None:
    """Wait for one of them, and cancel the others."""
    waiting = [asyncio.ensure_future(one) for one in either]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def _default_address(kind: str) -> str:
    return f"ipc://{runtime_directory()}/{os.getpid()}-{kind}.sock"


def _writable(directory: Path | None) -> Path | None:
    return directory if directory is not None and os.access(directory, os.W_OK) else None


def new_run_id() -> str:
    """A name that sorts by time and is not used twice."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code (0, or 3 when it cannot start)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = vars(_parser().parse_args(arguments))
    ready_fd, no_token = options.pop("ready_fd"), options.pop("no_token")
    run_id = options.pop("run_id") or new_run_id()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    token: str | None = None

    def on_ready(info: RunInfo) -> None:
        if info.metrics_address and ready_fd is None:
            # Not through the log: the token is for whoever started this, and for nobody who reads logs.
            print(f"open {with_token(info.metrics_address, token)}", file=sys.stderr, flush=True)
            if token is not None:
                print(f"the token is in {info.token_file}", file=sys.stderr, flush=True)
        _tell(ready_fd, msgspec.json.encode(info))
        logger.info(
            "run %s: events at %s, snapshots at %s", info.run_id, info.events_address, info.snapshot_address
        )

    async def serve() -> SessionState:
        return await MetricsAggregatorService(run_id, token=token, **options).run(on_ready)

    try:
        if options["prometheus_port"] is not None:
            token = choose_token(options["token_file"], none=no_token)
        state = asyncio.run(serve())
    except (DataPlaneError, OSError, ValueError) as exc:
        _tell(ready_fd, msgspec.json.encode({"error": str(exc)}))
        print(f"cannot start the aggregator: {exc}", file=sys.stderr)
        return 3
    logger.info("the run ended as %s", state.value)
    return 0


def _tell(fd: int | None, message: bytes) -> None:
    """Write a line to whoever started us, if they wait for one."""
    if fd is not None:
        with contextlib.suppress(OSError):
            os.write(fd, message + b"\n")
            os.close(fd)


def _parser() -> argparse.ArgumentParser:
    """Its options have the names of the service's arguments, beside a few that :func:`main` takes out."""
    parser = argparse.ArgumentParser(
        prog="python -m rlplane.metrics.aggregator",
        description="Collect the events of a run, publish live snapshots, and leave an exact final one.",
        epilog="example: python -m rlplane.metrics.aggregator --out runs/1 --jsonl runs/1/events.jsonl",
    )
    add = parser.add_argument
    add("--events-address", "--address", metavar="ADDR", help="where workers send (default: a Unix socket)")
    add("--snapshot-address", metavar="ADDR", help="where viewers subscribe (default: a Unix socket)")
    add("--out", dest="out_dir", type=Path, metavar="DIR", help=f"where {FINAL_SNAPSHOT_NAME} goes")
    add("--run-id", metavar="ID", help="the run's name (default: made from the time)")
    add("--refresh-hz", type=float, default=4.0, metavar="HZ", help="snapshots per second (default: 4)")
    add(
        "--drain-timeout",
        dest="drain_timeout_s",
        type=float,
        default=30.0,
        metavar="S",
        help="longest drain; 0: no limit (default: 30)",
    )
    add("--jsonl", type=Path, metavar="FILE", help="write all events to this file")
    add("--resume", action="store_true", help="go on with the run whose events are in FILE and DIR")
    add("--parent-pid", type=int, metavar="PID", help="end when this process is gone")
    add("--prometheus-port", type=int, metavar="PORT", help="serve /metrics on 127.0.0.1")
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"has the token for /metrics (default: {TOKEN_VARIABLE}, else a new one)",
    )
    add("--no-token", action="store_true", help="serve /metrics to every user of this machine")
    add(
        "--max-values-in-memory", type=int, default=DEFAULT_MAX_IN_MEMORY, metavar="N", help=argparse.SUPPRESS
    )
    add("--linger", dest="linger_s", type=float, default=3.0, metavar="S", help=argparse.SUPPRESS)
    add("--allow-remote", action="store_true", help="permit addresses that other machines can reach")
    add("--remote-host", metavar="IP", help=argparse.SUPPRESS)
    add("--plane", default="", metavar="NAME", help=argparse.SUPPRESS)
    add("--ready-fd", type=int, metavar="FD", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
