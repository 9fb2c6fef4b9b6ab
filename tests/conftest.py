"""What every test is given: a group to run with, and the logging that the test before it found."""

from __future__ import annotations

import contextlib
import logging
import os
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is, and nothing else.
settings.register_profile("rlplane", deadline=None)
settings.load_profile("rlplane")

# Ray's workers give way to all other processes by default: beside two other test processes they starved, and
# an actor took more than a minute to start. Inherited by every process that a test starts.
os.environ.update(RAY_worker_niceness="0")

# Most tests that measure look at the client alone: those that want an aggregator unset this, or start one.
os.environ["RLPLANE_METRICS_ADDRESS"] = "off"

# A shell that starts the tests in the background has them ignore Ctrl-C, and what they start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# They take longest, so they begin first.
_LONG = (
    "mooncake",
    "simple",
    "test_demo_runs",
    "test_bench",
    "test_two_nodes",
    "test_bench_cluster",
    "test_stress",
    "test_trainer_docs",
    "test_tutorial",
)


_started = contextlib.ExitStack()


def pytest_configure() -> None:
    # By its path: where slipcover measures, "tests" is not a package.
    module = runpy.run_path(str(Path(__file__).parent / "warm_workers" / "__init__.py"))
    _started.enter_context(module["warm_workers"]())


def pytest_unconfigure() -> None:
    _started.close()


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep together, when tests run in several processes, what shares a cluster or the fixtures of a file."""
    groups = {}
    for item in items:
        cluster = "mooncake" if "mooncake" in item.name else "simple"
        shares_ray = "ray_cluster" in getattr(item, "fixturenames", ())
        groups[item] = cluster if shares_ray else item.path.stem
        item.add_marker(pytest.mark.xdist_group(groups[item]))
    items.sort(key=lambda item: _LONG.index(groups[item]) if groups[item] in _LONG else len(_LONG))


@pytest.fixture(autouse=True)
def _logging_stays_as_it_was() -> Iterator[None]:
    # A command that is run inside the test process sets the level of our logger, as it should.
    logger = logging.getLogger("rlplane")
    level = logger.level
    yield
    logger.setLevel(level)
