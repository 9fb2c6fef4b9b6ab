"""Training steps that are marked: the share of the plane, and numbers of the user's own, in every view."""

from __future__ import annotations

import asyncio
import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tensordict import TensorDict

import rlplane
from rlplane.interfaces import DataPlaneConfig
from rlplane.metrics.events import EventBatch, StepOp, StepRecord
from rlplane.metrics.run_state import RunState
from rlplane.metrics.snapshot import MetricsSnapshot, SessionState, StepStat
from rlplane.observability import MetricsDataPlaneClient
from rlplane.report import Report, render_html, render_text
from rlplane.sinks import Record
from rlplane.sinks.prometheus import render
from rlplane.viewing.feed import FeedStatus
from rlplane.web.view import make_view

WAIT_S = 0.2


class Steps:
    """A sink that keeps the records of steps."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, records: Sequence[Record]) -> None:
        self.records += [record for record in records if record["kind"] in ("step", "log")]

    def close(self) -> None: ...


@pytest.fixture
def sink() -> Steps:
    return Steps()


def config(sink: Steps) -> DataPlaneConfig:
    cfg = rlplane.load_config("local", {"controller_address": f"steps-{uuid.uuid4().hex}"})
    cfg["observability"] = {"enabled": True, "callback": lambda event: None, "sinks": [sink]}
    return cfg


def client_of(sink: Steps) -> MetricsDataPlaneClient:
    client = rlplane.build_data_plane_client(config(sink))
    assert isinstance(client, MetricsDataPlaneClient)
    client.register_partition("p", ["x"], 100, ["train"])
    return client


def put(client: Any, *ids: str, tokens: int = 0) -> Any:
    fields = TensorDict({"x": torch.zeros(len(ids), 4)}, [len(ids)])
    return client.put_samples(list(ids), "p", fields, [{"input_lengths": tokens}] * len(ids))


def while_it_waits(client: Any, function: Callable[[], Any]) -> threading.Thread:
    """Call ``function`` when a claim has waited for ``WAIT_S``."""

    def run() -> None:
        while client.partition_status("p")["tasks"]["train"]["waiting"] == 0:
            time.sleep(0.001)
        time.sleep(WAIT_S)
        function()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_step_says_how_long_it_waited_in_the_plane_and_for_how_many_tokens(sink: Steps) -> None:
    with client_of(sink) as client:
        with client.step(7):
            producer = while_it_waits(client, lambda: put(client, "a", "b", tokens=30))
            client.claim_meta("p", "train", ["x"], 2)
            client.log({"reward": torch.tensor(0.5)})
        producer.join()
        assert client.flush()
    (record,) = sink.records
    values = record["values"]
    assert record["step"] == 7 and values["log/reward"] == 0.5
    assert values["step/waiting_share"] * values["step/seconds"] >= 0.9 * WAIT_S
    assert values["step/waiting_share"] <= values["step/plane_share"] <= 1.0
    assert values["step/claim_meta_share"] == pytest.approx(values["step/plane_share"])
    # The put of another thread is not part of the step, and has not held it up.
    assert "step/put_share" not in values
    assert values["step/tokens_per_s"] == pytest.approx(60 / values["step/seconds"])


def test_the_parts_of_a_step_add_up_to_its_time_in_the_plane(sink: Steps) -> None:
    with client_of(sink) as client:
        with client.step(0) as step:
            put(client, "a")
            client.get_data(client.claim_meta("p", "train", ["x"], 1))
            time.sleep(0.05)
            step.tokens = 100
        assert client.flush()
    values = sink.records[0]["values"]
    parts = sum(values[f"step/{part}_share"] for part in ("waiting", "round_trips", "bytes"))
    assert 0 < parts <= values["step/plane_share"] < 1
    assert values["step/tokens_per_s"] == pytest.approx(100 / values["step/seconds"])


def test_marks_divide_a_loop_into_steps_and_the_first_only_begins(sink: Steps) -> None:
    with client_of(sink) as client:
        for number in range(3):
            put(client, f"s{number}")
            client.mark_step(number)
        assert client.flush()
    assert [record["step"] for record in sink.records] == [1, 2]
    assert all(record["values"]["step/put_share"] > 0 for record in sink.records)


def test_a_step_that_raises_is_not_counted_and_a_log_outside_of_steps_is_kept(sink: Steps) -> None:
    with client_of(sink) as client:
        with pytest.raises(RuntimeError), client.step(1):
            raise RuntimeError("no step")
        client.log({"loss": 2})
        assert client.flush()
    assert [(record["kind"], record["values"]) for record in sink.records] == [("log", {"log/loss": 2.0})]


def test_what_is_no_number_or_no_step_is_named(sink: Steps) -> None:
    with client_of(sink) as client:
        with pytest.raises(ValueError, match=r"'text' is 'good' of type str"):
            client.log({"text": "good"})
        with pytest.raises(ValueError, match=r"not -1"):
            client.step(-1)


def test_without_observability_marking_steps_does_nothing() -> None:
    with rlplane.build_data_plane_client(rlplane.load_config("local")) as client:
        with client.step(1) as step:
            step.tokens = 3
        client.mark_step(2)
        client.log({"reward": 1.0})


def test_tasks_of_an_event_loop_have_steps_of_their_own(sink: Steps) -> None:
    async def run() -> None:
        async with rlplane.build_async_data_plane_client(config(sink)) as client:
            await client.register_partition("p", ["x"], 100, ["train"])

            async def trainer() -> None:
                with client.step(3):
                    await client.claim_meta("p", "train", ["x"], 1)

            training = asyncio.create_task(trainer())
            while (await client.partition_status("p"))["tasks"]["train"]["waiting"] == 0:
                await asyncio.sleep(0.001)
            await asyncio.sleep(WAIT_S)
            await put(client, "a")
            await training

    asyncio.run(run())
    (record,) = sink.records
    assert record["step"] == 3 and "step/put_share" not in record["values"]
    assert record["values"]["step/waiting_share"] * record["values"]["step/seconds"] >= 0.9 * WAIT_S


def a_run() -> MetricsSnapshot:
    """Two steps of ten seconds: 3 s and 5 s in claims, all but one second of each spent waiting."""
    state = RunState("run")
    records = [
        StepRecord(
            number,
            state.started_ns + number * 10**9,
            10.0,
            {"claim_meta": StepOp(2, spent, spent - 1, 0.75, 0.25)},
            4000,
            {"reward": 0.1 * number},
        )
        for number, spent in ((1, 3.0), (2, 5.0))
    ]
    batch = EventBatch(worker="w", pid=1, host="h", seq=1, sent_ns=0, events=list(records))
    state.add_batch(batch)
    try:
        return state.snapshot(SessionState.COMPLETE)
    finally:
        state.close()


def test_the_steps_of_a_run_add_up_by_operation() -> None:
    totals = a_run().step_totals
    assert (totals.count, totals.tokens_per_s, totals.share()) == (2, 400.0, 0.4)
    assert [totals.share(part) for part in ("waiting_s", "round_trips_s", "bytes_s")] == [0.3, 0.075, 0.025]
    (op,) = totals.ops
    assert (op.op, op.count, op.seconds) == ("claim_meta", 4, 8.0)


def test_the_report_has_the_share_of_the_steps_and_what_was_logged() -> None:
    report = Report.from_snapshot(a_run())
    text = render_text(report)
    assert "Training steps: 2, of 10 s each; 40% of it in the plane (waiting 30%, round trips 7.5%" in text
    assert "400 tokens/s" in text and "Logged last: reward 0.2" in text
    page = render_html(report)
    assert "Share of the step in the plane" in page and ">reward<" in page


def test_prometheus_has_the_time_of_the_steps_by_operation_and_what_was_logged() -> None:
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(render(a_run)[0].decode())
        for sample in family.samples
        if sample.name.startswith(("rlplane_step", "rlplane_logged"))
    }
    assert found == {
        ("rlplane_steps_total",): 2,
        ("rlplane_step_seconds_total",): 20,
        ("rlplane_step_tokens_total",): 8000,
        ("rlplane_step_number",): 2,
        ("rlplane_step_operations_total", "claim_meta"): 4,
        ("rlplane_step_plane_seconds_total", "claim_meta"): 8,
        ("rlplane_step_waiting_seconds_total", "claim_meta"): 6,
        ("rlplane_step_round_trips_seconds_total", "claim_meta"): 1.5,
        ("rlplane_step_bytes_seconds_total", "claim_meta"): 0.5,
        ("rlplane_logged_value", "reward"): 0.2,
    }


def test_of_many_names_that_are_logged_prometheus_has_the_newest() -> None:
    run = a_run()
    run.steps = [StepStat(None, 0.0, scalars={f"at step {number}": 1.0}) for number in range(1000)]
    names = re.findall(r'rlplane_logged_value{name="at step (\d+)"}', render(lambda: run)[0].decode())
    assert sorted(map(int, names)) == list(range(800, 1000))


def test_the_page_gets_the_share_of_the_steps_and_what_was_logged() -> None:
    steps = make_view(a_run(), FeedStatus("live", "live"))["steps"]
    assert steps["last"] == 2 and steps["scalars"] == ["reward"]
    assert steps["totals"]["plane"] == 0.4 and steps["totals"]["waiting"] == 0.3
    assert [point["waiting"] for point in steps["points"]] == [0.2, 0.4]
