"""load_config: where a config comes from, what wins, and what every wrong key is told."""

import os
import runpy
import sys
from pathlib import Path
from typing import NotRequired, get_origin, get_type_hints

import msgspec
import pytest

from rlplane.config import (
    EXEMPLARS,
    KEYS,
    RESERVED_VARIABLES,
    TABLES,
    exemplar_text,
    load_config,
    parse_size,
    settings,
    validate_config,
)
from rlplane.errors import ConfigError, MissingExtraError
from rlplane.interfaces import CheckpointConfig, DataPlaneConfig, ObservabilityConfig

ROOT = Path(__file__).parents[2]
REQUIRED = {
    "enabled": True,
    "impl": "local",
    "backend": "memory",
    "storage_capacity": 10,
    "num_storage_units": 1,
    "claim_meta_poll_interval_s": 0.5,
    "global_segment_size": 1024,
    "local_buffer_size": 1024,
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RLPLANE_")]:
        monkeypatch.delenv(name)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# Where it comes from


@pytest.mark.parametrize("name", EXEMPLARS)
def test_an_exemplar_carries_every_required_key(name: str) -> None:
    config = load_config(name)
    assert set(REQUIRED) <= set(config)
    assert config["enabled"] is True
    assert isinstance(config["global_segment_size"], int)


def test_the_exemplars_are_the_four_engines() -> None:
    engines = [(load_config(name)["impl"], load_config(name)["backend"]) for name in EXEMPLARS]
    assert engines == [
        ("local", "memory"),
        ("local", "shm"),
        ("transfer_queue", "simple"),
        ("transfer_queue", "mooncake_cpu"),
    ]


def test_every_toml_file_in_the_package_is_a_named_exemplar() -> None:
    import rlplane

    folder = Path(rlplane.__file__).parent / "exemplars"
    assert sorted(path.stem for path in folder.glob("*.toml")) == sorted(EXEMPLARS)


def test_no_source_means_one_machine_with_many_processes() -> None:
    assert load_config() == load_config("shm")


def test_an_exemplar_written_to_a_file_loads_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.toml", exemplar_text("cluster-simple"))
    assert load_config(path) == load_config(str(path)) == load_config("cluster-simple")


def test_an_exemplar_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no exemplar is named 'nope'"):
        exemplar_text("nope")


def test_a_yaml_file_loads(tmp_path: Path) -> None:
    text = "\n".join(f"{key}: {str(value).lower()}" for key, value in REQUIRED.items())
    path = write(tmp_path / "plane.yaml", text + "\nobservability:\n  enabled: true\n")
    assert load_config(path) == {**REQUIRED, "observability": {"enabled": True}}


def test_a_yaml_file_without_pyyaml_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingExtraError, match=r"rlplane\[cli\]"):
        load_config(write(tmp_path / "plane.yml", "enabled: true"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("bad.yaml", "a: [", "is not YAML"),
        ("bad.yaml", "- a\n- b\n", "must hold a mapping"),
        ("bad.yaml", "1: true\n", "a config key is text"),
        ("bad.toml", "a = ", "is not TOML"),
    ],
)
def test_a_file_that_cannot_be_parsed_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path / name, text))


def test_a_path_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_config("nowhere.yaml")


def test_a_misspelt_exemplar_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cluster-simple'"):
        load_config("cluster_simple")


def test_a_source_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 7"):
        load_config(7)  # type: ignore[arg-type]


def test_a_mapping_is_copied_and_not_changed() -> None:
    sinks = ["stdout"]
    source = {**REQUIRED, "observability": {"enabled": True, "sinks": sinks}}
    config = load_config(source)
    config["observability"]["sinks"].append("file")
    config["observability"]["enabled"] = False
    assert source["observability"] == {"enabled": True, "sinks": ["stdout"]}


def test_a_callback_stays_the_function_it_is() -> None:
    events: list[dict[str, object]] = []
    config = load_config({**REQUIRED, "observability": {"enabled": True, "callback": events.append}})
    config["observability"]["callback"]({"op": "put"})
    assert events == [{"op": "put"}]


def test_an_omegaconf_config_is_resolved() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    source = omegaconf.OmegaConf.create(
        {**REQUIRED, "local_buffer_size": "${global_segment_size}", "observability": {"enabled": True}}
    )
    config = load_config(source)
    assert config["local_buffer_size"] == 1024
    assert type(config["observability"]) is dict


def test_an_omegaconf_config_with_a_missing_value_is_refused() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    with pytest.raises(ConfigError, match="backend"):
        load_config(omegaconf.OmegaConf.create({**REQUIRED, "backend": "???"}))


# What wins


def test_a_variable_wins_over_the_source_and_an_override_over_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPLANE_STORAGE_CAPACITY", "20")
    assert load_config(REQUIRED)["storage_capacity"] == 20
    assert load_config(REQUIRED, {"storage_capacity": 30})["storage_capacity"] == 30


@pytest.mark.parametrize(
    ("variable", "text", "table", "key", "value"),
    [
        ("RLPLANE_ENABLED", "off", None, "enabled", False),
        ("RLPLANE_GLOBAL_SEGMENT_SIZE", "2 GiB", None, "global_segment_size", 2 << 30),
        ("RLPLANE_CLAIM_META_POLL_INTERVAL_S", "1e-2", None, "claim_meta_poll_interval_s", 0.01),
        ("RLPLANE_OBSERVABILITY__ENABLED", "1", "observability", "enabled", True),
        ("RLPLANE_OBSERVABILITY__TRACK_PARTITIONS", "a, b", "observability", "track_partitions", ["a", "b"]),
        ("RLPLANE_OBSERVABILITY__SINKS", '[{"a": 1}]', "observability", "sinks", [{"a": 1}]),
        ("RLPLANE_TRANSFER_QUEUE__NODE_IP", "127.0.0.1", "transfer_queue", "node_ip", "127.0.0.1"),
    ],
)
def test_a_variable_is_read_as_the_schema_says(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, table: str | None, key: str, value: object
) -> None:
    monkeypatch.setenv(variable, text)
    config = load_config({**REQUIRED, "observability": {"enabled": False}})
    assert (config[table] if table else config)[key] == value  # type: ignore[literal-required]


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPLANE_STORAGE_CAPACITY", "")
    assert load_config(REQUIRED)["storage_capacity"] == 10


def test_a_variable_of_the_wrong_type_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPLANE_STORAGE_CAPACITY", "many")
    with pytest.raises(ConfigError, match=r"'storage_capacity'.*whole number.*RLPLANE_STORAGE_CAPACITY"):
        load_config(REQUIRED)


def test_an_unknown_variable_gets_the_nearest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPLANE_STORAGE_CAPACTIY", "20")
    with pytest.raises(ConfigError, match="did you mean 'RLPLANE_STORAGE_CAPACITY'"):
        load_config(REQUIRED)


def test_a_variable_of_a_removed_key_says_what_replaced_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPLANE_CLIENT_TIMEOUT_S", "2")
    with pytest.raises(ConfigError, match=r"'reconnect_timeout_s'.*RLPLANE_CLIENT_TIMEOUT_S"):
        load_config(REQUIRED)


@pytest.mark.parametrize("variable", [*RESERVED_VARIABLES, "RLPLANE_TEST_ANYTHING", "RLPLANE_BENCH_X"])
def test_a_reserved_variable_is_not_taken_for_a_key(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "x")
    assert load_config(REQUIRED) == REQUIRED


@pytest.mark.parametrize("exemplar", EXEMPLARS)
def test_a_config_does_not_name_the_plane_that_this_process_has(
    monkeypatch: pytest.MonkeyPatch, exemplar: str
) -> None:
    monkeypatch.setenv("RLPLANE_CONTROLLER_ADDRESS", "shm:///dev/shm/rlplane-of-before")
    assert "controller_address" not in load_config(exemplar)


def test_the_inherited_metrics_address_only_fills_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPLANE_METRICS_ADDRESS", "tcp://127.0.0.1:1")
    assert load_config("shm")["observability"] == {"enabled": False, "metrics_address": "tcp://127.0.0.1:1"}
    assert "observability" not in load_config(REQUIRED)
    config = load_config("shm", {"observability.metrics_address": "tcp://127.0.0.1:2"})
    assert config["observability"]["metrics_address"] == "tcp://127.0.0.1:2"


def test_overrides_may_be_dotted_nested_or_text() -> None:
    dotted = load_config("shm", {"observability.enabled": True, "storage_capacity": 5})
    nested = load_config("shm", {"observability": {"enabled": True}, "storage_capacity": 5})
    text = load_config("shm", ["observability.enabled=true", "storage_capacity = 5"])
    assert dotted == nested == text
    assert dotted["observability"]["enabled"] is True


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["storage_capacity"], "written key=value"),
        ("storage_capacity=5", "a list of 'key=value'"),
        (["storage_capacity=x"], "from the override 'storage_capacity=x'"),
        (["storage_capcity=5"], "did you mean 'storage_capacity'"),
        (["observability=1"], "is a table"),
        (["observability.callback=print"], "a function, set in code"),
        (["enabled.deep=1"], "unknown config key 'enabled.deep'"),
        ({"observability.enable": True}, "did you mean 'observability.enabled'"),
    ],
)
def test_a_wrong_override_is_named(overrides: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("shm", overrides)  # type: ignore[arg-type]


# What is refused


@pytest.mark.parametrize("key", REQUIRED)
def test_a_required_key_that_is_missing_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"missing: {key};"):
        load_config({name: value for name, value in REQUIRED.items() if name != key})


def test_all_missing_keys_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match="missing: backend, storage_capacity, num_storage_units"):
        load_config({"enabled": True, "impl": "local"})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("enabled", 1, "true or false; got 1, a int"),
        ("enabled", None, "got nothing"),
        ("impl", 3, "'impl' must be text"),
        ("backend", "", "'backend' must be text"),
        ("storage_capacity", True, "whole number"),
        ("storage_capacity", 1.5, "whole number"),
        ("storage_capacity", "5", "whole number"),
        ("storage_capacity", 0, "at least 1; got 0"),
        ("claim_meta_poll_interval_s", 0, "more than 0"),
        ("claim_meta_poll_interval_s", float("nan"), "must be a number"),
        ("claim_meta_poll_interval_s", "1e-3", "must be a number"),
        ("global_segment_size", "8 G", "'global_segment_size' must be a size"),
        ("global_segment_size", 1.5, "'global_segment_size' must be a size"),
        ("global_segment_size", "0.3 B", "whole number of bytes"),
        ("ack_timeout_ms", 0.5, "whole number"),
        ("observability", True, "'observability' must be a table"),
        ("observability", {}, "missing: observability.enabled;"),
        ("observability", {"enabled": None}, "'observability.enabled' must be"),
        ("observability", {"enabled": True, "callback": "print"}, "a function"),
        ("observability", {"enabled": True, "track_partitions": "train"}, "list of names"),
        ("observability", {"enabled": True, "track_partitions": [1]}, "list of names"),
        ("transfer_queue", {"mooncake_protocol": "udp"}, "one of rdma, tcp; got 'udp'"),
        ("transfer_queue", {"node": "x"}, "did you mean 'transfer_queue.node_ip'"),
        ("enable", True, "unknown config key 'enable'; did you mean 'enabled'"),
        ("metrics_address", "x", "did you mean 'observability.metrics_address'"),
        ("zzzzzz", 1, "unknown config key 'zzzzzz'$"),
        ("reconnect_timeout_s", -1, "'reconnect_timeout_s' must be a number, at least 0; got -1"),
        ("reconnect_timeout_s", float("inf"), "got inf"),
        ("journal", "yes", "'journal' must be true or false; got 'yes', a str"),
        ("journal_dir", "", "'journal_dir' must be text"),
        ("checkpoint", {"dir": "x"}, "missing: checkpoint.every_s;"),
        ("checkpoint", {"dir": "x", "every_s": 0}, "'checkpoint.every_s' must be a number, more than 0"),
        ("checkpoint", {"dir": "x", "every_s": 1, "keep": 0}, "'checkpoint.keep'.*at least 1; got 0"),
        ("checkpoint", {"dir": "x", "evry_s": 1}, "did you mean 'checkpoint.every_s'"),
        ("client_timeout_s", 2.0, "'client_timeout_s' was removed.*'reconnect_timeout_s'"),
        ("simple", {"storage_capcity": 1}, "did you mean 'simple.storage_capacity'"),
        ("mooncake_cpu", {"local_buffer_size": "4 G"}, "'mooncake_cpu.local_buffer_size' must be a size"),
        ("mooncake_cpu", 4, "'mooncake_cpu' must be a table"),
        ("backend", "simple", "one of memory, shm for impl 'local'; got 'simple'"),
        ("impl", "transferqueue", "did you mean 'transfer_queue'"),
    ],
)
def test_a_wrong_value_is_told_the_key_and_what_would_be_right(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({**REQUIRED, key: value})


def test_an_optional_key_that_is_null_is_left_out() -> None:
    assert load_config({**REQUIRED, "controller_address": None, "observability": None}) == REQUIRED


def test_a_config_that_is_not_a_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="a mapping of keys; got 3"):
        validate_config(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4_096", 4096),
        ("512MB", 512_000_000),
        ("512 mib", 512 << 20),
        ("8 GiB", 8 << 30),
        ("1.5 GiB", 3 << 29),
        ("1 TB", 10**12),
        ("16 b", 16),
        ("9007199254740993 B", 9007199254740993),
        (7, 7),
    ],
)
def test_a_size_may_be_written_with_a_unit(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 Gb/s", "1 X", True, "1e9"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a size in bytes"):
        parse_size(text)


# The schema and the types say the same


@pytest.mark.parametrize(
    ("types", "table"),
    [(DataPlaneConfig, ""), (ObservabilityConfig, "observability"), (CheckpointConfig, "checkpoint")],
)
def test_the_keys_are_those_of_the_typed_dict(types: type, table: str) -> None:
    hints = get_type_hints(types, include_extras=True)
    required = {name for name, hint in hints.items() if get_origin(hint) is not NotRequired}
    fields = msgspec.structs.fields(TABLES[table])
    assert {field.name for field in fields} == set(hints)
    assert {field.name for field in fields if field.required} == required


def test_the_documentation_has_the_tables_of_the_keys() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "config_tables.py"))
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert script["renewed"](text) == text, "run: python scripts/config_tables.py"


def test_the_documentation_lists_every_key_and_variable() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    missing = [name for name in [*KEYS, *RESERVED_VARIABLES, *EXEMPLARS] if f"`{name}`" not in text]
    assert missing == []


def test_what_a_config_leaves_out_has_its_default_as_a_setting() -> None:
    config = load_config({**REQUIRED, "checkpoint": {"dir": "/tmp/c", "every_s": 60}})
    found = settings(config)
    assert config["checkpoint"] == {"dir": "/tmp/c", "every_s": 60.0}
    assert found.checkpoint is not None and found.checkpoint.keep == 2
    assert (found.reconnect_timeout_s, found.journal) == (30.0, True)
    assert found.observability is None


# As NeMo-RL writes it

NEMO_RL = {
    "enabled": True,
    "impl": "transfer_queue",
    "backend": "simple",
    "claim_meta_poll_interval_s": 0.5,
    "simple": {"storage_capacity": 7, "num_storage_units": 4},
    "mooncake_cpu": {
        "global_segment_size": 1 << 36,
        "local_buffer_size": "4 GiB",
        "reuse_registered_buffers": True,
        "checkpoint": {"enabled": False},
    },
    "observability": {"enabled": True, "verify_tensor_hash": False},
}


def test_the_table_of_the_chosen_backend_is_read() -> None:
    simple = load_config(NEMO_RL)
    assert (simple["storage_capacity"], simple["num_storage_units"]) == (7, 4)
    assert set(simple) == {*REQUIRED, "observability"}
    assert simple["observability"] == {"enabled": True}
    mooncake = validate_config({**NEMO_RL, "backend": "mooncake_cpu"})
    assert (mooncake["global_segment_size"], mooncake["local_buffer_size"]) == (1 << 36, 4 << 30)


def test_a_size_that_the_tables_leave_out_is_that_of_the_exemplar() -> None:
    exemplar = load_config("cluster-mooncake")
    config = load_config({**NEMO_RL, "backend": "mooncake_cpu", "mooncake_cpu": None, "simple": {}})
    for name in ("storage_capacity", "num_storage_units", "global_segment_size", "local_buffer_size"):
        assert config[name] == exemplar[name]


def test_a_table_of_another_backend_neither_counts_nor_contradicts() -> None:
    config = load_config({**NEMO_RL, "global_segment_size": "1 GiB"})
    assert config["global_segment_size"] == 1 << 30


def test_a_flat_key_may_repeat_what_the_table_says_and_not_contradict_it() -> None:
    assert load_config({**NEMO_RL, "storage_capacity": 7})["storage_capacity"] == 7
    with pytest.raises(ConfigError, match=r"'storage_capacity' and 'simple\.storage_capacity'.*8 and 7"):
        load_config({**NEMO_RL, "storage_capacity": 8})


def test_a_later_size_wins_in_whichever_form_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPLANE_STORAGE_CAPACITY", "8")
    assert load_config(NEMO_RL)["storage_capacity"] == 8
    assert load_config(NEMO_RL, ["simple.storage_capacity=9"])["storage_capacity"] == 9
    flat = {**REQUIRED, "impl": "transfer_queue", "backend": "simple"}
    assert load_config(flat, {"simple.storage_capacity": 9})["storage_capacity"] == 9
    changed = load_config(NEMO_RL, {"backend": "mooncake_cpu"})
    assert changed["global_segment_size"] == 1 << 36
