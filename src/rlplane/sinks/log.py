"""``logging``: one line per operation, through Python's logging."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rlplane.errors import ConfigError
from rlplane.sinks import Record, found_nothing


class LoggingSink:
    """Logs operations, and transfers as one line per interval.

    Args:
        logger: The name of the logger.
        level: The level of operations that succeeded, and of claims that found nothing in time. Those that
            failed are warnings at least.
    """

    def __init__(self, *, logger: str = "rlplane.events", level: str = "INFO") -> None:
        number = logging.getLevelNamesMapping().get(str(level).upper())
        if number is None:
            raise ConfigError(f"sink logging: there is no level {level!r}; use DEBUG, INFO or WARNING")
        self._logger = logging.getLogger(logger)
        self._level = number

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            if record["kind"] == "op":
                self._log_operation(record)
            elif record["kind"] == "transfers":
                figures = ", ".join(f"{name}={value}" for name, value in record["figures"].items())
                self._logger.log(self._level, "transfers %s", figures)

    def close(self) -> None:
        pass

    def _log_operation(self, record: Record) -> None:
        good = record["status"] == "ok" or found_nothing(record)
        self._logger.log(
            self._level if good else max(self._level, logging.WARNING),
            "op=%s partition=%s task=%s keys=%d bytes=%d wall_ms=%.3f wait_ms=%.3f status=%s%s",
            record["op"],
            record["partition_id"],
            record["task"] or "-",
            record["n_keys"],
            record["n_bytes"],
            record["wall_ms"],
            record["wait_ms"],
            record["status"],
            "" if good else f" error={record['error']}: {record['error_message']}",
        )
