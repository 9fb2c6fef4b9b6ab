"""What docs/verl.md says runs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests.warm_workers import run_warm

from rlplane import load_config
from rlplane.compat import transfer_queue
from rlplane.compat.transfer_queue.conf import engine_config, merged

DOCUMENT = Path(__file__).parents[2] / "docs" / "verl.md"


def snippets(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)


def test_the_job_without_a_gpu_runs(tmp_path: Path) -> None:
    (job,) = snippets("python")
    (tmp_path / "job.py").write_text(job)
    environment = {name: value for name, value in os.environ.items() if name != "RLPLANE_CONTROLLER_ADDRESS"}
    done = run_warm(
        [sys.executable, "job.py"],
        cwd=tmp_path,
        env=environment | {"RLPLANE_AS_TRANSFER_QUEUE": "1"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "trained on 16 trajectories"


def test_the_config_of_a_shared_queue_is_a_config(tmp_path: Path) -> None:
    (config,) = snippets("toml")
    (tmp_path / "plane.toml").write_text(config)
    assert load_config(tmp_path / "plane.toml")["transfer_queue"]["native"] is True


def test_verls_own_config_is_accepted() -> None:
    from omegaconf import OmegaConf

    verl = Path(sys.prefix) / "verl" / "verl"
    conf = OmegaConf.load(verl / "trainer" / "config" / "transfer_queue" / "transfer_queue.yaml")
    assert engine_config(merged(conf), 1)["backend"] == "shm"


def test_the_module_has_every_name_of_transfer_queue() -> None:
    from importlib import metadata

    (init,) = [
        file for file in metadata.files("TransferQueue") or [] if str(file) == "transfer_queue/__init__.py"
    ]
    listed = re.search(
        r"^__all__ = \((.*?)^\)", Path(str(init.locate())).read_text(), re.DOTALL | re.MULTILINE
    )
    assert listed is not None
    assert set(re.findall(r'"(\w+)"', listed[1])) <= set(transfer_queue.__all__)
