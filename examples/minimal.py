"""The smallest pipeline: a producer and a consumer in two processes, over shared memory."""

import multiprocessing as mp

import torch

from rlplane import build_data_plane_client, kv_first_write, load_config, read_columns


def produce() -> None:
    with build_data_plane_client(load_config("shm"), bootstrap=False) as client:
        for n in range(0, 8, 2):
            padded = {"input_ids": torch.arange(8).reshape(2, 4) + 10 * n}
            ids = [f"s{n}", f"s{n + 1}"]
            kv_first_write(padded, sample_ids=ids, dp_client=client, partition_id="p", lengths=[4, 3])


if __name__ == "__main__":
    with build_data_plane_client(load_config("shm")) as client:
        client.register_partition("p", fields=["input_ids"], num_samples=8, consumer_tasks=["train"])
        producer = mp.get_context("spawn").Process(target=produce)
        producer.start()
        for _ in range(2):
            meta = client.claim_meta("p", "train", required_fields=["input_ids"], batch_size=4)
            tokens = read_columns(client, meta)["input_ids"]
            print(meta.sample_ids, meta.sequence_lengths, tokens.sum().item())
            client.clear_samples(meta.sample_ids, "p")
        producer.join()
