"""The pytest plugin: ``pytest --data-plane mypkg:make_client`` runs each promise as a test of its own.

It is loaded into every pytest run of an environment that has rlplane, so it imports nothing before it is
asked to check a plane, and does nothing else.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlplane.testing.promises import PromiseCheck

_OPTION = "--data-plane"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--data-plane``."""
    parser.getgroup("rlplane").addoption(
        _OPTION,
        action="append",
        default=[],
        metavar="MODULE:FACTORY",
        help="check every promise of rlplane's contract against the planes that this factory makes; "
        "MODULE is importable or the path of a file. Without paths to tests, nothing else is run.",
    )


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Without paths on the command line, ``--data-plane`` is all there is to run."""
    if config.getoption(_OPTION) and config.args_source is not pytest.Config.ArgsSource.ARGS:
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add one test per promise and factory, before ``-k`` and ``-m`` choose among them."""
    for spec in config.getoption(_OPTION):
        name = f"{_OPTION}={spec}"
        collector = DataPlane.from_parent(session, name=name, nodeid=name, spec=spec)
        items.extend(session.genitems(collector))


class DataPlane(pytest.Collector):
    """All the promises for one factory."""

    def __init__(self, *, spec: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factory = _load(spec, self.config.invocation_params.dir)
        close = getattr(self.factory, "close", None)
        if close is not None:
            self.config.add_cleanup(close)

    def collect(self) -> Iterator[pytest.Item]:
        """One item per promise."""
        from rlplane.testing.promises import checks

        for check in checks():
            yield PromiseItem.from_parent(self, name=check.name, check=check)


class PromiseItem(pytest.Item):
    """One promise of the contract, as a test."""

    def __init__(self, *, check: PromiseCheck, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check = check

    def runtest(self) -> None:
        """Run the check; what is not applicable is skipped with its reason."""
        from rlplane.testing.promises import run_check

        assert isinstance(self.parent, DataPlane)
        outcome = run_check(self.check, self.parent.factory)
        if outcome.result == "not applicable":
            pytest.skip(f"not applicable: {outcome.reason}")
        if outcome.result == "refused":
            pytest.xfail(f"a declared limitation, refused as it must be: {outcome.reason}")
        if outcome.result == "not promised":
            pytest.xfail(f"the adapter does not promise it: {outcome.reason}")

    def repr_failure(
        self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None
    ) -> str | Any:  # pytest's own return type is private
        """The promise and what happened instead; then the traceback that leads there."""
        from rlplane.testing.promises import BrokenPromise

        error = excinfo.value
        if not isinstance(error, BrokenPromise):
            return super().repr_failure(excinfo, style)
        cause = error.__cause__
        if cause is None:
            return str(error)
        return f"{error}\n\n{''.join(traceback.format_exception(cause)).rstrip()}"

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where the check is, and its sentence."""
        code = self.check.body.__code__
        return Path(code.co_filename), code.co_firstlineno, self.check.sentence


def _load(spec: str, directory: Path) -> Any:
    """The factory that ``module:name`` or ``path/to/file.py:name`` names; a class is instantiated."""
    module_name, _, name = spec.rpartition(":")
    if not module_name or not name:
        raise pytest.UsageError(f"{_OPTION}={spec}: it should be like mypkg.planes:make_client")
    try:
        module = _import(module_name, directory)
    except ImportError as exc:
        raise pytest.UsageError(f"{_OPTION}={spec}: cannot import {module_name!r}: {exc}") from exc
    factory = getattr(module, name, None)
    if factory is None:
        raise pytest.UsageError(f"{_OPTION}={spec}: {module_name!r} has no {name!r}")
    # A class with a client() method describes planes; any other class is called for each client.
    if isinstance(factory, type) and hasattr(factory, "client"):
        return factory()
    return factory


def _import(name: str, directory: Path) -> Any:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = directory / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look a module up by its name
    spec.loader.exec_module(module)
    return module
