"""A real run to look at: one process, a plane in memory, an aggregator. It ends when its stdin is closed.

python viewed_run.py OUT_DIR [PROMETHEUS_PORT]
"""

import contextlib
import itertools
import sys
import threading
import time

import torch
from tensordict import TensorDict

from rlplane import build_data_plane_client, load_config
from rlplane.metrics.aggregator import start_aggregator

GROUP = 8


def main(out_dir: str, prometheus_port: int | None) -> None:
    with start_aggregator(out_dir=out_dir, jsonl=True, prometheus_port=prometheus_port) as aggregator:
        observability = {
            "enabled": True,
            "callback": lambda event: None,
            "track_partitions": ["rollouts"],
        }
        client = build_data_plane_client(load_config("local", {"observability": observability}))
        client.register_partition("rollouts", ["tokens"], 1_000_000, ["reward", "train"])
        with contextlib.suppress(KeyError):
            client.get_samples(["nobody"], "rollouts", ["tokens"])
        print(aggregator.run_id, aggregator.metrics_address, aggregator.token_file, flush=True)
        end, steps = threading.Event(), itertools.count()

        def produce() -> None:
            number = 0
            while not end.wait(0.01):
                ids = [f"p{number}_g{place}" for place in range(GROUP)]
                fields = TensorDict({"tokens": torch.zeros(GROUP, 256)}, [GROUP])
                tags = [{"weight_version": number // 20}] * GROUP
                client.put_samples(ids, "rollouts", fields, tags)
                number += 1

        def consume(task: str, clear: bool) -> None:
            while not end.is_set():
                try:
                    meta = client.claim_meta("rollouts", task, ["tokens"], GROUP, timeout_s=0.2)
                except TimeoutError:
                    continue
                client.get_data(meta)
                if clear:
                    time.sleep(0.02)
                    client.clear_samples(meta.sample_ids, "rollouts")
                    client.log({"reward": 0.5})
                    client.mark_step(next(steps))

        threads = [threading.Thread(target=produce)]
        threads += [
            threading.Thread(target=consume, args=each) for each in (("reward", False), ("train", True))
        ]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        end.set()
        for thread in threads:
            thread.join()
        client.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
