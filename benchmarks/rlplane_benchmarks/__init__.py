"""The benchmarks behind ``rlplane bench``: engines beside their peers and the machine's limits, in one run.

The bench of one machine:

    plan.py                what is measured: batches, rounds, counts; full, quick and scaled
    schedule.py            what is measured when: warm-up, rounds, alternation
    participants/          the engines and limits that are measured, each through its own API
    active_participant.py  a participant in a run, with its worker processes
    worker_process.py      a process in which commands run
    worker.py              the commands that one side of a participant takes; they do the timing
    images.py              rows that are trees: images of different sizes
    loop_lag.py            how long an event loop stands still beside an asyncio client
    batches.py             the bytes that are written and read, and the check of every read
    cycles.py              put, claim, read and clear in a loop, as many clients run it at once
    claim_orders.py        claims in each order and under each flow policy, in the control state alone
    forked_clients.py      those clients as processes of one machine
    ray_cluster.py         a Ray on this machine alone

What a run found:

    measurements.py        the values that have been measured so far
    read_checks.py         the reads of a participant that were compared with what was written
    results.py             series, medians, spread and ratios; the JSON file
    targets.py             the targets, judged by one run
    table.py plot.py progress.py    what people see

Benches of their own:

    cluster/               ``--cluster``: the cluster engine beside plain TransferQueue
    observability.py       ``--observability``: what observability costs an operation
    metrics.py             ``--metrics``: what the live metrics service sustains
    cpu_time.py            the CPU time that another process has used

Only the processes that measure import torch; the process of the command does not.
"""

from rlplane_benchmarks.participants import PEERS, Participant, participants_for
from rlplane_benchmarks.plan import Plan, Workload, full_plan, quick_plan
from rlplane_benchmarks.results import BenchResult, Ratio, Series
from rlplane_benchmarks.schedule import run_bench

__all__ = [
    "PEERS",
    "BenchResult",
    "Participant",
    "Plan",
    "Ratio",
    "Series",
    "Workload",
    "full_plan",
    "participants_for",
    "quick_plan",
    "run_bench",
]
