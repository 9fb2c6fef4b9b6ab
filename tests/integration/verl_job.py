"""A step of a verl job, with verl's own code, on what ``import transfer_queue`` gives; prints what it saw.

verl is installed without its dependencies, in a directory of its own. Two things stand between us and its
modules: it names a class of transformers in an annotation, and the ``__init__`` of its trainers imports all
of them (and with them codetiming, orjson, cachetools, fastapi, torchdata and peft). The first is stood in
for, the second passed by.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict

IS_OURS = tq.__name__ != "transfer_queue"
SESSIONS = 2


def load_verl() -> tuple[Any, Any, Any]:
    """verl's replay buffers, its decorator for workers, and its functions on TensorDicts."""
    os.environ["VERL_LOGGING_LEVEL"] = "ERROR"
    transformers = types.ModuleType("transformers")
    transformers.PreTrainedTokenizer = object  # type: ignore[attr-defined]
    sys.modules["transformers"] = transformers
    sys.path.append(str(Path(sys.prefix) / "verl"))
    import verl

    trainers = types.ModuleType("verl.trainer.ppo.v1")
    trainers.__path__ = [str(Path(verl.__path__[0]) / "trainer" / "ppo" / "v1")]
    sys.modules[trainers.__name__] = trainers
    from verl.trainer.ppo.v1 import replay_buffer
    from verl.utils import tensordict_utils
    from verl.utils.transferqueue_utils import tqbridge

    return replay_buffer, tqbridge, tensordict_utils


def trajectory(uid: str, number: int, session: int) -> dict[str, Any]:
    """What an agent loop hands over for one session: rows of many lengths, numbers and objects."""
    prompt = torch.arange(2 + number)
    response = torch.arange(3 + session) + 10 * number
    return {
        "prompts": prompt,
        "responses": response,
        "input_ids": torch.cat([prompt, response]),
        "response_mask": torch.ones_like(response),
        "rm_scores": torch.full((len(response),), float(number % 2)),
        "num_turns": 1 + session,
        "uid": uid,
        "extra_fields": {"reward_extra_info": {"acc": number % 2}, "turn_scores": []},
        "multi_modal_inputs": {},
    }


async def roll_out(uid: str, number: int, tensordict_utils: Any) -> None:
    """One prompt, as verl's ``AgentLoopWorkerTQ`` does it: status, trajectories one by one, status."""
    await tq.async_kv_put(key=uid, partition_id="train", tag={"status": "running"})
    for session in range(SESSIONS):
        fields = trajectory(uid, number, session)
        length = len(fields["responses"])
        await tq.async_kv_batch_put(
            keys=[f"{uid}_{session}_0"],
            partition_id="train",
            fields=tensordict_utils.list_of_dict_to_tensordict([fields]),
            tags=[{"status": "success", "response_len": length, "global_steps": number}],
        )
    status = "failure" if number == 3 else "finished"
    await tq.async_kv_put(key=uid, partition_id="train", tag={"status": status})


def plain(value: Any) -> Any:
    """A column as its rows, and whether they were nested."""
    if isinstance(value, torch.Tensor):
        rows = value.unbind() if value.is_nested else value
        return [str(value.dtype), value.is_nested, [row.tolist() for row in rows]]
    return [getattr(item, "data", item) for item in value]


def columns(data: TensorDict) -> dict[str, Any]:
    return {name: plain(data[name]) for name in sorted(data.keys())}


def main() -> None:
    replay_buffer, tqbridge, tensordict_utils = load_verl()
    if not IS_OURS:
        import ray

        logging.disable(logging.WARNING)
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
    uids = [f"uid{number}" for number in range(5)]
    prompts = tensordict_utils.get_tensordict({"uid": uids, "raw_prompt": [[{"role": "user"}]] * 5})
    pending = [{"is_prompt": True, "status": "pending", "global_steps": n} for n in range(len(uids))]
    tq.kv_batch_put(keys=list(uids), partition_id="train", tags=pending, fields=prompts)

    async def produce() -> None:
        await asyncio.gather(*(roll_out(uid, n, tensordict_utils) for n, uid in enumerate(uids[:4])))

    asyncio.run(produce())
    seen: dict[str, Any] = {"listed": tq.kv_list()}

    refilled: list[int] = []
    settings: dict[str, Any] = {"trainer_config": None, "max_off_policy_threshold": 4, "sampler_kwargs": {}}
    buffer = replay_buffer.ReplayBufferAsync(
        "async", max_off_policy_strategy="drop", refill_fn=refilled.append, poll_interval=0.05, **settings
    )
    # The first prompt is too old by then, and the fourth has failed: both are evicted.
    batch, metrics = buffer.sample(global_steps=4, partition_id="train", batch_size=2)
    seen["sampled"] = [sorted(batch.keys), batch.partition_id, metrics, refilled]
    batch = batch.select_keys(sorted(batch.keys))
    seen["tags"] = batch.tags

    @tqbridge()
    def compute_log_prob(data: TensorDict) -> TensorDict:
        rows = [-ids.float() / data["temperature"] for ids in data["responses"].unbind()]
        return TensorDict(
            {"log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=len(data)
        )

    batch.fields = ["responses", "uid"]
    batch.extra_info["temperature"] = 2.0
    output = compute_log_prob(batch)
    seen["output"] = [output.keys, sorted(output.fields), output.tags]

    # As the trainer reads for its advantages: there is no critic, so nobody has written "values".
    fields = ["uid", "response_mask", "rm_scores", "log_probs", "num_turns", "extra_fields", "values"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=fields)
    seen["read"] = columns(data)
    advantages = TensorDict({"advantages": data["rm_scores"] * 2}, batch_size=len(batch))
    meta = tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=advantages)
    seen["all fields"] = meta.fields
    tq.kv_clear(keys=batch.keys, partition_id="train")
    seen["left"] = {key: tag.get("status") for key, tag in sorted(tq.kv_list("train")["train"].items())}
    tq.close()
    print(json.dumps(seen, sort_keys=True))


if __name__ == "__main__":
    main()
