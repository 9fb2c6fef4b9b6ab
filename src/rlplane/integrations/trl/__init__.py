"""TRL's ``AsyncGRPOTrainer`` on a plane: any number of rollout processes, on any machines.

In the trainer's process, :class:`PlaneRolloutWorker` and :class:`PlaneWeightTransfer` are what its arguments
``rollout_worker`` and ``weight_transfer`` take. Every rollout process calls :func:`run_rollouts`.

worker.py       the trainer's side: prompts go out, scored groups come back
weights.py      weights through the plane
rollouts.py     the side of a rollout process
generation.py   what generates: transformers, an OpenAI-compatible server
"""

from rlplane.integrations.trl.generation import Completion, ServerGeneration, TransformersGeneration
from rlplane.integrations.trl.rollouts import run_rollouts
from rlplane.integrations.trl.weights import PlaneWeightTransfer
from rlplane.integrations.trl.worker import PlaneRolloutWorker

__all__ = [
    "Completion",
    "PlaneRolloutWorker",
    "PlaneWeightTransfer",
    "ServerGeneration",
    "TransformersGeneration",
    "run_rollouts",
]
