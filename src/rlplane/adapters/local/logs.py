"""Where the control service of one machine logs to, without ever waiting for a reader.

A pipe that nobody reads takes some hundred lines. A service that wrote the next one would stand still, and
every client with it.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FILE_BYTES = 1 << 20
_LINES_HELD = 1000
_LAST_WORDS_S = 0.5


class StderrHandler(logging.Handler):
    """Writes to a file descriptor in a thread; lines are dropped, and counted, while that does not go on."""

    def __init__(self, fd: int = 2) -> None:
        super().__init__()
        self._fd = fd
        self._lines: queue.Queue[str] = queue.Queue(_LINES_HELD)
        self._written = threading.Event()
        self.dropped = 0
        threading.Thread(target=self._run, name="rlplane-stderr", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Leave the line to the thread."""
        line = self.format(record)
        try:
            self._written.clear()
            self._lines.put_nowait(f"{line}\n")
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Give what was logged last a moment to get out."""
        if not self._lines.empty():
            self._written.wait(_LAST_WORDS_S)
        super().close()

    def _run(self) -> None:
        reported = 0
        while True:
            data = self._lines.get().encode(errors="backslashreplace")
            dropped = self.dropped
            if dropped > reported:
                data = f"({dropped} lines were dropped so far: nobody read them)\n".encode() + data
                reported = dropped
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:
                return  # nobody will read it any more
            if self._lines.empty():
                self._written.set()


def log_to_stderr(level: str) -> None:
    """Log to stderr, warnings and the error that ends the process too."""
    # An error in logging would be printed, and that could block.
    logging.raiseExceptions = False
    logging.captureWarnings(True)
    handler = StderrHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
    sys.excepthook = _log_the_end


def log_to_file(path: Path) -> logging.Handler:
    """Log to a file too, which never gets large."""
    handler = RotatingFileHandler(path, maxBytes=_FILE_BYTES, backupCount=1, delay=True, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.getLogger().addHandler(handler)
    return handler


def _log_the_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("the control service ends", exc_info=(kind, error, trace))
