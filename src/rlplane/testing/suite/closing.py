"""What ``close`` promises, and which classes errors have."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict

from rlplane.errors import (
    ClientClosedError,
    DataPlaneError,
    InvalidRequestError,
    MissingDataError,
    UnknownFieldError,
    UnknownPartitionError,
    UnknownTaskError,
    UnsupportedValueError,
)
from rlplane.testing.expectations import equal, objects, refuses, took
from rlplane.testing.plane import Plane
from rlplane.testing.promises import promise

CLOSE = "`close` is idempotent; any later call raises `ClientClosedError`."
ENDS = (
    "The bootstrap client's close ends what it started, and only that; a worker's close never takes the"
    " plane down."
)


@promise(CLOSE)
def close_may_be_called_twice(plane: Plane) -> None:
    client = plane.another()
    client.close()
    client.close()


@promise(CLOSE)
def any_call_after_close_raises(plane: Plane) -> None:
    client = plane.another()
    part = plane.partition(client=client)
    meta = part.put_numbers("a")
    client.close()
    calls: dict[str, Callable[[], object]] = {
        "register_partition": part.register,
        "put_samples": lambda: part.put_numbers("b"),
        "claim_meta": lambda: part.claim_ready(),
        "claim_meta, waiting,": lambda: part.claim(1),
        "get_data": lambda: client.get_data(meta),
        "get_samples": lambda: part.get("a"),
        "check_consumption_status": lambda: part.is_consumed("train"),
        "clear_samples": lambda: part.clear("a"),
    }
    for name, call in calls.items():
        refuses(ClientClosedError, f"{name} after close", call)


@promise(ENDS)
def the_close_of_a_worker_leaves_the_plane_up(plane: Plane) -> None:
    part = plane.partition()
    worker = plane.worker()
    part.on(worker).put_numbers("ab", start=3)
    worker.close()
    equal("what the worker wrote", part.numbers("ab"), [3.0, 4.0])
    part.put_numbers("c")
    took("a claim after the worker's close", part.claim(3), "abc")
    another = part.on(plane.worker())
    equal("a read by a new worker", another.numbers("c"), [0.0])


@promise(ENDS)
def the_close_of_a_client_leaves_the_planes_of_others_up(plane: Plane) -> None:
    part = plane.partition()
    part.put_numbers("a", start=3)
    another = plane.another()
    plane.partition(client=another).put_numbers("a")
    another.close()
    equal("a read after another client's close", part.numbers("a"), [3.0])
    part.put_numbers("b")
    took("a claim after another client's close", part.claim(2), "ab")


@promise(
    "Errors derive from `DataPlaneError` and from the built-in that fits; the tree is at the top of "
    "`rlplane/errors.py`.",
)
def errors_are_of_the_classes_in_the_tree(plane: Plane) -> None:
    part = plane.partition(fields=["x", "y"])
    part.put_numbers("a")
    nowhere = plane.unregistered()
    calls: list[tuple[type[DataPlaneError], str, Callable[[], object]]] = [
        (UnknownPartitionError, "a write to an unknown partition", lambda: nowhere.put_numbers("a")),
        (UnknownPartitionError, "a claim on an unknown partition", lambda: nowhere.claim_ready()),
        (UnknownTaskError, "a claim of an unknown task", lambda: part.claim_ready(task="nobody")),
        (UnknownTaskError, "the status of an unknown task", lambda: part.is_consumed("nobody")),
        (UnknownFieldError, "a claim on an unknown field", lambda: part.claim_ready(required=["nowhere"])),
        (MissingDataError, "a read of a missing sample", lambda: part.get("z")),
        (MissingDataError, "a read of an unproduced field", lambda: part.get("a", ["y"])),
        (InvalidRequestError, "a write with duplicate ids", lambda: part.put_numbers("bb")),
        (
            InvalidRequestError,
            "a write with a wrong row count",
            lambda: part.client.put_samples(["b"], part.name, _two_rows()),
        ),
        (InvalidRequestError, "a claim with batch_size=0", lambda: part.claim_ready(0)),
        (InvalidRequestError, "a registration with a field twice", lambda: part.register(["x", "x"])),
        (UnsupportedValueError, "a write of a set", lambda: part.put("b", {"y": objects([{1}])})),
    ]
    for kind, what, call in calls:
        refuses(kind, what, call)


def _two_rows() -> TensorDict:
    return TensorDict({"x": torch.zeros(2)}, [2])
