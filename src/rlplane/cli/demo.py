"""``rlplane demo``: two stages that hand samples to each other through the plane, in one process."""

from __future__ import annotations

import threading
import time

from rlplane.cli.options import Json
from rlplane.cli.output import write_json, write_text

__all__ = ["demo"]


def demo(
    *,
    samples: int = 512,
    batch_size: int = 64,
    as_json: Json = False,
) -> None:
    """Move samples from a producer to a consumer, and say what was done.

    Parameters
    ----------
    samples
        How many samples to move.
    batch_size
        How many the consumer claims at once.
    """
    import torch
    from tensordict import TensorDict

    from rlplane import build_data_plane_client, load_config

    client = build_data_plane_client(load_config("local"))
    partition, total, seen = "rollouts", 0, 0
    started = time.perf_counter()
    try:
        client.register_partition(
            partition_id=partition, fields=["tokens"], num_samples=samples, consumer_tasks=["train"]
        )

        def produce() -> None:
            for first in range(0, samples, batch_size):
                ids = [f"s{number}" for number in range(first, min(first + batch_size, samples))]
                tokens = torch.arange(len(ids) * 16).reshape(len(ids), 16) + first
                client.put_samples(
                    sample_ids=ids,
                    partition_id=partition,
                    fields=TensorDict({"tokens": tokens}, batch_size=[len(ids)]),
                )

        producer = threading.Thread(target=produce)
        producer.start()
        while seen < samples:
            meta = client.claim_meta(
                partition_id=partition,
                task_name="train",
                required_fields=["tokens"],
                batch_size=batch_size,
                blocking=True,
                timeout_s=30,
            )
            tokens = client.get_data(meta)["tokens"]
            total += int(tokens.sum())
            seen += meta.size
            client.clear_samples(meta.sample_ids, partition)
        producer.join()
    finally:
        client.close()
    elapsed = time.perf_counter() - started
    if as_json:
        write_json("demo", {"samples": seen, "checksum": total, "seconds": elapsed})
    else:
        write_text(
            f"{seen} samples written, claimed, read and cleared in {elapsed:.3f} s;"
            f" the sum of what was read is {total}"
        )
