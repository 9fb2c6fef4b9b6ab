"""What every test is given: the logging that it found is the logging that the next one finds."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _logging_stays_as_it_was() -> Iterator[None]:
    # A command that is run inside the test process sets the level of our logger, as it should.
    logger = logging.getLogger("rlplane")
    level = logger.level
    yield
    logger.setLevel(level)
