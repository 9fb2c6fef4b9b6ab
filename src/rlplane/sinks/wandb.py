"""``wandb``: rates, latencies and what is held, as curves of a Weights & Biases run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlplane.sinks import Record, curves

_PREFIX = "rlplane/"


class WandbSink:
    """Logs ``rlplane/...`` into the run that is active, else into one of its own.

    In a run of yours it never moves the step: the values go out with your next ``run.log``. A run of its
    own is finished with the sink. Curves have ``rlplane/time_s``, seconds since the sink began, as their
    x axis.

    Args:
        options: For ``wandb.init``, such as ``project``, ``name``, ``group`` and ``mode``. With any of
            them the sink makes a run of its own, unless there is one already.
    """

    def __init__(self, **options: Any) -> None:
        import wandb

        active: Any = wandb.run
        self._owned = active is None
        self._run: Any = wandb.init(**options) if active is None else active
        self._began: float | None = None
        self._run.define_metric(f"{_PREFIX}time_s")
        self._run.define_metric(f"{_PREFIX}*", step_metric=f"{_PREFIX}time_s")

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            if record["kind"] == "session":
                self._began = record["time"]
            values = curves(record)
            if record.get("step") is not None:
                values["step"] = record["step"]
            if values:
                began = record["time"] if self._began is None else self._began
                values["time_s"] = record["time"] - began
                named = {_PREFIX + name: value for name, value in values.items()}
                self._run.log(named, commit=self._owned)

    def close(self) -> None:
        if self._owned:
            self._run.finish()
