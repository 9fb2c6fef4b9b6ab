"""``rlplane bench --cluster``: rlplane on a cluster beside plain TransferQueue, with Ray actors as clients.

plan.py          what is measured: batches, counts of clients, rounds; full, quick and scaled
schedule.py      what is measured when, and the result
driver.py        the process that starts Ray and both engines, and that measures
client_actor.py  the Ray actor that is a client of both engines
targets.py       the targets of the cluster engine
"""

from rlplane_benchmarks.cluster.plan import ClusterPlan, full_cluster_plan, quick_cluster_plan
from rlplane_benchmarks.cluster.schedule import run_cluster_bench

__all__ = ["ClusterPlan", "full_cluster_plan", "quick_cluster_plan", "run_cluster_bench"]
