"""The tests that TransferQueue ships in its wheel, run against our module under its name.

They run in a Python of their own, in which ``import transfer_queue`` gives ours, with a plugin that answers
what they ask TransferQueue's controller by Ray (``transfer_queue_stand_in.py``).
"""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
from tests.warm_workers import run_warm

MODULES = {
    "tests/e2e/test_kv_interface_e2e.py": 56,
    "tests/e2e/test_e2e_lifecycle_consistency.py": 8,
    "tests/e2e/test_checkpoint_e2e.py": 9,
    "tests/test_metadata.py": 39,
    "tests/test_samplers.py": 69,
    "tests/test_streaming_dataset.py": 3,
}

ITS_FILES = (
    "it looks for the files of TransferQueue's own format in a checkpoint; ours is one for all engines"
)
ITS_VARIABLE = "it sets a private variable of TransferQueue's to make it look uninitialized"
ITS_WORDS = "it compares the words of an error; ours is raised for the same reason, in other words"
ITS_SLOTS = "it looks into how BatchMeta is pickled"
ITS_STORAGE = "it tests a class inside of TransferQueue's storage units"
# tests/e2e/test_ssd_offload_e2e.py is left out whole: SimpleStorage's offload to SSD is not there.
LEFT_OUT = {
    "TestCheckpointRoundtrip::test_tensor_fields": ITS_FILES,
    "TestIncludeStorageFalse::test_storage_saved_is_true": ITS_FILES,
    "TestCheckpointErrors::test_load_raises_on_storage_unit_count_mismatch": ITS_FILES,
    "TestCheckpointErrors::test_save_raises_if_not_initialized": ITS_VARIABLE,
    "TestCheckpointErrors::test_load_raises_if_not_initialized": ITS_VARIABLE,
    "TestBatchMetaColumnar::test_setstate_readonly_production_status": ITS_SLOTS,
    "TestKVBatchMeta::test_kv_batch_meta_init_validation_keys_tags_mismatch": ITS_WORDS,
    "TestKVBatchMeta::test_kv_batch_meta_init_validation_duplicate_keys": ITS_WORDS,
    "TestKVBatchMeta::test_kv_batch_meta_init_validation_duplicate_fields": ITS_WORDS,
    "TestKVBatchMeta::test_kv_batch_meta_select_keys_validation_duplicate": ITS_WORDS,
    "TestKVBatchMeta::test_kv_batch_meta_select_keys_validation_nonexistent": ITS_WORDS,
    "TestKVBatchMeta::test_kv_batch_meta_reorder_validation_size_mismatch": ITS_WORDS,
    "TestKVBatchMeta::test_kv_batch_meta_reorder_validation_duplicate_indexes": ITS_WORDS,
    "TestKVBatchMeta::test_kv_batch_meta_concat_validation_field_mismatch": ITS_WORDS,
    "TestKVBatchMeta::test_kv_batch_meta_concat_validation_partition_mismatch": ITS_WORDS,
    "TestStorageUnitDataStrict::test_put_data_length_mismatch_raises": ITS_STORAGE,
}


def shipped(name: str) -> str:
    files = metadata.files("TransferQueue") or []
    (found,) = [file for file in files if str(file) == name]
    return str(found.locate())


@pytest.mark.cluster
@pytest.mark.slow
def test_transfer_queues_own_tests_pass_on_our_plane(tmp_path: Path) -> None:
    modules = [shipped(name) for name in MODULES]
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    unwanted = [argument for name in LEFT_OUT for argument in ("--deselect", f"::{name}")]
    options = ["-c", str(tmp_path / "pytest.ini"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    options += ["-p", "tests.integration.transfer_queue_stand_in"]
    roots = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = run_warm(
        [sys.executable, "-m", "pytest", "-p", "no:slipcover", "-v", *options, *unwanted, *modules],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(roots),
            "RLPLANE_AS_TRANSFER_QUEUE": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RLPLANE_CONTROLLER_ADDRESS": "",
        },
        timeout=240,
        cwd=tmp_path,
    )
    tail = "\n".join((done.stdout + done.stderr).splitlines()[-60:])
    assert done.returncode == 0, tail
    counted = re.search(r"(\d+) passed, (?:2 skipped, )?(\d+) deselected", done.stdout)
    assert counted is not None, tail
    # The two that are skipped need a GPU.
    assert int(counted[1]) == sum(MODULES.values()), tail
    assert int(counted[2]) == len(LEFT_OUT), tail
