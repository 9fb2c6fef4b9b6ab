"""rlplane.compat.nemo_rl, with a stand-in for NeMo-RL: names and shapes as it has them, written for this."""

import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.warm_workers import run_warm

from rlplane.compat.nemo_rl import register
from rlplane.compat.nemo_rl.config import plane_config

STAND_IN = {
    "__init__": "",
    "data_plane/__init__": """
        from nemo_rl.data_plane.factory import build_data_plane_client
        from nemo_rl.data_plane.interfaces import DataPlaneClient, DataPlaneConfig, KVBatchMeta
    """,
    "data_plane/interfaces": """
        from abc import ABC, abstractmethod
        from dataclasses import dataclass, field
        from typing import Any, Literal
        from typing_extensions import TypedDict

        class DataPlaneConfig(TypedDict):
            enabled: bool
            impl: Literal["transfer_queue"]
            backend: Literal["simple", "mooncake_cpu"]

        @dataclass
        class KVBatchMeta:
            partition_id: str
            task_name: str | None
            sample_ids: list[str]
            fields: list[str] | None = None
            sequence_lengths: list[int] | None = None
            extra_info: dict[str, Any] = field(default_factory=dict)
            tags: list[dict[str, Any]] | None = None

        class DataPlaneClient(ABC):
            @abstractmethod
            def register_partition(self): ...
            claim_meta = get_data = check_consumption_status = put_samples = register_partition
            get_samples = clear_samples = close = save_checkpoint = load_checkpoint = register_partition
            list_sample_ids = register_partition
    """,
    "data_plane/factory": """
        def build_data_plane_client(cfg, *, bootstrap=True):
            return ("theirs", cfg, bootstrap)
    """,
    "data_plane/observability": """
        log_event = print

        class MetricsDataPlaneClient:
            def __init__(self, inner, on_event=None):
                self.inner, self.on_event = inner, on_event
    """,
    "trainer": """
        from pydantic import BaseModel
        from nemo_rl.data_plane import DataPlaneConfig, build_data_plane_client

        class MasterConfig(BaseModel):
            data_plane: DataPlaneConfig | None = None
    """,
}
SIZES = {
    "storage_capacity": 100,
    "num_storage_units": 1,
    "global_segment_size": 1 << 24,
    "local_buffer_size": 1 << 22,
}


@pytest.fixture
def nemo_rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in STAND_IN.items():
        path = tmp_path / "nemo_rl" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line[8:] for line in text.splitlines()))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in list(sys.modules):
        if name.partition(".")[0] == "nemo_rl" or name == "rlplane.compat.nemo_rl.client":
            del sys.modules[name]


def test_the_snippets_of_its_page_run(nemo_rl: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "nemo_rl.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(snippets) == 2
    run_with(nemo_rl, "\n".join(snippets))


def run_with(nemo_rl: Path, script: str, given: str = "") -> None:
    code = f"import sys; sys.path.insert(0, {str(nemo_rl)!r})\n{script}"
    done = run_warm([sys.executable, "-c", code], input=given, timeout=300)
    assert done.returncode == 0, done.stderr


def config(backend: str = "memory", **changes: Any) -> dict[str, Any]:
    given = {"enabled": True, "impl": "rlplane", "backend": backend, "claim_meta_poll_interval_s": 0.5}
    return {**given, **SIZES, **changes}


def build(cfg: dict[str, Any], **how: Any) -> Any:
    from nemo_rl import data_plane

    return data_plane.build_data_plane_client(cfg, **how)


@pytest.fixture
def client(nemo_rl: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    register()
    built = build(config(controller_address=request.node.name))
    built.register_partition("train", ["x", "note"], 4, ["work"])
    yield built
    built.close()


def test_registering_again_changes_nothing(nemo_rl: Path) -> None:
    from nemo_rl import trainer

    register()
    once = trainer.build_data_plane_client
    register()
    assert trainer.build_data_plane_client is once
    assert build(config(impl="transfer_queue"), bootstrap=False)[0] == "theirs"
    assert build(config(enabled=False))[0] == "theirs"


def test_configs_that_are_checked_by_a_model_made_before_may_name_it(nemo_rl: Path) -> None:
    from nemo_rl import trainer

    ours = {"enabled": True, "impl": "rlplane", "backend": "shm"}
    with pytest.raises(ValueError, match="impl"):
        trainer.MasterConfig(data_plane=ours)
    register()
    assert trainer.MasterConfig(data_plane=ours).data_plane == ours


def test_it_is_their_client_and_speaks_their_metas(client: Any) -> None:
    from nemo_rl.data_plane import DataPlaneClient, KVBatchMeta

    assert isinstance(client, DataPlaneClient)
    columns = TensorDict({"x": torch.arange(4)}, [4])
    put = client.put_samples(list("abcd"), "train", columns)
    assert put == KVBatchMeta("train", None, list("abcd"), ["x"], tags=[{}, {}, {}, {}])
    assert not client.check_consumption_status("train", ["work"])
    claimed = client.claim_meta("train", "work", ["x"], 2, None, True, 5.0)
    assert claimed == KVBatchMeta("train", "work", ["a", "b"], ["x"], tags=[{}, {}])
    assert client.get_data(claimed)["x"].tolist() == [0, 1]
    assert client.claim_meta("train", "work", ["x"], 2).sample_ids == ["c", "d"]
    assert client.check_consumption_status("train", ["work"])
    with pytest.raises(ValueError, match="select_fields"):
        client.get_data(KVBatchMeta("train", None, ["a"]))


def test_lengths_come_with_a_claim(client: Any) -> None:
    tags = [{"input_lengths": 3}, {"input_lengths": 5}]
    client.put_samples(["a", "b"], "train", TensorDict({"x": torch.zeros(2)}, [2]), tags)
    assert client.claim_meta("train", "work", ["x"], 2).sequence_lengths == [3, 5]


def test_a_jagged_column_of_equal_rows_is_read_dense(client: Any) -> None:
    rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(2, 3)], layout=torch.jagged)
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.zeros(1)], layout=torch.jagged)
    client.put_samples(["a", "b"], "train", TensorDict({"x": rows, "note": ragged}, [2]))
    found = client.get_samples(["b", "a"], "train", ["x", "note"])
    assert torch.equal(found["x"], torch.stack([torch.zeros(2, 3), torch.ones(2, 3)]))
    assert found["note"].is_nested
    odd = [torch.ones(2, 1), torch.ones(2, 3)]
    client.put_samples(["a", "b"], "train", TensorDict({"note": torch.nested.nested_tensor(odd)}, [2]))
    assert client.get_samples(["a", "b"], "train", ["note"])["note"].is_nested


def test_no_samples_are_nothing_to_do(client: Any) -> None:
    assert client.put_samples([], "train", None).sample_ids == []
    assert client.get_samples([], "train", ["x"]).batch_size == torch.Size([0])


def test_clearing_without_ids_clears_the_partition_and_warns_of_nothing(client: Any) -> None:
    client.put_samples(["a"], "train", TensorDict({"x": torch.zeros(1)}, [1]))
    client.clear_samples(None, "train")
    assert client.list_sample_ids("train") == []
    with pytest.warns(RuntimeWarning, match="train"):
        client.clear_samples(None, "train")


def test_a_partition_that_does_not_exist_has_nothing_to_list_or_clear(client: Any) -> None:
    """``TQDataPlaneClient.list_sample_ids`` and ``clear_samples``: such a partition is as an empty one."""
    assert client.list_sample_ids("unknown") == []
    client.clear_samples(["a"], "unknown")
    client.clear_samples([], "unknown")
    with pytest.warns(RuntimeWarning, match="unknown"):
        client.clear_samples(None, "unknown")


def test_samples_are_listed_in_the_order_of_their_ids(client: Any) -> None:
    """``DataPlaneClient.list_sample_ids``: "stable, sorted sample IDs"."""
    client.put_samples(["b", "a"], "train", TensorDict({"x": torch.zeros(2)}, [2]))
    assert client.list_sample_ids("train") == ["a", "b"]


@pytest.mark.filterwarnings("error")
def test_partitions_and_fields_come_into_being_by_writing(client: Any) -> None:
    """``TQReplayBuffer.commit``: the single controller writes to a partition that nobody has registered."""
    columns = TensorDict({"input_ids": torch.ones(2, 3)}, [2])
    client.put_samples(["a", "b"], "rollout_data", columns, [{"weight_version": 1}] * 2)
    client.put_samples(["b"], "rollout_data", TensorDict({"prev_logprobs": torch.zeros(1, 3)}, [1]))
    assert client.get_samples(["b"], "rollout_data", ["prev_logprobs"])["prev_logprobs"].shape == (1, 3)
    client.put_samples(["c"], "train", TensorDict({"pixel_values": torch.zeros(1)}, [1]))
    assert client.claim_meta("train", "work", ["pixel_values"], 1).sample_ids == ["c"]


def test_a_checkpoint_brings_back_samples_and_metadata(client: Any, tmp_path: Path) -> None:
    client.put_samples(["a"], "train", TensorDict({"x": torch.ones(1)}, [1]))
    client.save_checkpoint(tmp_path / "saved", metadata={"step": 3})
    client.clear_samples(["a"], "train")
    assert client.load_checkpoint(tmp_path / "saved") == {"step": 3}
    assert client.get_samples(["a"], "train", ["x"])["x"].tolist() == [1.0]


def test_their_metrics_wrapper_measures_it(nemo_rl: Path) -> None:
    register()
    events: list[Any] = []
    measured = build(config(observability={"enabled": True, "callback": events.append}))
    assert type(measured).__name__ == "MetricsDataPlaneClient"
    assert measured.on_event == events.append
    assert type(measured.inner.plane).__name__ == "MemoryDataPlaneClient"
    measured.inner.close()


def test_a_process_that_gets_the_config_can_join(nemo_rl: Path) -> None:
    register()
    cfg = config("shm")
    started = build(cfg)
    started.register_partition("train", ["x"], 1, ["work"])
    script = """
import pickle, sys, torch
from tensordict import TensorDict
cfg = pickle.loads(bytes.fromhex(sys.stdin.read()))
from nemo_rl.data_plane import build_data_plane_client
client = build_data_plane_client(cfg, bootstrap=False)
client.put_samples(["a"], "train", TensorDict({"x": torch.ones(1)}, [1]))
client.close()
"""
    try:
        run_with(nemo_rl, script, pickle.dumps(cfg).hex())
        assert started.claim_meta("train", "work", ["x"], 1).sample_ids == ["a"]
    finally:
        started.close()


def test_a_client_can_be_sent_to_another_process(nemo_rl: Path) -> None:
    """``SingleControllerActorArgs.dp_client``: built by the driver, sent to the controller's actor."""
    register()
    started = build(config("shm"))
    script = """
import pickle, sys, torch
from tensordict import TensorDict
client = pickle.loads(bytes.fromhex(sys.stdin.read()))
client.put_samples(["a"], "rollout_data", TensorDict({"x": torch.ones(1)}, [1]))
client.close()
"""
    try:
        run_with(nemo_rl, script, pickle.dumps(started).hex())
        assert started.list_sample_ids("rollout_data") == ["a"]
    finally:
        started.close()


@pytest.mark.parametrize(
    ("backend", "impl"),
    [("memory", "local"), ("shm", "local"), ("simple", "transfer_queue"), ("mooncake_cpu", "transfer_queue")],
)
def test_each_backend_is_one_of_our_engines(backend: str, impl: str) -> None:
    found = plane_config(config(backend, checkpointing_enabled=True))
    assert (found["impl"], found["backend"], found["storage_capacity"]) == (impl, backend, 100)


def test_sizes_may_be_in_a_table_of_the_backend() -> None:
    class Table:
        """As pydantic makes of a table."""

        def model_dump(self, exclude_unset: bool) -> dict[str, Any]:
            return {"storage_capacity": 7, "num_storage_units": 3}

    nested = {name: value for name, value in config("simple").items() if name not in SIZES}
    tuning = {"reuse_registered_buffers": True, "cpu_staging_slots": 4, "cpu_staging_buffer_mb": 256}
    tables = {"mooncake_cpu": {"global_segment_size": 1 << 36, **tuning}}
    for simple in ({"storage_capacity": 7, "num_storage_units": 3}, Table()):
        found = plane_config({**nested, **tables, "simple": simple})
        assert (found["storage_capacity"], found["num_storage_units"]) == (7, 3)
        assert found["global_segment_size"] != 1 << 36
    assert plane_config({**nested, **tables, "backend": "mooncake_cpu"})["global_segment_size"] == 1 << 36


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match=r"backend is one of memory, shm, .*; got 'disk'"):
        plane_config(config("disk"))
