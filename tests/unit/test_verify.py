"""``observability: {verify: true}``: bytes that changed in storage are noticed, counted and named."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import rlplane
from rlplane.metrics.events import EventBatch, RowChecks
from rlplane.metrics.run_state import RunState
from rlplane.metrics.snapshot import SessionState
from rlplane.observability import MetricsDataPlaneClient
from rlplane.report import Report, render_text
from rlplane.storage.memory import MemoryStore
from rlplane.viewing.health import findings

IDS = [f"s{row}" for row in range(4)]
MARK = 0x5A17C0DE5A17C0DE  # in no other bytes of a plane
ENUMS = {"kind": ["good", "bad"]}


def settings(engine: str, *, verify: bool = True, address: str | None = None) -> dict[str, Any]:
    exemplar = {"memory": "local", "shm": "shm"}[engine]
    watched = {"observability.enabled": True, "observability.verify": verify}
    small = {"global_segment_size": 2**24, "local_buffer_size": 2**20}  # the tests look through all of it
    cfg = rlplane.load_config(exemplar, {**watched, **small})
    events: list[Any] = []
    cfg["observability"] |= {"callback": events.append, "metrics_address": "off"}
    if address is not None:
        cfg["controller_address"] = address
    return dict(cfg)


@pytest.fixture(params=["memory", "shm"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(engine: str) -> Iterator[MetricsDataPlaneClient]:
    with rlplane.build_data_plane_client(settings(engine)) as client:
        assert isinstance(client, MetricsDataPlaneClient)
        client.register_partition("p", list(rows_of_every_kind().keys()), 4, ["train"], enums=ENUMS)
        yield client


def rows_of_every_kind() -> TensorDict:
    image = torch.rand(3, 5).to(torch.bfloat16)
    trees = [{"image": image, "grid": torch.full((1, row), MARK), "note": "x"} for row in range(4)]
    stacked = [NonTensorData(tree, batch_size=[]) for tree in trees]
    jagged = torch.nested.nested_tensor([torch.full((n,), MARK) for n in range(4)], layout=torch.jagged)
    ragged = torch.nested.nested_tensor([torch.rand(n + 1, 4 - n) for n in range(4)])
    return TensorDict(
        {
            "dense": torch.full((4, 3), MARK),
            "turned": torch.rand(4, 3, 2).transpose(1, 2),
            "scalar": torch.arange(4.0),
            "jagged": jagged,
            "ragged": ragged,
            "text": NonTensorStack("a", "", "c", "d"),
            "arrays": NonTensorStack(*[NonTensorData(np.arange(2000 + n), batch_size=[]) for n in range(4)]),
            "trees": NonTensorStack(*stacked),
            "inner": TensorDict({"a": torch.rand(4, 2), "b": TensorDict({"c": torch.rand(4)}, [4])}, [4]),
            "kind": NonTensorStack("good", "bad", "bad", "good"),
        },
        batch_size=[4],
    )


def checked(client: Any) -> tuple[int, int, int]:
    """Rows that were checked, that could not be, and that were found to be different."""
    snapshot = client.snapshot()
    return snapshot["rows_checked"], snapshot["rows_unchecked"], snapshot["rows_mismatched"]


def change_a_byte(client: Any, find: bytes = MARK.to_bytes(8, "little"), which: int = 0) -> None:
    """Change a byte of what the plane holds, where it holds it."""
    storage = getattr(client, "inner", client)._link().storage
    if isinstance(storage, MemoryStore):
        for buffer in storage._buffers.values():
            held = buffer.numpy()
            at = _nth(held.tobytes(), find, which)
            if at >= 0:
                held[at] ^= 1
                return
    else:
        directory: Path = storage._segments._directory.path
        for path in sorted(path for path in directory.iterdir() if path.is_file()):
            content = path.read_bytes()
            at = _nth(content, find, which)
            if at >= 0:
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(bytes([content[at] ^ 1]))
                return
    raise AssertionError("the bytes are nowhere")


def _nth(content: bytes, find: bytes, which: int) -> int:
    at = content.find(find)
    for _ in range(which):
        at = content.find(find, at + len(find))
    return at


def test_rows_of_every_kind_come_back_as_they_were_written(client: MetricsDataPlaneClient) -> None:
    fields = rows_of_every_kind()
    client.put_samples(IDS, "p", fields)
    names = list(fields.keys())
    client.get_samples(IDS, "p", names)
    assert checked(client) == (4 * len(names), 0, 0)
    client.get_samples(["s2", "s0", "s2"], "p", names)
    assert checked(client) == (7 * len(names), 0, 0)


@pytest.mark.parametrize(
    ("fields", "find"),
    [
        (TensorDict({"dense": torch.full((4, 3), MARK)}, [4]), None),
        (TensorDict({"trees": rows_of_every_kind().get("trees")}, [4]), None),
        (TensorDict({"jagged": rows_of_every_kind().get("jagged")}, [4]), None),
        (TensorDict({"text": NonTensorStack("a", "b", "the one", "d")}, [4]), b"the one"),
    ],
    ids=["dense", "tree", "jagged", "object"],
)
def test_a_byte_that_changed_in_storage_is_counted_and_named_once(
    client: MetricsDataPlaneClient, fields: TensorDict, find: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    (name,) = fields.keys()
    client.put_samples(IDS, "p", fields)
    change_a_byte(client, find or MARK.to_bytes(8, "little"))
    with caplog.at_level(logging.WARNING, "rlplane.observability"):
        for reads in (1, 2):
            got = client.get_samples(IDS, "p", [name])  # the outcome of the read stays what it was
            assert got.batch_size == torch.Size([4])
            assert checked(client) == (4 * reads, 0, reads)
        wait_for(lambda: f"field {name!r} of sample" in caplog.text)
    lines = [record.message for record in caplog.records if "other bytes" in record.message]
    assert len(lines) == 1
    assert any(repr(sample) in lines[0] for sample in IDS)


def test_a_row_that_a_reader_did_not_ask_for_is_not_blamed(client: MetricsDataPlaneClient) -> None:
    client.put_samples(IDS, "p", TensorDict({"dense": torch.full((4, 1), MARK)}, [4]))
    change_a_byte(client, which=2)
    client.get_samples(["s0", "s1", "s3"], "p", ["dense"])
    assert checked(client) == (3, 0, 0)
    client.get_samples(["s2"], "p", ["dense"])
    assert checked(client) == (4, 0, 1)


def test_turns_are_checked_one_by_one(client: MetricsDataPlaneClient) -> None:
    for turn in range(3):
        tokens = torch.full((2, turn + 1), MARK)
        client.append_samples(IDS[:2], "p", TensorDict({"jagged": tokens}, [2]), finish=turn == 2)
    client.get_samples(IDS[:2], "p", ["jagged"])
    assert checked(client) == (6, 0, 0)
    change_a_byte(client)
    client.get_samples(IDS[:2], "p", ["jagged"])
    assert checked(client) == (12, 0, 1)


def test_a_leaf_has_no_sum_and_a_writer_without_verify_gives_none(
    client: MetricsDataPlaneClient, engine: str
) -> None:
    client.put_samples(IDS, "p", TensorDict({"trees": rows_of_every_kind().get("trees")}, [4]))
    client.get_samples(IDS, "p", ["trees.image"])
    assert checked(client) == (0, 4, 0)
    if engine == "shm":
        cfg = settings(engine, verify=False, address=client.controller_address)
        with rlplane.build_data_plane_client(cfg, bootstrap=False) as other:
            other.put_samples(IDS, "p", TensorDict({"scalar": torch.arange(4.0)}, [4]))
            other.get_samples(IDS, "p", ["trees"])
            assert checked(other) == (0, 0, 0)
        client.get_samples(IDS, "p", ["scalar"])
        assert checked(client) == (0, 8, 0)


def test_another_process_of_the_plane_checks_what_this_one_wrote() -> None:
    with rlplane.build_data_plane_client(settings("shm")) as writer:
        writer.register_partition("p", ["dense"], 4, ["train"])
        writer.put_samples(IDS, "p", TensorDict({"dense": torch.full((4, 3), MARK)}, [4]))
        cfg = settings("shm", address=writer.controller_address)  # type: ignore[attr-defined]
        with rlplane.build_data_plane_client(cfg, bootstrap=False) as reader:
            change_a_byte(writer)
            reader.get_data(reader.claim_meta("p", "train", ["dense"], 4))
            assert checked(reader) == (4, 0, 1)


def test_the_user_sees_nothing_of_it(client: MetricsDataPlaneClient) -> None:
    tags = [{"prompt": row} for row in range(4)]
    meta = client.put_samples(IDS, "p", TensorDict({"scalar": torch.arange(4.0)}, [4]), tags)
    assert (meta.fields, meta.tags) == (["scalar"], tags)
    client.put_samples(IDS, "p", tags=[{"reward": 1.0}] * 4)
    claimed = client.claim_meta("p", "train", ["scalar"], 4)
    assert claimed.tags == [{**tag, "reward": 1.0} for tag in tags]
    assert list(client.get_data(claimed).keys()) == ["scalar"]
    bare = rlplane.build_data_plane_client(rlplane.load_config("local"))
    with bare:
        bare.register_partition("p", ["scalar"], 4, ["train"])
        bare.put_samples(IDS, "p", TensorDict({"scalar": torch.arange(4.0)}, [4]))
        status, plain = client.partition_status("p"), bare.partition_status("p")
        assert (status["bytes"], status["samples"]) == (plain["bytes"], plain["samples"])


def test_sums_are_part_of_a_checkpoint(client: MetricsDataPlaneClient, tmp_path: Path) -> None:
    fields = rows_of_every_kind()
    client.put_samples(IDS, "p", fields)
    client.save_checkpoint(str(tmp_path / "saved"))
    client.load_checkpoint(str(tmp_path / "saved"))
    client.get_samples(IDS, "p", list(fields.keys()))
    assert checked(client) == (4 * len(fields.keys()), 0, 0)


def test_the_asyncio_client_checks_too(engine: str) -> None:
    async def run() -> tuple[int, int, int]:
        async with rlplane.build_async_data_plane_client(settings(engine)) as client:
            await client.register_partition("p", ["dense"], 4, ["train"])
            await client.put_samples(IDS, "p", TensorDict({"dense": torch.full((4, 3), MARK)}, [4]))
            change_a_byte(client.inner.engine)  # type: ignore[attr-defined]
            await client.get_samples(IDS, "p", ["dense"])
            return checked(client)

    assert asyncio.run(run()) == (4, 0, 1)


def test_without_verify_nothing_is_computed() -> None:
    with rlplane.build_data_plane_client(settings("memory", verify=False)) as client:
        client.register_partition("p", ["dense"], 4, ["train"])
        client.put_samples(IDS, "p", TensorDict({"dense": torch.full((4, 3), MARK)}, [4]))
        change_a_byte(client)
        client.get_samples(IDS, "p", ["dense"])
        assert checked(client) == (0, 0, 0)


def test_the_run_the_report_and_prometheus_have_the_counts() -> None:
    state = RunState("run")
    found = RowChecks("p", {"ids": 6}, {"mm.pixels": 2}, {"ids": 1})
    state.add_batch(EventBatch(worker="w", pid=1, host="h", seq=1, sent_ns=0, events=[found, found]))
    snapshot = state.snapshot(SessionState.COMPLETE)
    for name, field, value in (
        ("checked", "ids", 12),
        ("unchecked", "mm.pixels", 4),
        ("mismatched", "ids", 2),
    ):
        (stat,) = snapshot.counters(f"rows_{name}")
        assert (stat.labels, stat.value) == ({"partition": "p", "field": field}, value)
    state.close()
    assert "2 rows of 12 that were checked came back" in render_text(Report.from_snapshot(snapshot))
    assert "2 rows of p/ids came back with other bytes than were written" in [
        finding.text for finding in findings(snapshot) if finding.level == "error"
    ]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
