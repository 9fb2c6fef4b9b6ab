"""Rollouts of a vision-language model: images of different sizes, shared by the answers to one prompt.

A rollout process writes groups of answers whose rows are trees: pixels, the grid of patches and the
conversation. A scorer needs the grids only and reads nothing else. The trainer reads whole rows.
"""

import multiprocessing as mp

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlplane import build_data_plane_client, load_config

GROUPS, GROUP_SIZE, PATCH = 4, 8, 1176


def roll_out() -> None:
    with build_data_plane_client(load_config("shm"), bootstrap=False) as client:
        for group in range(GROUPS):
            # One image for all answers of the group: it is stored and sent once.
            height, width = 8 + 2 * group, 12
            pixels = torch.randn(height * width, PATCH, dtype=torch.bfloat16)
            rows = [
                {
                    "pixel_values": pixels,
                    "image_grid_thw": torch.tensor([[1, height, width]]),
                    "video": None,
                    "turns": [
                        {"role": "user", "text": "What is this?"},
                        {"role": "model", "text": f"No. {n}"},
                    ],
                }
                for n in range(GROUP_SIZE)
            ]
            column = NonTensorStack(*[NonTensorData(row) for row in rows])
            ids = [f"p{group}_g{n}" for n in range(GROUP_SIZE)]
            client.put_samples(ids, "rollouts", TensorDict({"mm": column}, batch_size=[GROUP_SIZE]))


def main() -> None:
    with build_data_plane_client(load_config("shm")) as client:
        client.register_partition(
            "rollouts",
            fields=["mm", "patches"],
            num_samples=GROUPS * GROUP_SIZE,
            consumer_tasks=["score", "train"],
            grpo_group_size=GROUP_SIZE,
        )
        producer = mp.get_context("spawn").Process(target=roll_out)
        producer.start()
        for _ in range(GROUPS):
            meta = client.claim_meta("rollouts", "score", ["mm"], batch_size=GROUP_SIZE)
            grids = client.get_data(meta, ["mm.image_grid_thw"]).get("mm.image_grid_thw").tolist()
            patches = torch.tensor([int(grid.prod()) for grid in grids])
            client.put_samples(
                meta.sample_ids, "rollouts", TensorDict({"patches": patches}, batch_size=[GROUP_SIZE])
            )
        producer.join()

        held = client.partition_status("rollouts")["bytes"]
        sent = 0
        for _ in range(GROUPS):
            meta = client.claim_meta("rollouts", "train", ["mm", "patches"], batch_size=GROUP_SIZE)
            batch = client.get_data(meta)
            for row, patches in zip(batch.get("mm").tolist(), batch["patches"].tolist(), strict=True):
                assert row["pixel_values"].shape == (patches, PATCH)
                sent += row["pixel_values"].nbytes
            print(meta.sample_ids[0], tuple(row["pixel_values"].shape), row["turns"][-1]["text"])
            client.clear_samples(meta.sample_ids, "rollouts")
        print(f"images of {sent / 1e6:.1f} MB in {held / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
