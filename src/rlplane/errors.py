"""Every error that rlplane raises on purpose.

Each class derives from :class:`DataPlaneError` and from the built-in that fits, so code written
for either catches it::

    DataPlaneError
    ├── ConfigError            (ValueError)       a config key is missing, unknown or wrong
    ├── MissingExtraError      (ImportError)      an optional dependency is not installed
    ├── InvalidRequestError    (ValueError)       arguments that can never be right
    │   └── StepOverError                         a rank's part of a step has been cleared
    ├── UnsupportedValueError  (TypeError)        an object that may not travel
    ├── NotFoundError          (KeyError)
    │   ├── UnknownPartitionError                 the partition was never registered
    │   ├── UnknownTaskError                      the task is not one of the partition's
    │   ├── UnknownFieldError                     neither declared nor ever written
    │   └── MissingDataError                      a sample is not there, or its field is not written yet
    ├── ClaimTimeoutError      (TimeoutError)     a blocking claim ran out of time; nothing was claimed
    ├── CapacityError          (MemoryError)      it can never fit
    │   └── CapacityTimeoutError (TimeoutError)   no room came free in time; nothing was written
    ├── PlaneConnectionError   (ConnectionError)  the plane cannot be reached, or has gone away
    │   ├── ClientClosedError                     the client was used after ``close``
    │   └── SamplesLostError                      their bytes died with the storage that had them
    ├── CheckpointError        (ValueError)       a checkpoint is torn, altered or of an unknown version
    └── UnsupportedOperationError (NotImplementedError)  this adapter does not have that method
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "CapacityTimeoutError",
    "CheckpointError",
    "ClaimTimeoutError",
    "ClientClosedError",
    "ConfigError",
    "DataPlaneError",
    "InvalidRequestError",
    "MissingDataError",
    "MissingExtraError",
    "NotFoundError",
    "PlaneConnectionError",
    "SamplesLostError",
    "StepOverError",
    "UnknownFieldError",
    "UnknownPartitionError",
    "UnknownTaskError",
    "UnsupportedOperationError",
    "UnsupportedValueError",
]


class DataPlaneError(Exception):
    """Base of every error of the data plane."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which would put quotes around a sentence.
        return self.message


class ConfigError(DataPlaneError, ValueError):
    """A config key is missing, unknown, or has a value that cannot be right."""


class MissingExtraError(DataPlaneError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class InvalidRequestError(DataPlaneError, ValueError):
    """The arguments of a call contradict each other or the partition; nothing was changed."""


class StepOverError(InvalidRequestError):
    """A rank asks for its part of a step, and the samples of that have been cleared."""


class UnsupportedValueError(DataPlaneError, TypeError):
    """An object in a column or tag cannot travel without pickle, and pickle is not allowed."""


class NotFoundError(DataPlaneError, KeyError):
    """Something that was named does not exist."""


class UnknownPartitionError(NotFoundError):
    """The partition was never registered."""


class UnknownTaskError(NotFoundError):
    """The task is not one of the partition's consumer tasks."""


class UnknownFieldError(NotFoundError):
    """The field was neither declared nor ever written."""


class MissingDataError(NotFoundError):
    """A sample is not in the partition, or one of its fields has not been written."""


class ClaimTimeoutError(DataPlaneError, TimeoutError):
    """A blocking claim ran out of time. Nothing was claimed."""

    def __init__(self, message: str = "", ready: int = 0) -> None:
        super().__init__(message)
        self.ready = ready

    def __reduce__(self) -> tuple[type[ClaimTimeoutError], tuple[str, int]]:
        return type(self), (self.message, self.ready)


class CapacityError(DataPlaneError, MemoryError):
    """The data can never fit into the configured capacity."""


class CapacityTimeoutError(CapacityError, TimeoutError):
    """No room came free within the timeout. Nothing was written."""


class PlaneConnectionError(DataPlaneError, ConnectionError):
    """The data plane cannot be reached, or has gone away."""


class ClientClosedError(PlaneConnectionError):
    """The client was used after it had been closed."""


class SamplesLostError(PlaneConnectionError):
    """The bytes of these samples died with the storage unit that had them; no other attempt will read
    them."""


class CheckpointError(DataPlaneError, ValueError):
    """A checkpoint cannot be read; the plane stays as it was."""


class UnsupportedOperationError(DataPlaneError, NotImplementedError):
    """The adapter does not have this optional method."""
