"""``import transfer_queue`` gives ``rlplane.compat.transfer_queue``, for programs that know only that name.

A file of its own, outside of the package that it stands for, because every Python that starts with
``RLPLANE_AS_TRANSFER_QUEUE=1`` loads it, and most of them will never need torch. Our own engine of a cluster
still gets the modules of the real package that are not public (``rlplane.storage.transfer_queue.theirs``).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from rlplane.storage.transfer_queue.theirs import is_asked

_THEIRS = "transfer_queue"
_OURS = "rlplane.compat.transfer_queue"
# Modules of theirs that are one file here.
_IN_ONE_FILE = {
    "sampler.base": "sampler",
    "sampler.grpo_group_n_sampler": "sampler",
    "sampler.rank_aware_sampler": "sampler",
    "sampler.seqlen_balanced_sampler": "sampler",
    "sampler.sequential_sampler": "sampler",
    "dataloader.streaming_dataloader": "dataloader",
    "dataloader.streaming_dataset": "dataloader",
}
_PUBLIC = {"", "client", "dataloader", "interface", "metadata", "sampler"}


class _Alias(Loader):
    """Loads a module by giving one that has another name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        if not hasattr(module, "__path__"):
            module.__path__ = []  # or nothing below it could be imported
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put the alias's there


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package != _THEIRS or is_asked():
            return None
        rest = _IN_ONE_FILE.get(rest, rest)
        if rest not in _PUBLIC:
            raise ModuleNotFoundError(
                f"rlplane stands in for transfer_queue, and has its public modules only, not {fullname!r}",
                name=fullname,
            )
        return importlib.util.spec_from_loader(
            fullname, _Alias(f"{_OURS}.{rest}".rstrip(".")), is_package=True
        )


def install() -> None:
    """From now on, ``import transfer_queue`` gives ours, in this process. Idempotent.

    Raises:
        RuntimeError: The real TransferQueue has been imported already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _THEIRS in sys.modules:
        raise RuntimeError(
            "transfer_queue has been imported already: call install() before that, or set "
            "RLPLANE_AS_TRANSFER_QUEUE=1 in the environment of the job"
        )
    sys.meta_path.insert(0, _Finder())
