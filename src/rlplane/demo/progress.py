"""The reports of the workers to the job, which are tags of tiny samples in the partition ``progress``."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any, Self

from rlplane import DataPlaneClient
from rlplane.demo.settings import PROGRESS

_LONG_S = 24 * 3600.0
_END_S = 30.0
_END = "end-of-reports"


def steps_in(client: DataPlaneClient) -> list[dict[str, Any]]:
    """The reports of the steps that a run has made so far."""
    reports = client.peek_meta(PROGRESS).tags or []
    return sorted((report for report in reports if "step" in report), key=lambda report: report["step"])


class ProgressReader:
    """Reads the reports in a thread that waits in one claim, which the next report wakes.

    The job itself has to look at its workers several times a second. If it claimed with a timeout that short,
    most of the timeouts in the run's measurements would be its own.
    """

    def __init__(self, client: DataPlaneClient) -> None:
        self._client = client
        self._reports: queue.SimpleQueue[dict[str, Any] | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="rlplane-demo-progress", daemon=True)
        self._thread.start()

    def next(self, wait_s: float) -> dict[str, Any] | None:
        """The next report, or None if none comes within ``wait_s``. Raises what the plane raised."""
        try:
            report = self._reports.get(timeout=wait_s) if wait_s else self._reports.get_nowait()
        except queue.Empty:
            return None
        if isinstance(report, Exception):
            raise report
        return report

    def finish(self) -> None:
        """End the thread once it has read every report so far; :meth:`next` gives them as before."""
        if self._thread.is_alive():
            self._client.put_samples([_END], PROGRESS, None, [{"end": True}])
            self._thread.join(_END_S)

    def _read(self) -> None:
        try:
            while True:
                try:
                    meta = self._client.claim_meta(PROGRESS, "watch", [], 1, timeout_s=_LONG_S)
                except TimeoutError:
                    continue
                (report,) = meta.tags or [{}]
                if "step" in report:
                    # It stays in the plane, and so in its checkpoints.
                    self._client.finish_claims(meta)
                else:
                    self._client.clear_samples(meta.sample_ids, PROGRESS)
                if "end" in report:
                    return
                self._reports.put(report)
        except Exception as error:
            self._reports.put(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Where the plane has gone, the error that told so is the one to show.
        with contextlib.suppress(Exception):
            self.finish()
