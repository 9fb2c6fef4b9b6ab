"""TRL's AsyncGRPOTrainer, unchanged, over shared memory: one trainer and two rollout processes, on the CPU.

A tiny language model learns to repeat the letter of its prompt. Nothing is downloaded: the model is made from
a config and the tokenizer from a list of letters. ``--kill`` kills a rollout process in the middle.
"""

import argparse
import multiprocessing as mp
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen2Config,
    TrainerCallback,
)

from rlplane import build_data_plane_client, load_config
from rlplane.integrations.trl import (
    PlaneRolloutWorker,
    PlaneWeightTransfer,
    TransformersGeneration,
    run_rollouts,
)

LETTERS = "abcdefgh"
GROUP, PROMPTS_PER_STEP, NEW_TOKENS = 8, 4, 4


def make_model(directory: Path) -> None:
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", ":", *LETTERS])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(directory)
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        eos_token_id=words["<eos>"],
        pad_token_id=words["<pad>"],
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def repeats_the_letter(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """How much of a completion is the letter of its prompt."""
    return [
        text.split().count(prompt[0]) / NEW_TOKENS for prompt, text in zip(prompts, completions, strict=True)
    ]


def roll_out(plane: Any, directory: Path, seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    generation = TransformersGeneration(model, tokenizer, max_new_tokens=NEW_TOKENS)
    run_rollouts(plane, generation, repeats_the_letter, load_weights=generation.load_weights)


def attention_on_the_cpu(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: Any = None, **tree: Any
) -> Any:
    """What TRL's attention computes, for which it loads a kernel that needs a GPU (FlashAttention 3).

    Each segment of the packed row attends to its own path through the tree of shared prefixes.
    """
    starts, path_starts = tree["tree_cu_seqlens_q"], tree["tree_cu_seqlens_k"]
    place = torch.arange(query.shape[2])
    segment = torch.bucketize(place, starts, right=True) - 1
    first = path_starts[segment]
    last = path_starts[segment + 1] - (starts[segment + 1] - 1 - place)
    path = torch.arange(len(tree["tree_kv_index"]))
    seen = (path >= first[:, None]) & (path < last[:, None])
    keys, values = (states[:, :, tree["tree_kv_index"]] for states in (key, value))
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scaling)
    return out.transpose(1, 2), None


def do_without_a_gpu() -> None:
    """Stand in at the two places where TRL 1.16's trainer needs one: its attention, and the device's name."""
    from trl.experimental.async_grpo import packing

    packing.tree_attention = attention_on_the_cpu
    torch.cuda.get_device_name = lambda device=None: "cpu"


class ShowReward(TrainerCallback):
    """One line per logged step, with the mean reward since the last."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "reward" in logs:
            print(f"step {state.global_step}: reward {logs['reward']:.2f}", flush=True)


class KillAt(TrainerCallback):
    """Kill a process when a step has been trained."""

    def __init__(self, step: int, process: Any) -> None:
        self.step, self.process = step, process

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.process.kill()
            print(f"step {self.step}: killed a rollout process", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--kill", action="store_true", help="kill a rollout process in the middle")
    options = parser.parse_args()
    # Here, because rollout processes load this file too, and need no TRL.
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        do_without_a_gpu()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_model(directory)
        config = load_config("shm")
        with build_data_plane_client(config) as plane:
            prompts = Dataset.from_dict({"prompt": [f"{letter} :" for letter in LETTERS]})
            worker = PlaneRolloutWorker(
                plane, prompts, num_generations=GROUP, max_groups=2 * PROMPTS_PER_STEP
            )
            context = mp.get_context("spawn")
            processes = [context.Process(target=roll_out, args=(config, directory, seed)) for seed in (1, 2)]
            trainer = AsyncGRPOTrainer(
                model=str(directory),
                reward_funcs=repeats_the_letter,
                args=AsyncGRPOConfig(
                    output_dir=str(directory / "out"),
                    per_device_train_batch_size=GROUP * PROMPTS_PER_STEP,
                    max_steps=options.steps,
                    learning_rate=3e-3,
                    num_generations=GROUP,
                    token_budget=0,
                    use_cpu=not torch.cuda.is_available(),
                    bf16=False,
                    activation_checkpointing=False,
                    save_strategy="no",
                    report_to="none",
                    disable_tqdm=True,
                    logging_steps=10,
                ),
                train_dataset=prompts,
                processing_class=PreTrainedTokenizerFast.from_pretrained(directory),
                rollout_worker=worker,
                weight_transfer=PlaneWeightTransfer(plane),
            )
            trainer.remove_callback(PrinterCallback)
            trainer.add_callback(ShowReward)
            for process in processes:
                process.start()
            if options.kill:
                trainer.add_callback(KillAt(options.steps // 2, processes[0]))
            trainer.train()
            for process in processes:
                process.join(30)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"reward {rewards[0]:.2f} at first, {rewards[-1]:.2f} in the end")


if __name__ == "__main__":
    main()
