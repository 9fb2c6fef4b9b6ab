"""Which stage holds a run up, and what else is wrong with it."""

import msgspec
import pytest
from tests.simulated_run import SimulatedRun

from rlplane.metrics.snapshot import (
    CounterStat,
    MetricsSnapshot,
    PartitionStat,
    SessionState,
    TaskStat,
    WorkerStat,
)
from rlplane.viewing.flow import PRODUCERS, flows, partition_flow
from rlplane.viewing.health import findings, health


def snapshot_of(*tasks: TaskStat, write_rate: float = 100.0) -> MetricsSnapshot:
    return MetricsSnapshot(
        run_id="run",
        state=SessionState.LIVE,
        seq=1,
        time_ns=0,
        monotonic_ns=0,
        metrics=[CounterStat("samples_written", 1000, {"partition": "p"}, write_rate)],
        partitions=[PartitionStat("p", samples=500, tasks=list(tasks))],
    )


def holdup(*tasks: TaskStat) -> str | None:
    picture = partition_flow(snapshot_of(*tasks), "p")
    assert picture is not None
    return picture.holdup


def test_the_task_before_which_samples_pile_up_holds_everything_up() -> None:
    assert holdup(
        TaskStat("reward", 3, 400, 0), TaskStat("logprob", 390, 10, 0), TaskStat("train", 0, 10, 2)
    ) == ("logprob")


def test_a_task_whose_claims_wait_is_starved_and_not_to_blame() -> None:
    assert holdup(TaskStat("reward", 400, 0, 0), TaskStat("train", 400, 0, 1)) == "reward"


def test_of_tasks_with_the_same_backlog_the_first_is_named() -> None:
    assert holdup(TaskStat("logprob", 400, 0, 0), TaskStat("train", 410, 0, 0)) == "logprob"


def test_producers_hold_everything_up_when_every_task_waits() -> None:
    assert holdup(TaskStat("reward", 0, 9, 1), TaskStat("train", 0, 9, 2)) == PRODUCERS


def test_a_backlog_of_less_than_a_second_is_no_holdup() -> None:
    assert holdup(TaskStat("reward", 60, 9, 0), TaskStat("train", 0, 9, 1)) is None


def test_tasks_that_wait_for_the_rest_of_a_batch_wait_for_the_producers() -> None:
    assert holdup(TaskStat("reward", 3, 9, 1, wanted=8), TaskStat("train", 0, 9, 2, wanted=8)) == PRODUCERS


def test_a_task_that_waits_for_admission_does_not_wait_for_the_producers() -> None:
    assert holdup(TaskStat("rollout", 64, 9, 1, wanted=8), TaskStat("train", 0, 9, 2, wanted=8)) is None


def chain(**ready: int) -> list[TaskStat]:
    """Three tasks, each of which needs what the one before writes; registered in another order."""
    needs = {"train": "logprobs", "rollout": "prompt", "logprob": "tokens"}
    writes = {"train": [], "rollout": ["tokens"], "logprob": ["logprobs", "tokens"]}
    return [
        TaskStat(task, ready.get(task, 0), 0, int(task not in ready), [field], "", writes[task], 8)
        for task, field in needs.items()
    ]


def test_stages_come_in_the_order_in_which_the_data_passes_them() -> None:
    picture = partition_flow(snapshot_of(*chain()), "p")
    assert picture is not None
    assert [(task.task, task.stage, task.after) for task in picture.tasks] == [
        ("rollout", 0, []),
        ("logprob", 1, ["rollout"]),
        ("train", 2, ["logprob"]),
    ]


@pytest.mark.parametrize("slow", ["rollout", "logprob", "train"])
def test_the_slow_stage_of_a_chain_is_named_wherever_it_is(slow: str) -> None:
    assert holdup(*chain(**{slow: 300})) == slow


def test_tasks_that_need_each_others_fields_still_have_a_place() -> None:
    tasks = [TaskStat("a", 0, 0, 0, ["x"], "", ["y"]), TaskStat("b", 0, 0, 0, ["y"], "", ["x"])]
    picture = partition_flow(snapshot_of(*tasks), "p")
    assert picture is not None and {task.task for task in picture.tasks} == {"a", "b"}


def test_an_engine_that_reports_nothing_is_not_judged() -> None:
    assert holdup(TaskStat("train", None, 9, None)) is None


def test_rates_of_a_flow_are_those_of_its_counters() -> None:
    snapshot = SimulatedRun(slow_task="logprob").step()
    picture = partition_flow(snapshot, "rollouts")
    assert picture is not None
    assert picture.write_rate == pytest.approx(snapshot.rate("samples_written", partition="rollouts"))
    by_task = {task.task: task.rate for task in picture.tasks}
    assert by_task["reward"] == pytest.approx(
        snapshot.rate("samples_claimed", partition="rollouts", task="reward")
    )
    assert partition_flow(snapshot, "nobody") is None
    assert len(flows(snapshot)) == 2


def test_a_quiet_run_is_healthy() -> None:
    assert findings(SimulatedRun(capacity_samples=None).step()) == []
    assert health([]) == "ok"


def test_failures_that_go_on_are_an_error_and_past_ones_a_warning() -> None:
    snapshot = SimulatedRun().step()
    failing = msgspec.structs.replace(
        snapshot, metrics=[*snapshot.metrics, CounterStat("op_failures", 1, {"op": "put"}, 2.0)]
    )
    past = msgspec.structs.replace(
        snapshot, metrics=[*snapshot.metrics, CounterStat("op_failures", 3, {"op": "put"}, 0.0)]
    )
    assert (health(findings(failing)), findings(failing)[0].text) == (
        "error",
        "1 operation failed, 2 per second now",
    )
    assert (health(findings(past)), findings(past)[0].text) == ("warning", "3 operations failed")


def test_a_partition_that_is_nearly_full_is_named() -> None:
    snapshot = snapshot_of()
    snapshot.partitions[0] = PartitionStat("p", samples=95, capacity_samples=100)
    assert [finding.text for finding in findings(snapshot)] == ["p is nearly full: 95% of its capacity"]


def test_silent_workers_lost_events_and_an_interrupted_end_are_found() -> None:
    snapshot = snapshot_of()
    snapshot.workers = [WorkerStat("w1", 1, "h", state="silent")]
    snapshot.metrics.append(CounterStat("events_dropped", 7))
    texts = [finding.text for finding in findings(snapshot)]
    assert texts == ["no sign of 1 worker: w1", "events dropped by workers: 7"]
    snapshot.state, snapshot.partitions = SessionState.INTERRUPTED, [PartitionStat("p", never_cleared=4)]
    texts = [finding.text for finding in findings(snapshot)]
    assert texts[0] == "the run was interrupted"
    assert "never cleared: 4 samples" in texts
