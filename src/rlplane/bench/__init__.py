"""``rlplane bench``: the engine beside its peers and the machine's limits, in one run.

    plan.py          what is measured: batches, rounds, counts; full, quick and scaled
    batches.py       the bytes that travel, made the same way in every process, and how they are checked
    seat.py          a process that one side of a contestant sits in, and the commands that it takes
    contestants/     who takes part, and each one's store behind its own API
    race.py          warm-up, alternation, rounds: who is measured when
    results.py       series of measurements, their medians and spread, ratios; the JSON file
    targets.py       the table of targets, judged by one run
    table.py plot.py progress.py    what people see

Three more benches have a module each, and are loaded when asked for: ``observability``, ``metrics`` and
``raw_transfer_queue``.
"""

from rlplane.bench.contestants import PEERS, Contestant, contestants_for
from rlplane.bench.plan import Plan, Workload, full_plan, quick_plan
from rlplane.bench.race import run_bench
from rlplane.bench.results import BenchResult, Ratio, Series

__all__ = [
    "PEERS",
    "BenchResult",
    "Contestant",
    "Plan",
    "Ratio",
    "Series",
    "Workload",
    "contestants_for",
    "full_plan",
    "quick_plan",
    "run_bench",
]
