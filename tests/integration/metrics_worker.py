"""A worker process for the metrics tests: records a known flow of events, then closes or waits.

Usage: metrics_worker.py NAME STEPS [hold]. With ``hold`` it prints ``recorded`` and waits for the end of its
standard input before it closes in order.
"""

from __future__ import annotations

import random
import sys
import time

from rlplane.metrics.event_publisher import EventPublisherService, publisher_from_environment
from rlplane.metrics.events import OpRecord, SampleEvent


def record_step(sender: EventPublisherService, name: str, step: int, noise: random.Random) -> None:
    """Two samples written, claimed, and (nine times of ten) cleared; one operation of each kind."""
    ids = [f"{name}-{step}-{index}" for index in range(2)]
    now = time.time_ns()

    def op(kind: str, size: int = 0, status: str = "ok", error: str | None = None) -> None:
        wall = int(noise.lognormvariate(13, 1.5))
        sender.record(OpRecord(kind, "rollouts", 2, size, wall, now, status, 1, None, error, error))

    op("put", 4096)
    sender.record(
        SampleEvent(
            kind="written",
            partition_id="rollouts",
            sample_ids=ids,
            time_ns=now,
            weight_versions=[step // 7, None],
            n_bytes=4096,
        )
    )
    op("claim_meta", 0, *(("timeout", "ClaimTimeoutError") if step % 50 == 7 else ()))
    sender.record(
        SampleEvent(
            kind="claimed", partition_id="rollouts", sample_ids=ids, time_ns=now + 1000 * step, task="train"
        )
    )
    op("get_data", 4096, *(("error", "MissingDataError") if step % 40 == 3 else ()))
    if step % 10:
        op("clear")
        sender.record(
            SampleEvent(
                kind="cleared", partition_id="rollouts", sample_ids=ids, time_ns=now + 2000 * step + 1
            )
        )
    elif step % 20 == 0:
        sender.record(
            SampleEvent(
                kind="failed", partition_id="rollouts", sample_ids=ids[:1], time_ns=now + 5, reason="x"
            )
        )


def main() -> None:
    name, steps, *rest = sys.argv[1:]
    sender = publisher_from_environment(name, role="rollout")
    assert sender is not None
    noise = random.Random(name)
    for step in range(int(steps)):
        record_step(sender, name, step, noise)
    print("recorded", flush=True)
    if rest:
        sys.stdin.read()
    sender.close(timeout=30.0)
    print(f"dropped {sender.n_dropped}", flush=True)


if __name__ == "__main__":
    main()
