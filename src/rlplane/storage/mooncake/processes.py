"""Mooncake's processes: the master, and the units that lend the store their memory, each inside a Ray actor.

TransferQueue can start a master too, but it first ends every ``mooncake_master`` of the machine, whoever's
it is, and never ends its own. Here the master is the child of an actor of the plane, and goes with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlplane.errors import MissingExtraError, PlaneConnectionError
from rlplane.storage.mooncake.network import (
    _get_local_node_ip,
    _mooncake_transport_config,
    free_port,
    set_mooncake_environment,
)

_START_S = 30.0
# Mooncake refuses smaller segments.
_SEGMENT_STEP = 16 << 20
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class MooncakeMaster:
    """Runs ``mooncake_master`` as long as this actor lives."""

    def __init__(self, node_ip: str | None, port: int | None) -> None:
        self._ip = node_ip or _get_local_node_ip()
        self._port = port or free_port(self._ip)
        self._log = tempfile.NamedTemporaryFile(prefix="mooncake_master.", suffix=".log")  # noqa: SIM115
        command = [
            _find_master(),
            f"--rpc_address={self._ip}",
            f"--rpc_port={self._port}",
            f"--metrics_port={free_port(self._ip)}",
            "--client_ttl=30",
            # Nothing is ever evicted: what is in the store is a sample that somebody waits for.
            "--default_kv_lease_ttl=999999",
            "--default_kv_soft_pin_ttl=999999",
            "--allow_evict_soft_pinned_objects=false",
            "--eviction_high_watermark_ratio=1.0",
            "--eviction_ratio=0.0",
        ]
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,
        )
        self._wait_until_it_listens()

    def address(self) -> str:
        """Where the master listens."""
        return f"[{self._ip}]:{self._port}" if ":" in self._ip else f"{self._ip}:{self._port}"

    def pid(self) -> int:
        """The master's process."""
        return self._process.pid

    def stop(self) -> None:
        """End the master."""
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def get_zmq_server_info(self) -> None:
        """Answer, as TransferQueue's own actors do when they are asked whether they live."""
        if self._process.poll() is not None:
            raise PlaneConnectionError(f"its process ended with the code {self._process.returncode}")

    def _wait_until_it_listens(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                socket.create_connection((self._ip, self._port), timeout=1.0).close()
                return
            time.sleep(0.02)
        last = Path(self._log.name).read_text(errors="replace").strip().splitlines()[-5:]
        with contextlib.suppress(OSError):
            self._process.kill()
        raise PlaneConnectionError(
            f"mooncake_master does not listen on {self._ip}:{self._port}; its last words: {last}"
        )


class MooncakeUnit:
    """Lends the store one segment of memory as long as this actor lives."""

    def __init__(self, config: dict[str, Any], node_ip: str | None, quiet: bool) -> None:
        ip = node_ip or _get_local_node_ip()
        # Before the import: Mooncake reads some of it when it is loaded.
        set_mooncake_environment(ip, quiet=quiet)
        # Not through TransferQueue's client, as elsewhere: it loads torch, and a unit only lends memory.
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            ip,
            config["metadata_server"],
            config["global_segment_size"],
            config["local_buffer_size"],
            config["protocol"],
            config["device_name"],
            config["master_server_address"],
        )
        if code != 0:
            raise RuntimeError(f"Mooncake does not take the memory of this unit: code {code}")

    def get_zmq_server_info(self) -> None:
        """Answer, as TransferQueue's own actors do when they are asked whether they live."""

    def pid(self) -> int:
        """This unit's process."""
        return os.getpid()


def store_config(
    master: str, transport: dict[str, Any], segment_bytes: int, buffer_bytes: int
) -> dict[str, Any]:
    """TransferQueue's configuration of a Mooncake client that lends ``segment_bytes`` of memory."""
    segment_bytes = -(-segment_bytes // _SEGMENT_STEP) * _SEGMENT_STEP
    return {
        "auto_init": False,
        # Peers find each other through the master, so there is no second server with a second port.
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "global_segment_size": segment_bytes,
        "local_buffer_size": buffer_bytes,
        **_mooncake_transport_config(transport),
    }


@contextlib.contextmanager
def quiet_stderr(enabled: bool) -> Iterator[None]:
    """Keep what C++ writes to standard error out of the terminal; show it when the block fails."""
    if not enabled:
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as caught:
        saved = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(saved, 2)
            caught.seek(0)
            os.write(2, caught.read()[-4000:])
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _find_master() -> str:
    beside = Path(sys.executable).parent / "mooncake_master"
    found = str(beside) if beside.exists() else shutil.which("mooncake_master")
    if found is None:
        raise MissingExtraError(
            "backend mooncake_cpu needs mooncake_master; install it with: pip install 'rlplane[mooncake]'"
        )
    return found


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
