"""The live runs of a Ray cluster, for viewers on any of its nodes.

``python -m rlplane.adapters.transfer_queue.runs`` joins the cluster of this machine and writes to stdout,
every two seconds until its stdin ends, a line of JSON: ``{"runs": […]}``, or ``{"error": "…"}`` and no more.
The runs have secrets in them, which only this pipe sees. It is a process of its own because whoever joins a
cluster becomes part of it: Ray takes over its signals, writes to its terminal, and ends it with the cluster.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
from typing import IO, Any

from rlplane.adapters.transfer_queue.plane import SERVICE, _quiet_transfer_queue, _ray
from rlplane.errors import MissingExtraError

_EVERY_S = 2.0
_ANSWER_S = 10.0


def list_cluster_runs() -> list[str]:
    """What the planes of the cluster say of their runs, for those that have one; needs a connected Ray."""
    ray = _ray()
    found = []
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["name"] != SERVICE:
            continue
        try:
            actor = ray.get_actor(SERVICE, namespace=named["namespace"])
            found.append(ray.get(actor.describe_run.remote(), timeout=_ANSWER_S))
        except (AttributeError, ValueError, ray.exceptions.RayError):
            continue  # It has ended meanwhile, is starting again, or is of an older version.
    return [run for run in found if run]


def main() -> int:
    """Answer until nobody listens; the exit code."""
    # What Ray prints is no answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        _join()
        while True:
            _tell(answers, {"runs": list_cluster_runs()})
            if select.select([sys.stdin], [], [], _EVERY_S)[0]:
                return 0
    except BrokenPipeError:
        return 0
    except Exception as error:  # Ray has many; whichever it is, the viewer says so and goes on.
        _tell(answers, {"error": " ".join(str(error).split()) or repr(error)})
        return 3


def _join() -> None:
    if os.environ.get("RAY_ADDRESS") == "local":
        del os.environ["RAY_ADDRESS"]  # It means "start one".
    _quiet_transfer_queue({})
    try:
        _ray().init(address="auto", log_to_driver=False, logging_level=logging.CRITICAL)
    except MissingExtraError:
        raise
    except Exception as error:
        raise ConnectionError(f"Ray cannot be joined: {error}") from error


def _tell(answers: IO[str], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
