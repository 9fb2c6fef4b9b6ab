"""TransferQueue's own modules, also in a process where ours stand in for its public ones.

A cluster needs parts of TransferQueue that are not public: its storage units, its messages, its client of
Mooncake. Where ``import transfer_queue`` gives ours, they are loaded here, with the whole real package behind
them. Afterwards the public names are ours again.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any

_PACKAGE = "transfer_queue"
# Those that stay where they are: objects that come with answers of Ray name them.
_NOT_PUBLIC = (f"{_PACKAGE}.utils", f"{_PACKAGE}.storage")

_lock = threading.RLock()
_asking = threading.local()
_theirs: dict[str, ModuleType] = {}


def load(name: str) -> Any:
    """The module ``transfer_queue.<name>`` of the real package."""
    full = f"{_PACKAGE}.{name}"
    if not stands_in():
        return importlib.import_module(full)
    with _lock:
        if full in _theirs:
            return _theirs[full]
        ours = {key: sys.modules.pop(key) for key in _loaded()}
        sys.modules.update(_theirs)
        _asking.now = True
        try:
            return importlib.import_module(full)
        finally:
            _asking.now = False
            _theirs.update({key: sys.modules.pop(key) for key in _loaded()})
            sys.modules.update(ours)
            kept = {key: module for key, module in _theirs.items() if key.startswith(_NOT_PUBLIC)}
            sys.modules.update(kept)


def _loaded() -> list[str]:
    return [key for key in sys.modules if key.partition(".")[0] == _PACKAGE]


def is_asked() -> bool:
    """Whether this thread is loading a module of theirs."""
    return bool(getattr(_asking, "now", False))


def stands_in() -> bool:
    """Whether ``import transfer_queue`` gives ours in this process."""
    return str(importlib.import_module(_PACKAGE).__name__) != _PACKAGE
