"""One line on a terminal that says what is being measured, and nothing if there is no terminal."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

__all__ = ["Progress"]

_EVERY_S = 0.1


class Progress:
    """Writes to ``stream`` if it is a terminal; seldom, so that the terminal does not disturb the run."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream if stream is not None and stream.isatty() else None
        self._started = time.monotonic()
        self._last = 0.0

    def show(self, what: str, share: float, who: str) -> None:
        """Show how much of a part is done, and which participant is being measured."""
        if self._stream is None:
            return
        now = time.monotonic()
        if now - self._last >= _EVERY_S:
            self._last = now
            self._write(f"{share:4.0%}  {what} · {who}")

    def say(self, what: str) -> None:
        """Show something whose progress is not known, such as a start."""
        if self._stream is not None:
            self._last = time.monotonic()
            self._write(f"  …   {what}")

    def done(self) -> None:
        if self._stream is not None:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _write(self, text: str) -> None:
        assert self._stream is not None
        elapsed = int(time.monotonic() - self._started)
        line = f"{elapsed // 60}:{elapsed % 60:02d} {text}"
        self._stream.write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
        self._stream.flush()
