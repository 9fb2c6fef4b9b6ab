"""Training steps: which share of a step's time was spent in the plane, by operation, and on what.

A step belongs to the thread or task that marks it. What other threads do meanwhile, such as reading ahead,
does not hold the step up, and is not part of its share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from typing import Any, Self

from rlplane.call_times import CallTimes
from rlplane.errors import InvalidRequestError
from rlplane.metrics.events import StepOp, StepRecord

Finish = Callable[[StepRecord], None]


class TrainingStep:
    """A step under way; as a context manager it ends with the block.

    Attributes:
        tokens: The tokens that it trains on. By default those of the samples that it claimed, by their tag
            ``input_lengths``.
    """

    def __init__(self, clock: StepClock, number: int | None) -> None:
        self.tokens: int | None = None
        self._clock, self._number = clock, number
        self._began = time.perf_counter()
        self._ops: dict[str, StepOp] = {}
        self._claimed_tokens = 0
        self._scalars: dict[str, float] = {}
        self._token: Token[TrainingStep | None] | None = None

    def add(self, op: str, wall_s: float, times: CallTimes, waited_s: float, tokens: int) -> None:
        """Count an operation that was made in this step."""
        entry = self._ops.get(op)
        if entry is None:
            entry = self._ops[op] = StepOp()
        entry.count += 1
        entry.seconds += wall_s
        entry.waiting_s += waited_s
        entry.round_trips_s += times.round_trips_s
        entry.bytes_s += times.bytes_s
        self._claimed_tokens += tokens

    def log(self, scalars: Mapping[str, Any]) -> None:
        """Keep numbers of the caller's own beside those of the step."""
        self._scalars.update(checked_scalars(scalars))

    def finish(self, number: int | None = None) -> None:
        """End the step now."""
        tokens = self._claimed_tokens if self.tokens is None else self.tokens
        self._clock.finish(
            StepRecord(
                self._number if number is None else number,
                time.time_ns(),
                time.perf_counter() - self._began,
                self._ops,
                tokens,
                self._scalars,
            )
        )

    def __enter__(self) -> Self:
        self._token = self._clock.current.set(self)
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        assert self._token is not None
        self._clock.current.reset(self._token)
        if kind is None:
            self.finish()


class StepClock:
    """The steps of one client. ``finish`` is called with each that has ended."""

    def __init__(self, finish: Finish) -> None:
        self.finish = finish
        self.current: ContextVar[TrainingStep | None] = ContextVar("rlplane_training_step", default=None)

    def step(self, number: int) -> TrainingStep:
        return TrainingStep(self, _checked(number))

    def mark(self, number: int) -> None:
        """Step ``number`` ends now. It began with the mark before; the first mark only begins."""
        number, before = _checked(number), self.current.get()
        if before is not None:
            before.finish(number)
        self.current.set(TrainingStep(self, None))

    def log(self, scalars: Mapping[str, Any]) -> None:
        step = self.current.get()
        if step is not None:
            step.log(scalars)
        else:
            self.finish(StepRecord(None, time.time_ns(), scalars=checked_scalars(scalars)))


def _checked(number: int) -> int:
    if type(number) is not int or number < 0:
        raise InvalidRequestError(f"a step is numbered by an integer of at least 0, not {number!r}")
    return number


def checked_scalars(scalars: Mapping[str, Any]) -> dict[str, float]:
    """The numbers as floats; a tensor or an array of one element is a number too."""
    found = {}
    for name, value in scalars.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise InvalidRequestError(
                f"client.log takes numbers, and {name!r} is {value!r} of type {type(value).__name__}"
            ) from None
    return found
