"""A promise is a sentence of the contract with a check that proves it for a plane.

A check is a function whose name is a sentence. It takes a ``PlaneUnderTest`` and raises
:class:`BrokenPromise` with what happened instead. :func:`run_check` adds what was promised, so that a failing
adapter is told both.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rlplane.testing.plane_under_test import PlaneUnderTest

# In the order of the contract, which is the order of the table of promises.
_CHECK_MODULES = (
    "registering",
    "writing",
    "columns",
    "objects",
    "trees",
    "appending",
    "capacity",
    "claiming",
    "tails",
    "waiting",
    "groups",
    "where",
    "budgets",
    "peeking",
    "ordering",
    "reuse",
    "flow",
    "short_groups",
    "ranks",
    "reading",
    "isolation",
    "consumption",
    "clearing",
    "closing",
    "status",
)

CheckBody = Callable[["PlaneUnderTest"], None]


class BrokenPromise(AssertionError):
    """A plane did something else than the contract says."""


class BrokenPromises(ExceptionGroup[BrokenPromise], AssertionError):
    """Every promise that a plane broke in one run of :func:`check_data_plane`."""


class NotApplicable(Exception):
    """The check needs something that this factory or this machine does not have."""


@dataclass(frozen=True)
class PromiseCheck:
    """One promise and the function that proves it."""

    name: str
    quotes: tuple[str, ...]
    body: CheckBody = field(repr=False)
    features: frozenset[str] = frozenset()
    method: str | None = None

    @property
    def sentence(self) -> str:
        """The name, as it is read."""
        return self.name.replace("_", " ")

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class CheckOutcome:
    """How a check ended that did not find a broken promise."""

    check: PromiseCheck
    result: Literal["kept", "refused", "not applicable", "not promised"]
    reason: str = ""


_registry: dict[str, PromiseCheck] = {}


def promise(
    *quotes: str, feature: str | tuple[str, ...] = (), method: str | None = None
) -> Callable[[CheckBody], CheckBody]:
    """Make a check of a function: ``@promise("a sentence of the contract", …)``.

    Args:
        quotes: What is promised, in the words of ``docs/contract.md`` or of ``DataPlaneClient``.
        feature: A name, or names, under which an adapter may declare a family of checks as a limitation.
        method: The optional method that the check is about.
    """

    def register(body: CheckBody) -> CheckBody:
        name = body.__name__
        if name in _registry:
            raise ValueError(f"two checks are called {name!r}")
        features = {feature} if isinstance(feature, str) else set(feature)
        if method is not None:
            features.add(method)
        _registry[name] = PromiseCheck(name, quotes, body, frozenset(features), method)
        return body

    return register


def checks() -> tuple[PromiseCheck, ...]:
    """Every check, in the order of the contract."""
    for module in _CHECK_MODULES:
        importlib.import_module(f"rlplane.testing.suite.{module}")
    return tuple(_registry.values())


def check_data_plane(factory: Any, *, limitations: Iterable[str] = ()) -> list[CheckOutcome]:
    """Check every promise of the contract against the planes that ``factory`` makes.

    Args:
        factory: A function without arguments that returns a bootstrap client, or an object as described in
            :class:`rlplane.testing.PlaneFactory`.
        limitations: Names of checks, or of features, that the adapter declares it does not have. For those
            it must refuse with ``NotImplementedError`` (``UnsupportedOperationError``).

    Returns:
        What became of each check: kept, refused as declared, not promised, or not applicable and why.

    Raises:
        BrokenPromises: An ``AssertionError`` and an exception group: one entry per broken promise, each with
            the promise and what happened instead.
    """
    outcomes: list[CheckOutcome] = []
    broken: list[BrokenPromise] = []
    everything = checks()
    limitations = validated_limitations(limitations)
    for check in everything:
        try:
            outcomes.append(run_check(check, factory, limitations=limitations))
        except BrokenPromise as exc:
            broken.append(exc)
    if broken:
        raise BrokenPromises(f"{len(broken)} of {len(everything)} promises are broken", broken)
    return outcomes


def run_check(check: PromiseCheck, factory: Any, *, limitations: Iterable[str] = ()) -> CheckOutcome:
    """Run one check on a plane of its own; raises :class:`BrokenPromise` with the promise in its message."""
    from rlplane.testing.plane_under_test import PlaneUnderTest

    with PlaneUnderTest(factory) as plane:
        adapter = type(plane.client).__name__
        declared = validated_limitations(limitations) | validated_limitations(plane.limitations)
        validated_limitations(plane.not_promised)
        if check.name in plane.not_promised:
            return CheckOutcome(check, "not promised", plane.not_promised[check.name])
        is_limitation = check.name in declared or not declared.isdisjoint(check.features)
        try:
            if check.method is not None and not is_limitation and not plane.has(check.method):
                return CheckOutcome(check, "not applicable", f"{adapter} does not have {check.method}")
            check.body(plane)
        except NotApplicable as exc:
            return CheckOutcome(check, "not applicable", str(exc))
        except BrokenPromise as exc:
            raise _broken(check, adapter, str(exc), declared=is_limitation) from exc
        except NotImplementedError as exc:
            if is_limitation:
                return CheckOutcome(check, "refused", str(exc))
            what = f"it raised {exc!r}, and does not declare {check.name!r} as a limitation"
            raise _broken(check, adapter, what) from exc
        except Exception as exc:
            raise _broken(check, adapter, f"it raised {_named(exc)}", declared=is_limitation) from exc
        if is_limitation:
            what = "it declares this as a limitation, and keeps the promise: take the declaration away"
            raise _broken(check, adapter, what)
        try:
            plane.close()
        except Exception as exc:
            raise _broken(check, adapter, f"close raised {_named(exc)}") from exc
    return CheckOutcome(check, "kept")


def validated_limitations(names: Iterable[str]) -> frozenset[str]:
    """``names`` as a set, when each is the name of a check or of a feature; else ``ValueError``."""
    known = {check.name for check in checks()}.union(*(check.features for check in checks()))
    declared = frozenset(names)
    for name in sorted(declared - known):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"limitation {name!r} is not the name of a check or of a feature{hint}")
    return declared


def _broken(check: PromiseCheck, adapter: str, what: str, *, declared: bool = False) -> BrokenPromise:
    promised = " […] ".join(check.quotes)
    lines = [f"{adapter} breaks a promise: {check.sentence}"]
    lines += [f"  promised: {promised}", f"  instead:  {what}"]
    if declared:
        lines.append("  declared: as a limitation, so it must raise NotImplementedError here")
    return BrokenPromise("\n".join(lines))


def _named(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"
