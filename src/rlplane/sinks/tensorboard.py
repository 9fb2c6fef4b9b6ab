"""``tensorboard``: rates, latencies and what is held, as scalars in an event file. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rlplane.sinks import Record, curves


class TensorBoardSink:
    """Writes ``rlplane/...`` scalars.

    Args:
        path: The log directory, which TensorBoard is pointed at.
        flush_s: How often the file is flushed.
    """

    def __init__(self, path: str | os.PathLike[str], *, flush_s: float = 10.0) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        os.makedirs(path, exist_ok=True)
        self._writer: Any = EventFileWriter(os.fspath(path), flush_secs=flush_s)
        self._step = 0

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            if not (values := curves(record)):
                continue
            self._step += 1
            step = record.get("step")
            scalars = [
                self._summary.Value(tag=f"rlplane/{name}", simple_value=float(value))
                for name, value in values.items()
            ]
            self._writer.add_event(
                self._event(
                    wall_time=record["time"],
                    step=self._step if step is None else step,
                    summary=self._summary(value=scalars),
                )
            )

    def close(self) -> None:
        self._writer.close()
