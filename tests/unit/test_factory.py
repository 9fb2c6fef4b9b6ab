"""build_data_plane_client: which engine, from where, and what is said when it cannot be had."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlplane.config import load_config
from rlplane.errors import ConfigError, MissingExtraError
from rlplane.factory import build_data_plane_client
from rlplane.interfaces import DataPlaneClient

PLUGIN = """
from rlplane.interfaces import DataPlaneClient

class Client(DataPlaneClient):
    def __init__(self, cfg, *, bootstrap=True):
        self.cfg, self.bootstrap, self.closed = cfg, bootstrap, False

    def close(self):
        self.closed = True

    def _no(self, *args, **kwargs):
        raise AssertionError("not called here")

    register_partition = claim_meta = get_data = check_consumption_status = _no
    put_samples = get_samples = clear_samples = _no

def not_a_client(cfg, *, bootstrap=True):
    return object()
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A distribution on the path, with adapters in our entry-point group, as pip would install it."""
    (tmp_path / "some_plane.py").write_text(PLUGIN)
    info = tmp_path / "some_plane-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-plane\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[rlplane.adapters]\n"
        "some_plane = some_plane:Client\n"
        "odd_plane = some_plane:not_a_client\n"
        "broken_plane = module_that_is_not_there:Client\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_plane", raising=False)
    return "some_plane"


def config(**changes: Any) -> dict[str, Any]:
    return {**load_config("local"), **changes}


@pytest.mark.parametrize("cfg", [None, config(enabled=False), {"enabled": False}])
def test_no_plane_says_what_to_set(cfg: Any) -> None:
    with pytest.raises(ValueError, match="enabled: true"):
        build_data_plane_client(cfg)


@pytest.mark.parametrize("cfg", [{}, {"impl": "local"}, {"enabled": 0}, 3])
def test_a_config_is_checked_as_load_config_checks_it(cfg: Any) -> None:
    with pytest.raises(ConfigError):
        build_data_plane_client(cfg)


def test_the_memory_engine_carries_a_sample_through(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from tensordict import TensorDict

    with build_data_plane_client(config(controller_address="test-factory")) as client:
        client.register_partition("p", ["x"], 2, ["t"])
        client.put_samples(["a", "b"], "p", TensorDict({"x": torch.tensor([1, 2])}, batch_size=[2]))
        meta = client.claim_meta("p", "t", ["x"], 2)
        assert client.get_data(meta)["x"].tolist() == [1, 2]


def test_an_installed_adapter_is_found_by_its_name(plugin: str) -> None:
    client: Any = build_data_plane_client(config(impl=plugin, backend="whatever"), bootstrap=False)
    assert type(client).__module__ == "some_plane"
    assert client.bootstrap is False
    assert client.cfg["backend"] == "whatever"


def test_an_adapter_gets_its_own_table_unchecked(plugin: str) -> None:
    client: Any = build_data_plane_client(config(impl=plugin, some_plane={"shards": 3}))
    assert client.cfg["some_plane"] == {"shards": 3}


def test_an_adapter_gets_a_copy_of_the_config(plugin: str) -> None:
    cfg = config(impl=plugin)
    client: Any = build_data_plane_client(cfg)
    client.cfg["observability"]["enabled"] = True
    client.cfg["storage_capacity"] = 1
    assert cfg == config(impl=plugin)


def test_an_adapter_that_cannot_be_imported_is_named(plugin: str) -> None:
    with pytest.raises(MissingExtraError, match=r"'broken_plane'.*module_that_is_not_there"):
        build_data_plane_client(config(impl="broken_plane"))


def test_an_adapter_that_returns_something_else_is_named(plugin: str) -> None:
    with pytest.raises(ConfigError, match=r"'odd_plane'.*returned a object"):
        build_data_plane_client(config(impl="odd_plane"))


def test_an_unknown_impl_gets_the_installed_ones(plugin: str) -> None:
    with pytest.raises(ConfigError, match=r"local, transfer_queue.*some_plane.*did you mean 'some_plane'"):
        build_data_plane_client(config(impl="some_plan"))


@pytest.mark.parametrize(
    ("exemplar", "module", "extra"),
    [
        ("cluster-simple", "ray", "transfer-queue"),
        ("cluster-simple", "transfer_queue", "transfer-queue"),
        ("cluster-mooncake", "mooncake", "mooncake"),
    ],
)
def test_an_engine_that_is_not_installed_names_its_extra(exemplar: str, module: str, extra: str) -> None:
    # In a process of its own: what this one has imported cannot be made "not installed" without a trace.
    program = f"""
import subprocess
import sys
sys.modules[{module!r}] = None
from rlplane import build_data_plane_client, load_config
from rlplane.errors import MissingExtraError
try:
    build_data_plane_client(load_config({exemplar!r}))
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert f"rlplane[{extra}]" in done.stdout, done.stderr


def test_with_observability_the_client_comes_wrapped(plugin: str) -> None:
    from rlplane.observability import MetricsDataPlaneClient

    events: list[dict[str, Any]] = []
    observability = {"enabled": True, "callback": events.append}
    with build_data_plane_client(config(observability=observability)) as client:
        assert isinstance(client, MetricsDataPlaneClient)
        client.register_partition("p", ["x"], 1, ["t"])
    assert "p" in {event["partition_id"] for event in events}


def test_without_observability_the_client_is_the_engine_itself(plugin: str) -> None:
    client = build_data_plane_client(config(impl=plugin, observability={"enabled": False}))
    assert type(client).__name__ == "Client"
    assert isinstance(client, DataPlaneClient)


def test_a_client_that_cannot_be_wrapped_is_closed(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import rlplane.observability

    made: list[Any] = []

    def fail(client: Any, cfg: Any, **more: Any) -> DataPlaneClient:
        made.append(client)
        raise RuntimeError("no aggregator")

    monkeypatch.setattr(rlplane.observability, "wrap_with_observability", fail)
    with pytest.raises(RuntimeError, match="no aggregator"):
        build_data_plane_client(config(impl=plugin, observability={"enabled": True}))
    assert made[0].closed
