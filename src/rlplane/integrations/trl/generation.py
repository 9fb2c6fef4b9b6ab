"""What a rollout process generates with: a function of a prompt and a number, that returns completions."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt.

    ``content`` is what reward functions get: text, or the messages if the prompt is a list of messages.
    ``logprobs`` are those of the completion's tokens, at the temperature that they were sampled with.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    content: Any


Generate = Callable[[Any, int], Sequence[Completion]]
"""Called with a prompt, as the dataset has it, and the number of completions that are wanted."""


def _prompt_ids(tokenizer: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt)["input_ids"])
    else:
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        raise ValueError(f"the tokenizer makes no token of the prompt {prompt!r}")
    return ids


def _content(tokenizer: Any, prompt: Any, ids: Sequence[int]) -> Any:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


class TransformersGeneration:
    """Generate with a model of transformers in this process. Its weights follow the trainer's.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        max_new_tokens: The longest completion.
        temperature: As the trainer's.
        options: More for the model's ``generate``.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, max_new_tokens: int, temperature: float = 1.0, **options: Any
    ) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.temperature = temperature
        self.options = {"max_new_tokens": max_new_tokens, "do_sample": True, "top_k": 0, **options}

    def __call__(self, prompt: Any, count: int) -> list[Completion]:
        """Sample ``count`` completions of ``prompt``."""
        prompt_ids = _prompt_ids(self.tokenizer, prompt)
        inputs = torch.tensor([prompt_ids] * count, device=self.model.device)
        with torch.no_grad():
            made = self.model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                temperature=self.temperature,
                pad_token_id=self.tokenizer.pad_token_id,
                return_dict_in_generate=True,
                output_logits=True,
                **self.options,
            )
        tokens = made.sequences[:, len(prompt_ids) :]
        scores = torch.stack(made.logits, dim=1).float() / self.temperature
        logprobs = scores.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        completions = []
        for ids, row in zip(tokens.tolist(), logprobs.tolist(), strict=True):
            end = self._length(ids)
            content = _content(self.tokenizer, prompt, ids[:end])
            completions.append(Completion(prompt_ids, ids[:end], row[:end], content))
        return completions

    def _length(self, ids: list[int]) -> int:
        """Up to the first token that ends a completion, which belongs to it."""
        ends = self.model.generation_config.eos_token_id
        ends = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        return next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))

    def load_weights(self, state: dict[str, Tensor]) -> None:
        """Take the trainer's weights."""
        unknown = self.model.load_state_dict(state, strict=False).unexpected_keys
        if unknown:
            raise ValueError(f"the trainer's weights have {unknown[:3]}, which the model here does not have")


class ServerGeneration:
    """Generate with an OpenAI-compatible server that returns token ids, such as vLLM's.

    The server's weights are not loaded here: leave the trainer's ``weight_transfer`` to TRL.

    Args:
        base_url: Such as ``http://localhost:8000/v1``.
        model: The name that the server knows it by.
        tokenizer: Its tokenizer.
        max_tokens: The longest completion.
        temperature: As the trainer's.
        timeout_s: How long an answer may take.
        options: More for the request.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        tokenizer: Any,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        timeout_s: float = 600.0,
        **options: Any,
    ) -> None:
        self.url = f"{base_url.rstrip('/')}/completions"
        self.tokenizer, self.timeout_s = tokenizer, timeout_s
        sampling = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self.request = {**sampling, "logprobs": 0, "return_token_ids": True, **options}

    def __call__(self, prompt: Any, count: int) -> list[Completion]:
        """Sample ``count`` completions of ``prompt``."""
        prompt_ids = _prompt_ids(self.tokenizer, prompt)
        body = json.dumps({**self.request, "prompt": prompt_ids, "n": count}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
            choices = json.load(answer)["choices"]
        return [
            Completion(
                prompt_ids,
                choice["token_ids"],
                choice["logprobs"]["token_logprobs"],
                _content(self.tokenizer, prompt, choice["token_ids"]),
            )
            for choice in choices
        ]
