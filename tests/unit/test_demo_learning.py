"""The mathematics of the GRPO demo: its loss, its sampling, its sharded gradient step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlplane import DataPlaneClient, KVBatchMeta, build_data_plane_client, load_config
from rlplane.demo.loss import group_advantages, grpo_loss
from rlplane.demo.model import Policy, flatten, sample, token_logprobs, unflatten
from rlplane.demo.problem import PAD, VOCABULARY, encode, make_prompt, response_length, reward
from rlplane.demo.settings import ROLLOUTS, SCORED, Settings, claim_groups, register_partitions
from rlplane.demo.stages import group_spread, prompt_number, rollout, score
from rlplane.demo.trainer import Trainer


@pytest.fixture
def client() -> Iterator[DataPlaneClient]:
    with build_data_plane_client(load_config("local")) as client:
        yield client


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def tiny_case() -> dict[str, Any]:
    torch.manual_seed(3)
    shape = (4, 5)
    mask = torch.tensor(
        [[0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]], dtype=torch.float64
    )
    return {
        "logprobs": (-torch.rand(shape, dtype=torch.float64)).requires_grad_(),
        "previous": -torch.rand(shape, dtype=torch.float64),
        "generated": -torch.rand(shape, dtype=torch.float64),
        "reference": -torch.rand(shape, dtype=torch.float64),
        "advantages": torch.tensor([1.5, -0.5, -2.0, 1.0], dtype=torch.float64),
        "mask": mask,
    }


def test_the_loss_and_its_gradient_are_those_of_the_formula_worked_out_by_hand() -> None:
    case = tiny_case()
    clip, kl_weight, most = 0.2, 0.1, 1.2
    loss = grpo_loss(**case, clip=clip, kl_weight=kl_weight, max_importance=most)
    loss.backward()
    total, gradient, tokens = 0.0, torch.zeros(4, 5, dtype=torch.float64), case["mask"].sum().item()
    clipped = 0
    for row in range(4):
        gain = case["advantages"][row].item()
        for place in range(5):
            if not case["mask"][row, place]:
                continue
            now, before, born, ref = (
                case[key][row, place].item() for key in ("logprobs", "previous", "generated", "reference")
            )
            ratio = torch.tensor(now - before).double().exp().item()
            weight = min(torch.tensor(before - born).double().exp().item(), most)
            is_clipped = (gain > 0 and ratio > 1 + clip) or (gain < 0 and ratio < 1 - clip)
            clipped += is_clipped
            kept = (1 + clip if gain > 0 else 1 - clip) if is_clipped else ratio
            pull = torch.tensor(ref - now).double().exp().item()
            total += kl_weight * (pull - (ref - now) - 1) - weight * kept * gain
            gradient[row, place] = kl_weight * (1 - pull) - (0.0 if is_clipped else weight * ratio * gain)
    assert 0 < clipped < tokens  # both branches were there
    assert loss.item() == pytest.approx(total / tokens, rel=1e-6)
    assert torch.allclose(grad_of(case["logprobs"]), gradient / tokens, rtol=1e-6)


def test_the_gradient_agrees_with_finite_differences() -> None:
    case = tiny_case()
    rest = {key: value for key, value in case.items() if key != "logprobs"}
    assert torch.autograd.gradcheck(lambda x: grpo_loss(x, **rest), case["logprobs"])


def test_only_the_trained_policy_gets_a_gradient_and_only_at_response_tokens() -> None:
    case = tiny_case()
    grpo_loss(**case).backward()
    assert (grad_of(case["logprobs"])[case["mask"] == 0] == 0).all()


def test_advantages_are_centred_in_each_group_and_keep_its_order() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5, 0.2, 0.2, 0.2, 0.6])
    groups = group_advantages(rewards, 4).view(2, 4)
    assert torch.allclose(groups.mean(1), torch.zeros(2), atol=1e-6)
    assert groups[0, 1] > groups[0, 2] > groups[0, 0]
    assert groups.std(1, unbiased=False).tolist() == pytest.approx([1.0, 1.0], abs=1e-2)


def test_a_group_of_equal_rewards_has_a_spread_of_exactly_zero() -> None:
    assert group_spread([0.1] * 4 + [0.1, 0.1, 0.1, 0.3], 4)[:4] == [0.0] * 4
    assert group_spread([0.1] * 4 + [0.1, 0.1, 0.1, 0.3], 4)[4] > 0


def test_reward_counts_the_letters_that_stand_in_their_place() -> None:
    prompt = encode("abcd=")
    assert reward(prompt, encode("dcba")) == 1.0
    assert reward(prompt, encode("dcab")) == 0.5
    assert reward(prompt, encode("abcd")) == 0.0


def test_the_same_prompt_comes_for_the_same_seed_and_number() -> None:
    assert make_prompt(1, 7) == make_prompt(1, 7) != make_prompt(2, 7)
    assert all(PAD not in make_prompt(0, n) for n in range(50))


def test_sampling_with_cache_and_padding_gives_the_log_probabilities_of_a_full_forward_pass() -> None:
    torch.manual_seed(0)
    policy = Policy()
    prompts = [make_prompt(0, n) for n in range(24)]
    assert len({len(p) for p in prompts}) > 2
    responses, scores = sample(policy, prompts, torch.Generator().manual_seed(1))
    assert [len(r) for r in responses] == [response_length(p) for p in prompts]
    rows = [torch.tensor(p + r) for p, r in zip(prompts, responses, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    full = token_logprobs(policy, padded)
    for row, (prompt, score_row) in enumerate(zip(prompts, scores, strict=True)):
        end = len(prompt) + len(score_row)
        assert torch.allclose(full[row, len(prompt) : end], torch.tensor(score_row), atol=1e-5)


def test_a_response_of_one_row_does_not_depend_on_what_else_is_in_the_batch() -> None:
    torch.manual_seed(0)
    policy = Policy()
    short, long = encode("abc="), encode("abcdefgh=")
    rows = [torch.tensor(p + p[-2::-1]) for p in (short, long)]
    alone = token_logprobs(policy, rows[0][None])[0]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    assert torch.allclose(token_logprobs(policy, padded)[0, : len(rows[0])], alone, atol=1e-5)


def test_weights_survive_the_way_through_a_vector() -> None:
    one, two = Policy(), Policy()
    unflatten(two, flatten(one))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert 200_000 < flatten(one).numel() < 900_000
    assert len(VOCABULARY) == one.head.out_features


def rolled_out(client: DataPlaneClient, settings: Settings) -> Trainer:
    """A plane with scored groups in it, and the trainer that fed it."""
    register_partitions(client, settings)
    trainer = Trainer(client, settings)
    trainer.start()
    for stage in (rollout, score):
        stage(client, settings, stage.__name__, partial(next, iter([False] * 6), True))
    return trainer


def test_the_gradient_step_is_the_same_for_one_rank_and_for_three(client: DataPlaneClient) -> None:
    settings = Settings(groups_per_step=4, group_size=4)
    trainer = rolled_out(client, settings)
    batch = claim_groups(client, settings, "train", SCORED, 4)
    assert batch.size == 16
    start = flatten(trainer.policy).clone()
    after = []
    for dp_world in (1, 3):
        unflatten(trainer.policy, start)
        trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), lr=1.0)
        trainer.settings = Settings(groups_per_step=4, group_size=4, dp_world=dp_world)
        trainer.learn(batch)
        after.append(flatten(trainer.policy).clone())
    assert not torch.equal(after[0], start)
    assert torch.allclose(after[0], after[1], atol=1e-5)


def test_a_step_drops_flat_and_stale_groups_by_their_tags_and_counts_every_sample(
    client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(groups_per_step=4, group_size=4, max_staleness=1)
    trainer = rolled_out(client, settings)
    everything = client.list_sample_ids(ROLLOUTS)
    flat, stale = everything[:4], everything[4:8]
    client.put_samples(flat, ROLLOUTS, None, [{"reward_std": 0.0}] * 4)
    client.put_samples(stale, ROLLOUTS, None, [{"weight_version": -5, "reward_std": 0.3}] * 4)
    read: list[str] = []
    plain = client.get_data

    def get_data(meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        read.extend(meta.sample_ids)
        return plain(meta, select_fields)

    monkeypatch.setattr(client, "get_data", get_data)
    line = trainer.step(lambda: False)
    assert line is not None and line["step"] == 1 and line["trained"] == 16
    assert flat[0] in line["dropped"]["no reward variance"]
    assert line["dropped"]["too old"] == [stale[0]]
    assert not {*flat, *stale} & set(read)
    assert set(client.list_sample_ids(ROLLOUTS)) == trainer.counts.in_flight
    counts = trainer.counts
    assert sum(counts.cleared.values()) + len(counts.in_flight) == counts.written
    # The prompt of what was too old is issued again, under a name that late writers do not know.
    assert counts.written == 4 * (counts.prompts + 1) and "p1.1_g0" in counts.in_flight


def test_the_books_refuse_a_sample_that_comes_twice(client: DataPlaneClient) -> None:
    trainer = rolled_out(client, Settings(groups_per_step=1, group_size=2))
    some = sorted(trainer.counts.in_flight)[:2]
    trainer.counts.clear(some, "trained")
    with pytest.raises(RuntimeError, match="came twice or were never written"):
        trainer.counts.clear(some, "trained")


def trained_by(lines: list[dict[str, Any] | None]) -> list[str]:
    return [name for line in lines if line is not None for name in line["groups"]]


def test_a_trainer_goes_on_with_what_is_in_the_plane(client: DataPlaneClient) -> None:
    settings = Settings(groups_per_step=2, group_size=4)
    trainer = rolled_out(client, settings)
    trainer.step(lambda: False)
    trainer.save()
    other = Trainer(client, settings)
    other.start()
    assert other.version == trainer.version == 1 and other.line == trainer.line
    assert other.counts == trainer.counts
    assert torch.equal(flatten(other.policy), flatten(trainer.policy))
    for one, two in zip(trainer.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        assert torch.equal(one["exp_avg"], two["exp_avg"])


# Every call of a step after which the plane may have been saved, and the job killed.
MOMENTS = ["claim_meta", "put_samples", "get_data", "advance_version", "clear_samples", "evicted_meta"]


@pytest.mark.parametrize("policy", ["windowed", "in_order"])
def test_whenever_the_plane_was_saved_a_trainer_goes_on_with_every_prompt_once(
    client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: str
) -> None:
    settings = Settings(groups_per_step=4, group_size=4, max_staleness=1, policy=policy)
    trainer = rolled_out(client, settings)
    saved: list[Path] = []

    def then_save(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **how: Any) -> Any:
            result = call(*args, **how)
            saved.append(tmp_path / str(len(saved)))
            client.save_checkpoint(str(saved[-1]))
            return result

        return called

    lines = [trainer.step(lambda: False)]
    if policy == "windowed":
        stale = next(i for i in client.list_sample_ids(ROLLOUTS) if i.endswith("_g0"))[:-1]
        client.put_samples([f"{stale}{n}" for n in range(4)], ROLLOUTS, None, [{"weight_version": -1}] * 4)
    for moment in MOMENTS:
        monkeypatch.setattr(client, moment, then_save(getattr(client, moment)))
    lines.append(trainer.step(lambda: False))
    monkeypatch.undo()
    assert len(saved) > len(MOMENTS)
    for path in saved:
        client.load_checkpoint(str(path), release_claims=True)
        other = Trainer(client, settings)
        other.start()
        counts = other.counts
        assert set(client.list_sample_ids(ROLLOUTS)) == counts.in_flight
        assert sum(counts.cleared.values()) + len(counts.in_flight) == counts.written
        used = [prompt_number(name) for name in trained_by(lines[: other.version])]
        used += [
            prompt_number(name)
            for line in lines[: other.version]
            for name in (line or {})["dropped"]["no reward variance"]
        ]
        there = [prompt_number(name) for name in counts.in_flight if name.endswith("_g0")]
        again = [prompt_number(name) for name in other.again]
        assert sorted([*used, *there, *again]) == list(range(counts.prompts))
        if policy == "in_order":
            # What was used counts as admitted, so that what was admitted for later steps is not late.
            begun = {i.partition("_")[0] for i in client.peek_meta(ROLLOUTS, fields=["input_ids"]).sample_ids}
            admitted = client.partition_status(ROLLOUTS)["flow"]["admitted"]
            assert admitted == other.version * settings.groups_per_step + len(begun)
