"""Who may import whom, and what the core install has to be enough for."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = [
    name
    for name in (
        "rlplane.cli",
        "rlplane.metrics",
        "rlplane.metrics.aggregator",
        "rlplane.report",
        "rlplane.sinks",
        "rlplane.transport",
        "rlplane.tui",
        "rlplane.viewing",
        "rlplane.web",
    )
    if find_spec(name) is not None
]

# What is importable beside the standard library when nothing but the core install is there. Optional
# packages that torch, tensordict or numpy use when they find them are theirs to do without.
CORE_ONLY = """
import sys
from importlib.machinery import PathFinder

OPTIONAL = {"cyclopts", "rich", "yaml", "textual", "starlette", "uvicorn", "prometheus_client", "wandb",
    "tensorboard", "opentelemetry", "transfer_queue", "ray", "omegaconf", "mooncake", "nixl", "redis",
    "hypothesis", "pytest", "hdrh", "safetensors", "httpx"}

class CoreInstall(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in OPTIONAL else super().find_spec(name, path, target)

sys.meta_path = [CoreInstall if finder is PathFinder else finder for finder in sys.meta_path]
"""


def run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_it_loads_no_torch(name: str) -> None:
    run(f"import sys, {name}\nassert 'torch' not in sys.modules and 'tensordict' not in sys.modules")


@pytest.mark.parametrize("exemplar", ["local", "shm"])
def test_the_core_install_is_enough_for_an_engine_on_one_machine(exemplar: str) -> None:
    run(
        CORE_ONLY
        + f"""
import torch
import rlplane

if __name__ == "__main__":
    with rlplane.build_data_plane_client(rlplane.load_config({exemplar!r})) as client:
        client.register_partition("p", ["x"], 2, ["t"])
        rlplane.kv_first_write({{"x": torch.ones(2, 3)}}, sample_ids=["a", "b"], dp_client=client,
            partition_id="p", lengths=[3, 1], token_aligned_fields=["x"])
        meta = client.claim_meta("p", "t", ["x"], 2)
        assert rlplane.read_columns(client, meta)["x"].tolist() == [[1, 1, 1], [1, 0, 0]]
"""
    )


def test_the_core_install_is_without_what_the_extras_bring() -> None:
    script = "try: import yaml\nexcept ModuleNotFoundError: pass\nelse: raise SystemExit('yaml is there')"
    run(CORE_ONLY + script)


def test_every_public_name_loads_on_the_core_install() -> None:
    run(CORE_ONLY + "import rlplane\nfor name in rlplane.__all__: getattr(rlplane, name)")


def test_the_contracts_between_modules_are_kept() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
