"""How a command ends: the exit codes, and the error that carries one."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """What the shell is told."""

    OK = 0
    USAGE = 2
    CANNOT_START = 3
    FAILED = 4
    INTERRUPTED = 130


class CommandError(Exception):
    """A command cannot go on: one line on stderr, and ``code`` for the shell."""

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.code = code
