"""The task: write a short string backwards. The answer can be checked, character by character."""

from __future__ import annotations

import random

LETTERS = "abcdefghij"
VOCABULARY = ["<pad>", "=", *LETTERS]
PAD, EQUALS, FIRST_LETTER = 0, 1, 2
MIN_LETTERS, MAX_LETTERS = 3, 10
MAX_TOKENS = 2 * MAX_LETTERS + 1  # the string, "=", and as many letters again


def encode(text: str) -> list[int]:
    """Tokens of a prompt such as ``"abc="``."""
    return [EQUALS if c == "=" else FIRST_LETTER + LETTERS.index(c) for c in text]


def make_prompt(seed: int, number: int, most_letters: int = MAX_LETTERS) -> list[int]:
    """Prompt ``number`` of the run with this seed: always the same, so that a resumed run goes on with it."""
    rng = random.Random(f"{seed}/{number}")
    letters = rng.choices(LETTERS, k=rng.randint(MIN_LETTERS, most_letters))
    return encode("".join(letters) + "=")


def response_length(prompt: list[int]) -> int:
    """An answer is as long as the string that it turns around."""
    return len(prompt) - 1


def reward(prompt: list[int], response: list[int]) -> float:
    """The share of the answer's letters that stand in their place: 0.0 to 1.0."""
    answer = prompt[-2::-1]
    return sum(got == want for got, want in zip(response, answer, strict=True)) / len(answer)
