"""rlplane.integrations.trl: what TRL's trainer and rollout processes see of it, on the memory engine."""

from __future__ import annotations

import inspect
import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import torch

from rlplane import DataPlaneClient, build_data_plane_client, load_config
from rlplane.integrations.trl import (
    Completion,
    PlaneRolloutWorker,
    PlaneWeightTransfer,
    ServerGeneration,
    run_rollouts,
)
from rlplane.integrations.trl.weights import newer_weights

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
DATASET = [{"prompt": "one", "answer": "1"}, {"prompt": "two", "answer": "2"}]
WAIT_S = 60.0


@pytest.fixture
def plane(request: pytest.FixtureRequest) -> Iterator[DataPlaneClient]:
    with build_data_plane_client(load_config("local", {"controller_address": request.node.name})) as client:
        yield client


def make_worker(plane: DataPlaneClient, **changes: Any) -> PlaneRolloutWorker:
    return PlaneRolloutWorker(plane, DATASET, **{"num_generations": 2, "max_groups": 3, **changes})


def generate(prompt: str, count: int) -> list[Completion]:
    """The member's number as a completion of as many tokens and one."""
    return [Completion([7, 8], [9] * (n + 1), [-0.5] * (n + 1), str(n)) for n in range(count)]


def matches(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(content == wanted) for content, wanted in zip(completions, answer, strict=True)]


@contextmanager
def rolling_out(plane: DataPlaneClient, *rewards: Any, **how: Any) -> Iterator[None]:
    thread = threading.Thread(target=run_rollouts, args=(plane, generate, rewards or [matches]), kwargs=how)
    thread.start()
    try:
        yield
    finally:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def next_group(worker: PlaneRolloutWorker, size: int = 2) -> list[Any]:
    return [worker.rollout_buffer.get(timeout=WAIT_S) for _ in range(size)]


def test_the_trainer_gets_scored_groups_of_every_prompt(plane: DataPlaneClient) -> None:
    worker = make_worker(plane)
    plane.advance_version("trl", 5)
    worker.start()
    with rolling_out(plane):
        groups = [next_group(worker) for _ in range(4)]
        worker.stop()
    assert [[sample.group_id for sample in group] for group in groups] == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert [group[0].prompt for group in groups] == ["one", "two", "one", "two"]
    zero, one = groups[0]  # the answer to "one" is what the second member says
    assert one.input_ids.tolist() == [7, 8, 9, 9]
    assert one.completion_mask.tolist() == [0, 0, 1, 1]
    assert one.old_log_probs.tolist() == [0.0, 0.0, -0.5, -0.5]
    assert [zero.advantage, one.advantage] == pytest.approx([-1.0, 1.0], abs=1e-6)
    assert (zero.model_version, one.completion) == (5, "1")
    assert one.metrics == {"reward": 1.0, "reward_std": 0.5, "rewards/matches": 1.0}
    assert [sample.advantage for sample in groups[1]] == [0.0, 0.0]


def test_stopping_ends_the_rollout_processes_and_leaves_nothing(plane: DataPlaneClient) -> None:
    worker = make_worker(plane)
    worker.start()
    with rolling_out(plane):
        next_group(worker)
        worker.stop()
    assert plane.count("trl") == 0


def test_rollouts_are_not_further_ahead_than_they_may_be(plane: DataPlaneClient) -> None:
    worker = make_worker(plane, max_groups=3)
    worker.start()
    with rolling_out(plane):
        deadline = time.monotonic() + WAIT_S
        while plane.partition_status("trl")["fields"]["input_ids"]["produced"] < 4:
            assert time.monotonic() < deadline
            assert plane.count("trl") <= 6
            time.sleep(0.01)
        worker.stop()


def test_a_group_that_got_too_old_is_given_up(plane: DataPlaneClient) -> None:
    worker = make_worker(plane, max_staleness=1)
    worker.update_model_version(1)
    worker.start()
    with rolling_out(plane):
        first = next_group(worker)
        worker.update_model_version(9)
        found = next_group(worker)
        while found[0].model_version != 9:  # at most those that had been taken out of the plane already
            assert found[0].group_id <= first[0].group_id + 2
            found = next_group(worker)
        worker.stop()


def test_several_rewards_are_added_and_a_completion_without_any_has_no_advantage(
    plane: DataPlaneClient,
) -> None:
    async def of_two(completions: Sequence[str], **_: Any) -> list[float | None]:
        return [None if content == "2" else float(content) for content in completions]

    def of_three(completions: Sequence[str], **_: Any) -> list[float | None]:
        return [1.0, 2.0, None]

    worker = make_worker(plane, num_generations=3)
    worker.start()
    with rolling_out(plane, of_two, of_three):
        group = next_group(worker, 3)
        worker.stop()
    assert [sample.metrics["reward"] for sample in group[:2]] == [1.0, 3.0]
    assert math.isnan(group[2].metrics["reward"])
    assert [sample.advantage for sample in group] == pytest.approx([-1.0, 1.0, 0.0], abs=1e-6)


def test_a_worker_that_nobody_rolls_out_for_is_not_healthy(plane: DataPlaneClient) -> None:
    worker = make_worker(plane)
    worker.start()
    worker.check_health(WAIT_S)
    with pytest.raises(RuntimeError, match="does a process call run_rollouts"):
        worker.check_health(-1.0)
    worker.stop()


def test_a_worker_that_failed_says_why(plane: DataPlaneClient) -> None:
    worker = PlaneRolloutWorker(plane, [{"prompt": object()}], num_generations=2)
    worker.start()
    assert worker._thread is not None
    worker._thread.join(WAIT_S)
    with pytest.raises(RuntimeError, match="has failed") as failure:
        worker.check_health(WAIT_S)
    assert isinstance(failure.value.__cause__, TypeError)
    worker.stop()


def test_a_dataset_that_cannot_be_repeated_is_refused(plane: DataPlaneClient) -> None:
    worker = PlaneRolloutWorker(plane, iter(DATASET), num_generations=2)
    worker.start()
    assert worker._thread is not None
    worker._thread.join(WAIT_S)
    with pytest.raises(RuntimeError, match="has failed") as failure:
        worker.check_health(WAIT_S)
    assert "only once" in str(failure.value.__cause__)
    worker.stop()


def test_rollout_processes_load_the_newest_weights_before_the_next_prompt(plane: DataPlaneClient) -> None:
    loaded: list[dict[str, torch.Tensor]] = []
    transfer = PlaneWeightTransfer(plane)
    transfer.init_weight_transfer()
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    for scale in (1, 2, 3):
        transfer.pause()
        transfer.send_weights(iter([("w", weight * scale)]))
        transfer.resume()
    assert plane.list_sample_ids("trl.weights") == ["v2", "v3"]
    worker = make_worker(plane)
    worker.start()
    with rolling_out(plane, load_weights=loaded.append):
        assert next_group(worker)[0].model_version == 3
        worker.stop()
    assert len(loaded) == 1
    assert torch.equal(loaded[0]["w"], 3 * torch.ones(2, dtype=torch.bfloat16))
    assert newer_weights(plane, "trl", than=3) is None
    transfer.destroy()
    assert newer_weights(plane, "trl", than=0) is None


def test_too_few_completions_are_refused(plane: DataPlaneClient) -> None:
    worker = make_worker(plane)
    worker.start()
    with pytest.raises(ValueError, match="1 completions; 2 were asked for"):
        run_rollouts(plane, lambda prompt, count: generate(prompt, 1), matches)
    worker.stop()


class Tokenizer:
    """One token per letter."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def test_a_server_generates_from_token_ids_and_returns_them() -> None:
    asked: list[Any] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            choice = {"token_ids": [104, 105], "logprobs": {"token_logprobs": [-1.0, -2.0]}}
            body = json.dumps({"choices": [choice] * asked[0][1]["n"]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        completions = ServerGeneration(url, "m", Tokenizer(), max_tokens=4, seed=3)("ab", 2)
        server.shutdown()
    (path, body) = asked[0]
    assert path == "/v1/completions"
    assert (body["prompt"], body["n"], body["max_tokens"], body["seed"]) == ([97, 98], 2, 4, 3)
    assert completions == [Completion([97, 98], [104, 105], [-1.0, -2.0], "hi")] * 2
    with pytest.raises(ValueError, match="no token of the prompt ''"):
        ServerGeneration(url, "m", Tokenizer(), max_tokens=4)("", 2)


def test_they_have_the_methods_that_trl_calls() -> None:
    from trl.experimental.async_grpo import async_grpo_trainer as theirs

    for ours, protocol in (
        (PlaneRolloutWorker, theirs.RolloutWorkerProtocol),
        (PlaneWeightTransfer, theirs.WeightTransferProtocol),
    ):
        for name, method in inspect.getmembers(protocol, inspect.isfunction):
            if not name.startswith("_"):
                expected = list(inspect.signature(method).parameters)
                assert list(inspect.signature(getattr(ours, name)).parameters) == expected, name
