"""A ``DataLoader`` over samples that are still being written: two loader workers share them out."""

import threading

import torch
from torch.utils.data import DataLoader

from rlplane import DataPlaneClient, build_data_plane_client, kv_first_write, load_config
from rlplane.data import StreamingDataset

SAMPLES = 64


def produce(client: DataPlaneClient) -> None:
    for first in range(0, SAMPLES, 8):
        lengths = [1 + (first + i) % 7 for i in range(8)]
        kv_first_write(
            {"input_ids": torch.arange(8)[:, None].expand(8, 7) + first, "reward": torch.rand(8)},
            sample_ids=[f"s{first + i}" for i in range(8)],
            dp_client=client,
            partition_id="rollouts",
            lengths=lengths,
            padding="right",
        )


def main() -> None:
    with build_data_plane_client(load_config("shm")) as client:
        client.register_partition("rollouts", ["input_ids", "reward"], SAMPLES, consumer_tasks=["train"])
        dataset = StreamingDataset(client, "rollouts", "train", ["input_ids", "reward"], 16, clear=True)
        # The dataset makes the batches, so the loader must not.
        loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")
        producer = threading.Thread(target=produce, args=(client,))
        producer.start()
        seen = 0
        for batch in loader:
            seen += len(batch["reward"])
            print(tuple(batch["input_ids"].shape), f"mean reward {batch['reward'].mean():.2f}")
        producer.join()
        print(f"{seen} of {SAMPLES} samples; {client.partition_status('rollouts')['samples']} are left")


if __name__ == "__main__":
    main()
