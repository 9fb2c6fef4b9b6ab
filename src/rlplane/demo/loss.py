"""GRPO in plain torch: advantages from a group's own rewards, a clipped ratio, a pull to the reference.

Samples may be a few weight versions old, so three policies meet in the loss (the decoupled form of PPO): the
one that *generated* the tokens, the *previous* one that the step starts from, and the one that is trained.
The ratio that is clipped is trained / previous; previous / generated is a plain importance weight, cut off.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """How much better each sample is than its group, in units of the group's spread."""
    groups = rewards.view(-1, group_size)
    spread = groups.std(1, keepdim=True, unbiased=False)
    return ((groups - groups.mean(1, keepdim=True)) / (spread + 1e-4)).view(-1)


def grpo_loss(
    logprobs: Tensor,
    previous: Tensor,
    generated: Tensor,
    reference: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.2,
    kl_weight: float = 0.01,
    max_importance: float = 2.0,
) -> Tensor:
    """Mean over the response tokens (``mask``) of the clipped objective plus the pull to the reference.

    All but ``advantages`` (one per row) have one value per token. Only ``logprobs`` gets a gradient.
    """
    ratio = (logprobs - previous).exp()
    weight = (previous - generated).exp().clamp(max=max_importance)
    gain = advantages[:, None]
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    # The k3 estimator of KL(trained || reference): never negative, and unbiased.
    gap = reference - logprobs
    kl = gap.exp() - gap - 1
    return ((kl_weight * kl - weight * surrogate) * mask).sum() / mask.sum()
