"""A character-level transformer, how to sample from it, and the log-probabilities of what was sampled."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlplane.demo.problem import EQUALS, MAX_LETTERS, MAX_TOKENS, PAD, VOCABULARY, response_length

WIDTH, LAYERS, HEADS = 128, 3, 4
EMBEDDING_SPREAD = 0.5  # wide enough that attention tells places apart from the first step on


class Block(nn.Module):
    """Attention and a feed-forward layer. ``cache`` holds the keys and values of earlier tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor, cache: list[Tensor] | None) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
            cache[:] = [k, v]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Policy(nn.Module):
    """``forward`` gives the logits of every next token."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(VOCABULARY), width)
        self.places = nn.Embedding(MAX_TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(VOCABULARY))
        nn.init.normal_(self.tokens.weight, std=EMBEDDING_SPREAD)
        nn.init.normal_(self.places.weight, std=EMBEDDING_SPREAD)

    def forward(
        self, tokens: Tensor, places: Tensor, mask: Tensor, caches: list[list[Tensor]] | None = None
    ) -> Tensor:
        x = self.tokens(tokens) + self.places(places)
        for i, block in enumerate(self.blocks):
            x = block(x, mask, None if caches is None else caches[i])
        logits: Tensor = self.head(self.norm(x))
        return logits


def token_logprobs(policy: Policy, tokens: Tensor) -> Tensor:
    """Log-probability of each token of right-padded rows given those before it; column 0 is 0."""
    seen = tokens[:, :-1]
    causal = torch.ones(seen.shape[1], seen.shape[1], dtype=torch.bool).tril()
    logits = policy(seen, places_of(seen), causal)
    picked = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return F.pad(picked, (1, 0))


def places_of(tokens: Tensor) -> Tensor:
    """Places are counted so that the prompt's "=" is always at the same one, whatever its length."""
    equals = (tokens == EQUALS).int().argmax(1, keepdim=True)
    places = torch.arange(tokens.shape[1]) - equals + MAX_LETTERS
    return places.clamp(0, MAX_TOKENS - 1)  # only padding is beyond


@torch.no_grad()
def sample(
    policy: Policy, prompts: list[list[int]], generator: torch.Generator
) -> tuple[list[list[int]], list[list[float]]]:
    """One response for each prompt, with the log-probability of each of its tokens.

    Prompts are padded on the left, so that all rows write their next token into the same column, and the
    keys and values of earlier columns are kept.
    """
    longest = max(map(len, prompts))
    tokens = torch.tensor([[PAD] * (longest - len(p)) + p for p in prompts])
    real, places = tokens != PAD, places_of(tokens)
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    # A padding column attends to itself: a row of the mask with nothing in it would give NaN.
    mask = (causal & real[:, None, :]) | torch.eye(longest, dtype=torch.bool)
    caches: list[list[Tensor]] = [[] for _ in policy.blocks]
    logits = policy(tokens, places, mask[:, None], caches)[:, -1]
    lengths = [response_length(prompt) for prompt in prompts]
    columns: list[Tensor] = []
    scores: list[Tensor] = []
    for step in range(max(lengths)):
        if step:
            real = F.pad(real, (0, 1), value=True)
            place = torch.full_like(columns[-1], MAX_LETTERS + step)
            logits = policy(columns[-1], place, real[:, None, None, :], caches)[:, -1]
        logprobs = torch.log_softmax(logits, -1)
        columns.append(torch.multinomial(logprobs.exp(), 1, generator=generator))
        scores.append(logprobs.gather(1, columns[-1]))
    responses, logprobs_of = torch.cat(columns, 1).tolist(), torch.cat(scores, 1).tolist()
    return (
        [row[:n] for row, n in zip(responses, lengths, strict=True)],
        [row[:n] for row, n in zip(logprobs_of, lengths, strict=True)],
    )


def flatten(policy: Policy) -> Tensor:
    """All parameters as one vector: what goes through the plane when the weights are published."""
    return torch.cat([p.detach().reshape(-1) for p in policy.parameters()])


@torch.no_grad()
def unflatten(policy: Policy, vector: Tensor) -> None:
    """Set the parameters from what :func:`flatten` gave."""
    parameters = list(policy.parameters())
    pieces = torch.split(vector, [p.numel() for p in parameters])
    for parameter, values in zip(parameters, pieces, strict=True):
        parameter.copy_(values.view_as(parameter))
