"""The error hierarchy: catchable as ours, catchable as the built-in, whole after pickling."""

import inspect
import pickle
import re

import pytest

from rlplane import errors

CLASSES = [getattr(errors, name) for name in errors.__all__]
BUILTINS = {
    "ConfigError": ValueError,
    "MissingExtraError": ImportError,
    "InvalidRequestError": ValueError,
    "UnsupportedValueError": TypeError,
    "NotFoundError": KeyError,
    "UnknownPartitionError": KeyError,
    "UnknownTaskError": KeyError,
    "UnknownFieldError": KeyError,
    "MissingDataError": KeyError,
    "ClaimTimeoutError": TimeoutError,
    "CapacityError": MemoryError,
    "CapacityTimeoutError": TimeoutError,
    "PlaneConnectionError": ConnectionError,
    "ClientClosedError": ConnectionError,
    "SamplesLostError": ConnectionError,
    "StepOverError": ValueError,
    "CheckpointError": ValueError,
    "UnsupportedOperationError": NotImplementedError,
    "DataPlaneError": Exception,
}


@pytest.mark.parametrize("error", CLASSES)
def test_an_error_is_ours_and_the_builtin_that_fits(error: type[Exception]) -> None:
    assert issubclass(error, errors.DataPlaneError)
    assert issubclass(error, BUILTINS[error.__name__])


def test_running_out_of_room_in_time_is_a_memory_error_and_a_timeout() -> None:
    assert issubclass(errors.CapacityTimeoutError, (errors.CapacityError))
    assert issubclass(errors.CapacityTimeoutError, MemoryError)


@pytest.mark.parametrize("error", CLASSES)
def test_the_message_is_shown_as_it_was_written(error: type[Exception]) -> None:
    assert str(error("partition 'a' was never registered")) == "partition 'a' was never registered"


@pytest.mark.parametrize("error", CLASSES)
def test_an_error_survives_the_way_to_another_process(error: type[Exception]) -> None:
    copy = pickle.loads(pickle.dumps(error("gone")))
    assert type(copy) is error
    assert str(copy) == "gone"


def test_a_claim_timeout_keeps_its_count_on_that_way() -> None:
    copy = pickle.loads(pickle.dumps(errors.ClaimTimeoutError("3 of 8", ready=3)))
    assert (str(copy), copy.ready) == ("3 of 8", 3)


def test_all_names_every_error_and_is_sorted() -> None:
    defined = [
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == errors.__name__
    ]
    assert errors.__all__ == sorted(defined)


def test_the_tree_in_the_docstring_is_the_hierarchy() -> None:
    parents: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ([│├└─ ]*)(\w+Error)\b", line)
        if not found:
            continue
        depth, name = len(found[1]), found[2]
        path = [(d, n) for d, n in path if d < depth]
        parents[name] = path[-1][1] if path else ""
        path.append((depth, name))
    drawn = {cls.__name__: cls.__bases__[0].__name__ for cls in CLASSES if cls is not errors.DataPlaneError}
    assert parents == {"DataPlaneError": "", **drawn}
