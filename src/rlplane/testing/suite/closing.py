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
from rlplane.testing.expectations import equal, has_samples, objects, refuses, rows_of
from rlplane.testing.plane_under_test import PlaneUnderTest
from rlplane.testing.promises import promise

CLOSE = "`close` is idempotent; any later call raises `ClientClosedError`."
ENDS = (
    "The bootstrap client's close ends what it started, and only that; a worker's close never takes the"
    " plane down."
)
GIVES_BACK = (
    "A client that closes or dies gives its unfinished claims back: they are handed out again, ahead of all"
    " else."
)
UNCLAIM = "`unclaim(meta)` gives back what this client still holds of a claim: it is handed out again first."
PRODUCES = (
    "A task that `produces` names is finished with a sample when all the fields named there are written; any"
    " other task when it has written any field."
)
DONE = (
    "`finish_claims(meta)` is for samples that were claimed and only read: they are not handed out again "
    "when the client goes."
)
DROP = (
    "`drop_partition` forgets a partition with its samples, schema and tasks; whoever waits for it gets"
    " `UnknownPartitionError`."
)


@promise(CLOSE)
def close_may_be_called_twice(plane: PlaneUnderTest) -> None:
    client = plane.another()
    client.close()
    client.close()


@promise(CLOSE)
def any_call_after_close_raises(plane: PlaneUnderTest) -> None:
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
def the_close_of_a_worker_leaves_the_plane_up(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    worker = plane.worker()
    part.on(worker).put_numbers("ab", start=3)
    worker.close()
    equal("what the worker wrote", part.numbers("ab"), [3.0, 4.0])
    part.put_numbers("c")
    has_samples("a claim after the worker's close", part.claim(3), "abc")
    another = part.on(plane.worker())
    equal("a read by a new worker", another.numbers("c"), [0.0])


@promise(ENDS)
def the_close_of_a_client_leaves_the_planes_of_others_up(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("a", start=3)
    another = plane.another()
    plane.partition(client=another).put_numbers("a")
    another.close()
    equal("a read after another client's close", part.numbers("a"), [3.0])
    part.put_numbers("b")
    has_samples("a claim after another client's close", part.claim(2), "ab")


@promise(GIVES_BACK, method="unclaim")
def the_close_of_a_client_gives_its_unfinished_claims_back(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("abc")
    worker = plane.worker()
    has_samples("the worker's claim", part.on(worker).claim(2), "ab")
    worker.close()
    equal("whether all is consumed", part.is_consumed("train"), False)
    has_samples("a claim after the worker's close", part.claim(3), "abc")


@promise(UNCLAIM, method="unclaim")
def a_claim_that_is_given_back_is_handed_out_again_ahead_of_all_else(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("abcd")
    meta = part.claim(2)
    has_samples("the claim", meta, "ab")
    part.client.unclaim(meta.slice(1, 2))
    has_samples("a claim after one sample was given back", part.claim(2), "bc")
    part = plane.partition(fields=["x", "y"])
    part.put_numbers("ab")
    for sample_id in "ba":
        part.put(sample_id, {"y": torch.ones(1)})
    part.client.unclaim(part.claim(1, required=["x"]))
    has_samples("a claim on a field that is asked for only now", part.claim(2, required=["y"]), "ab")


@promise(UNCLAIM, method="unclaim")
def a_claim_that_is_finished_or_of_another_client_cannot_be_given_back(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"])
    part.put_numbers("ab")
    meta = part.claim(1, required=["x"])
    part.put("a", {"y": torch.ones(1)})
    part.client.unclaim(meta)
    worker = plane.worker()
    theirs = part.on(worker).claim(1, required=["x"])
    part.client.unclaim(theirs)
    has_samples("a claim when nothing is left", part.claim_ready(required=["x"]), "")
    refuses(InvalidRequestError, "unclaim of a receipt", lambda: part.client.unclaim(part.put_numbers("c")))


@promise(DONE, feature="finish_claims")
def samples_that_a_client_is_done_with_are_not_handed_out_again(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("abc")
    worker = plane.worker()
    meta = part.on(worker).claim(3)
    worker.finish_claims(meta.slice(0, 2))
    refuses(ValueError, "to be done with a receipt", lambda: worker.finish_claims(part.put_numbers("d")))
    worker.close()
    has_samples("what is handed out again", part.claim(2), ["c", "d"])


@promise(PRODUCES, method="unclaim")
def a_task_is_finished_with_a_sample_when_all_that_it_produces_is_there(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.client.register_partition(
        part.name, ["x", "y", "z"], 10**6, ["score", "train"], produces={"score": ["y", "z"]}
    )
    part.put_numbers("ab")
    worker = part.on(plane.worker())
    has_samples("the worker's claim", worker.claim(2, task="score", required=["x"]), "ab")
    worker.put("ab", {"y": torch.ones(2)})
    worker.put("a", {"z": torch.ones(1)})
    worker.client.close()
    has_samples("what was half done", part.claim_ready(task="score", required=["x"]), "b")


@promise(DROP, method="drop_partition")
def a_partition_that_is_dropped_is_unknown_until_it_is_registered_again(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put_numbers("ab")
    part.claim(1)
    part.client.drop_partition(part.name)
    refuses(UnknownPartitionError, "a write to a dropped partition", lambda: part.put_numbers("c"))
    refuses(UnknownPartitionError, "a second drop", lambda: part.client.drop_partition(part.name))
    part.register()
    part.put_numbers("a", start=7)
    has_samples("a claim on the new partition", part.claim_ready(), "a")
    equal("what is in it", part.numbers("a"), [7.0])


@promise(DROP, method="drop_partition")
def another_client_notices_that_a_partition_was_dropped_and_made_anew(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    worker = part.on(plane.worker())
    worker.put_numbers("a")
    part.client.drop_partition(part.name)
    part.register(fields=["word"], enums={"word": ["yes", "no"]})
    worker.put("bc", {"word": objects(["no", "yes"])})
    equal("what the worker wrote", rows_of(part.get("bc", ["word"]).get("word")), ["no", "yes"])


@promise(
    "Errors derive from `DataPlaneError` and from the built-in that fits; the tree is at the top of "
    "`rlplane/errors.py`.",
)
def errors_are_of_the_classes_in_the_tree(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["x", "y"])
    part.put_numbers("a")
    nowhere, two_rows = plane.unregistered(), TensorDict({"x": torch.zeros(2)}, [2])
    calls: list[tuple[type[DataPlaneError], str, Callable[[], object]]] = [
        (UnknownPartitionError, "a write to an unknown partition", lambda: nowhere.put_numbers("a")),
        (UnknownPartitionError, "a claim on an unknown partition", lambda: nowhere.claim_ready()),
        (UnknownTaskError, "a claim of an unknown task", lambda: part.claim_ready(task="nobody")),
        (UnknownTaskError, "the status of an unknown task", lambda: part.is_consumed("nobody")),
        (UnknownFieldError, "a claim on an unknown field", lambda: part.claim_ready(required=["nowhere"])),
        (MissingDataError, "a read of a missing sample", lambda: part.get("z")),
        (MissingDataError, "a read of an unproduced field", lambda: part.get("a", ["y"])),
        (InvalidRequestError, "a write with duplicate ids", lambda: part.put_numbers("bb")),
        (InvalidRequestError, "a write with a wrong row count", lambda: part.put("b", two_rows)),
        (InvalidRequestError, "a claim with batch_size=0", lambda: part.claim_ready(0)),
        (InvalidRequestError, "a registration with a field twice", lambda: part.register(["x", "x"])),
        (UnsupportedValueError, "a write of a set", lambda: part.put("b", {"y": objects([{1}])})),
    ]
    for kind, what, call in calls:
        refuses(kind, what, call)
