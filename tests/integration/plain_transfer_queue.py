"""A program that speaks TransferQueue and knows nothing of rlplane. It does what it is told, line by line."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict


def do(command: str, **given: Any) -> Any:
    if command == "start":
        tq.init(
            {
                "controller": {"polling_mode": True},
                "backend": {"SimpleStorage": {"num_data_storage_units": 1}},
            }
        )
    elif command == "join":
        tq.init()
    elif command == "put":
        fields = TensorDict(
            {
                "tokens": torch.nested.as_nested_tensor(
                    [torch.arange(n) for n in given["lengths"]], layout=torch.jagged
                ),
                "grid": torch.arange(len(given["lengths"]) * 6.0).view(-1, 2, 3),
                "score": torch.arange(len(given["lengths"])) / 2,
                "text": NonTensorStack(*given["keys"]),
            },
            batch_size=len(given["lengths"]),
        )
        tq.kv_batch_put(given["keys"], given["partition"], fields, tags=given["tags"])
    elif command == "get":
        read = tq.kv_batch_get(given["keys"], given["partition"], given["fields"])
        return {name: _rows(read[name]) for name in given["fields"]}
    elif command == "list":
        return tq.kv_list(given["partition"]).get(given["partition"], {})
    elif command == "close":
        tq.close()
    return None


def _rows(value: Any) -> list[Any]:
    rows = value.unbind() if isinstance(value, torch.Tensor) and value.is_nested else value
    return [row.tolist() if isinstance(row, torch.Tensor) else row for row in rows]


def main() -> None:
    logging.disable(logging.WARNING)
    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    for line in sys.stdin:
        answer = do(**json.loads(line))
        print(json.dumps({"answer": answer}), flush=True)


if __name__ == "__main__":
    main()
