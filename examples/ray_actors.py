"""Two rollout actors and a trainer on Ray: the same calls as on one machine, with another config.

``pip install 'rlplane[transfer-queue]'``. It joins the Ray of ``RAY_ADDRESS``, or starts one.
"""

from collections.abc import Mapping
from typing import Any

import ray
import torch

from rlplane import build_data_plane_client, kv_first_write, load_config, read_columns

GROUPS, GROUP_SIZE = 8, 4


class Rollout:
    """Becomes an actor: writes every second group."""

    def __init__(self, config: Mapping[str, Any], first: int) -> None:
        self.client = build_data_plane_client(config, bootstrap=False)
        self.first = first

    def run(self) -> None:
        for number in range(self.first, GROUPS, 2):
            lengths = [2 + i for i in range(GROUP_SIZE)]
            kv_first_write(
                {"input_ids": torch.randint(0, 100, (GROUP_SIZE, max(lengths)))},
                sample_ids=[f"p{number}_g{i}" for i in range(GROUP_SIZE)],
                dp_client=self.client,
                partition_id="rollouts",
                lengths=lengths,
                padding="right",
                tags=[{"weight_version": 0} for _ in lengths],
            )
        self.client.close()


def main() -> None:
    config = load_config("cluster-simple", {"storage_capacity": 10_000, "num_storage_units": 1})
    with build_data_plane_client(config) as client:
        client.register_partition(
            "rollouts", ["input_ids"], GROUPS * GROUP_SIZE, ["train"], grpo_group_size=GROUP_SIZE
        )
        rollout = ray.remote(Rollout).options(num_cpus=0)
        actors = [rollout.remote(config, first) for first in range(2)]
        done = [actor.run.remote() for actor in actors]
        for _ in range(GROUPS // 2):
            meta = client.claim_meta("rollouts", "train", ["input_ids"], 2 * GROUP_SIZE)
            tokens = read_columns(client, meta)["input_ids"]
            print(sorted({name.split("_")[0] for name in meta.sample_ids}), tuple(tokens.shape))
            client.clear_samples(meta.sample_ids, "rollouts")
        ray.get(done)


if __name__ == "__main__":
    main()
