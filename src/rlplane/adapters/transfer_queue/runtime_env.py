"""The TransferQueue pin that Ray installs for TransferQueue's actors, where the config asks for it.

On a cluster whose nodes have environments of their own, TransferQueue's actors start in whatever
their node has. With ``transfer_queue.pin_runtime_env`` Ray gives them the release that this package requires.
"""

from __future__ import annotations

import logging
import re
from importlib import metadata
from typing import Any

from rlplane.errors import ConfigError

logger = logging.getLogger(__name__)

_TQ_RUNTIME_ENV_PATCHED = False
_REQUIREMENT = re.compile(r"\s*(TransferQueue\s*[^;\[]*)", re.IGNORECASE)


def _resolve_tq_pin() -> str:
    """The requirement on TransferQueue in our own package metadata, such as ``TransferQueue==0.1.11``.

    Raises:
        ConfigError: The metadata has none; the package is installed in a way that hides it.
    """
    for requirement in metadata.requires("rlplane") or []:
        match = _REQUIREMENT.match(requirement)
        if match:
            return match[1].strip().replace(" ", "")
    raise ConfigError("rlplane's package metadata has no requirement on TransferQueue to pin its actors to")


def _patch_tq_actor_runtime_env() -> None:
    """Make TransferQueue's actors start with a ``runtime_env`` that has the pin. Idempotent.

    Where TransferQueue's classes are not as expected, it warns in the log and changes nothing.
    """
    global _TQ_RUNTIME_ENV_PATCHED
    if _TQ_RUNTIME_ENV_PATCHED:
        return
    try:
        from transfer_queue.controller import TransferQueueController
        from transfer_queue.storage.simple_storage import SimpleStorageUnit
    except ImportError as error:
        logger.warning("TransferQueue has moved its actors (%s); its runtime_env is not pinned", error)
        return
    actors = (TransferQueueController, SimpleStorageUnit)
    if not all(callable(getattr(actor, "options", None)) for actor in actors):
        logger.warning("TransferQueue's actors have no options(); their runtime_env is not pinned")
        return
    pin = _resolve_tq_pin()
    for actor in actors:
        actor.options = _with_pin(actor.options, pin)
    _TQ_RUNTIME_ENV_PATCHED = True


def _with_pin(options: Any, pin: str) -> Any:
    def pinned(*args: Any, **kwargs: Any) -> Any:
        runtime_env = dict(kwargs.pop("runtime_env", None) or {})
        packages = list(runtime_env.get("pip") or [])
        if pin not in packages:
            packages.append(pin)
        return options(*args, **kwargs, runtime_env={**runtime_env, "pip": packages})

    return pinned
