"""TransferQueue's interface on our plane, where TransferQueue's own tests do not look."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from tests.integration.conftest import cluster_config
from tests.warm_workers import run_warm

from rlplane.compat import transfer_queue as tq
from rlplane.compat.transfer_queue.conf import build_sampler, engine_config, merged
from rlplane.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage.*")
POLLING = {"controller": {"polling_mode": True}, "rlplane": {"global_segment_size": 64 << 20}}


def rows(count: int, **columns: Any) -> TensorDict:
    return TensorDict({"x": torch.arange(count), **columns}, batch_size=count)


def keys(count: int, prefix: str = "k") -> list[str]:
    return [f"{prefix}{row}" for row in range(count)]


def in_another_process(code: str) -> Any:
    """What ``code`` prints, as JSON; it runs in a child, which finds the plane by itself."""
    done = run_warm(
        [sys.executable, "-c", f"import json\nfrom rlplane.compat import transfer_queue as tq\n{code}"],
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> Iterator[None]:
    """A TransferQueue with the sampler that the test asks for."""
    sampler = getattr(request, "param", "SequentialSampler")
    tq.init({**POLLING, "controller": {"polling_mode": True, "sampler": sampler}})
    yield
    tq.close()


# Reading what is not all there


def test_a_key_that_is_missing_is_an_error_that_names_it_and_not_a_shorter_batch(queue):
    tq.kv_batch_put(keys(2), "p", rows(2))
    with pytest.raises(tq.StorageKeyNotFoundError, match="'gone'") as caught:
        tq.kv_batch_get(["k0", "gone"], "p")
    assert isinstance(caught.value, (KeyError, ValueError))
    with pytest.raises(ValueError, match="not found"):
        tq.kv_batch_get(["k0"], "nowhere", "x")


def test_a_field_that_some_keys_lack_is_an_error_and_one_that_all_lack_is_left_out(queue):
    tq.kv_batch_put(keys(2), "p", rows(2))
    tq.kv_put("k1", "p", {"y": torch.ones(3)})
    with pytest.raises(ValueError, match="'y' is not ready: 1 of 2 keys"):
        tq.kv_batch_get(keys(2), "p", ["x", "y"])
    # verl asks for fields that its trainer may not have: "values" without a critic.
    assert set(tq.kv_batch_get(keys(2), "p", ["x", "values"]).keys()) == {"x"}
    with pytest.raises(ValueError, match="no field is ready"):
        tq.kv_batch_get(keys(2), "p", ["values"])


def test_rows_come_back_nested_and_scalars_dense_as_transfer_queue_returns_them(queue):
    fields = rows(2, two=torch.arange(6.0).view(2, 3), text=NonTensorStack("a", "b"))
    tq.kv_batch_put(keys(2), "p", fields)
    read = tq.kv_batch_get(keys(2), "p")
    assert read["x"].tolist() == [0, 1]
    assert read["two"].is_nested and read["two"].offsets().tolist() == [0, 3, 6]
    assert torch.equal(read["two"].to_padded_tensor(0.0), fields["two"])
    assert list(read["text"]) == ["a", "b"]


def test_a_parser_replaces_values_before_they_are_written(queue):
    def load(columns: dict[str, Any]) -> None:
        columns["url"] = [text.upper() for text in columns["url"]]
        columns["x"] += 10

    tq.kv_batch_put(keys(2), "p", rows(2, url=NonTensorStack("a", "b")), data_parser=load)
    read = tq.kv_batch_get(keys(2), "p")
    assert (list(read["url"]), read["x"].tolist()) == (["A", "B"], [10, 11])
    with pytest.raises(ValueError, match="must keep the fields"):
        tq.kv_batch_put(keys(2), "p", rows(2), data_parser=lambda columns: columns.clear())


# Processes, threads and loops


def test_a_child_joins_by_itself_and_its_close_leaves_the_queue_alone(queue):
    tq.kv_batch_put(keys(2), "p", rows(2), [{"v": 1}, {"v": 2}])
    seen = in_another_process("tq.init(); print(json.dumps(tq.kv_list())); tq.close()")
    assert seen == {"p": {"k0": {"v": 1}, "k1": {"v": 2}}}
    assert tq.kv_list() == seen


def test_every_event_loop_has_its_own_way_to_the_plane(queue):
    async def work(name: str) -> int:
        for _ in range(5):
            await asyncio.gather(*(tq.async_kv_put(key, name, {"x": torch.ones(2)}) for key in keys(4)))
        return len((await tq.async_kv_list(name))[name])

    found: dict[str, int] = {}
    threads = [
        threading.Thread(target=lambda name=name: found.update({name: asyncio.run(work(name))}))
        for name in ("a", "b", "c")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {"a": 4, "b": 4, "c": 4}


def test_without_a_queue_calls_say_what_to_do():
    with pytest.raises(RuntimeError, match=r"call init\(\) first"):
        tq.kv_list()
    assert tq.get_metrics_endpoint() is None


def test_the_queue_can_be_started_again_after_it_was_closed():
    for _ in range(2):
        tq.init(POLLING)
        assert tq.kv_list() == {}
        tq.kv_put("k", "p", tag={"v": 1})
        tq.close()


def test_a_plane_that_is_gone_does_not_keep_a_new_one_from_starting(monkeypatch):
    monkeypatch.setenv("RLPLANE_CONTROLLER_ADDRESS", "shm:///dev/shm/rlplane-of-nobody")
    with pytest.raises(RuntimeError, match="not initialized"):
        tq.kv_list()
    tq.init(POLLING)
    assert tq.kv_list() == {}
    tq.close()


def test_what_the_plane_holds_can_be_scraped():
    tq.init({**POLLING, "metrics": {"enabled": True}})
    try:
        tq.kv_batch_put(keys(3), "train", rows(3))
        url = f"http://{tq.get_metrics_endpoint()}/metrics"
        assert in_another_process("print(json.dumps(tq.get_metrics_endpoint()))") == tq.get_metrics_endpoint()
        text = urllib.request.urlopen(url, timeout=30).read().decode()
        assert 'rlplane_partition_samples{partition="train"} 3.0' in text
        assert 'rlplane_partition_field_samples{field="x",partition="train"} 3.0' in text
    finally:
        tq.close()


# Consuming


def test_a_fetch_that_waits_is_woken_by_the_write():
    tq.init({"rlplane": POLLING["rlplane"]})
    try:
        found: list[tq.BatchMeta] = []
        client = tq.get_client()
        waiting = threading.Thread(target=lambda: found.append(client.get_meta(["x"], 2, "p", task_name="t")))
        waiting.start()
        tq.kv_put("k0", "p", {"x": torch.ones(1)})
        tq.kv_put("k1", "p", {"x": torch.ones(1)})
        waiting.join(60)
        assert len(found[0]) == 2
    finally:
        tq.close()


def test_a_fetch_that_waited_in_vain_says_so(monkeypatch):
    monkeypatch.setenv("TQ_CONTROLLER_GET_METADATA_TIMEOUT", "0.05")
    for sampler in ("SequentialSampler", "RankAwareSampler"):
        tq.init({"controller": {"sampler": sampler}, "rlplane": POLLING["rlplane"]})
        try:
            with pytest.raises(TimeoutError, match="waited for 2 samples"):
                tq.get_client().get_meta(["x"], 2, "p", task_name="t", sampling_config={})
        finally:
            tq.close()


@pytest.mark.parametrize("queue", ["RankAwareSampler"], indirect=True)
def test_processes_of_one_rank_get_the_same_batch_and_other_ranks_another(queue):
    tq.get_client().put(rows(8), partition_id="p")
    config = {"dp_rank": 0, "batch_index": 0, "task_name": "t", "partition_id": "p"}
    first = tq.get_client().get_meta(["x"], 4, "p", task_name="t", sampling_config=config)
    assert first.global_indexes == [0, 1, 2, 3]
    code = (
        f"config = {config}\n"
        "for rank in (0, 1):\n"
        "    config['dp_rank'] = rank\n"
        "    meta = tq.get_client().get_meta(['x'], 4, 'p', task_name='t', sampling_config=config)\n"
        "    found = [] if rank == 0 else found\n"
        "    found.append([meta.global_indexes, tq.get_client().get_data(meta)['x'].tolist()])\n"
        "print(json.dumps(found))"
    )
    assert in_another_process(code) == [[[0, 1, 2, 3], [0, 1, 2, 3]], [[4, 5, 6, 7], [4, 5, 6, 7]]]
    assert tq.get_client().check_consumption_status("t", "p")


@pytest.mark.parametrize("queue", [tq.SeqlenBalancedSampler(2, 2)], indirect=True, ids=["two ranks"])
def test_ranks_share_whole_groups_by_their_tokens(queue):
    client = tq.get_client()
    meta = client.put(rows(8), partition_id="p")
    meta.update_custom_meta([{"total_lengths": tokens} for tokens in (90, 10, 30, 30, 20, 20, 10, 10)])
    client.set_custom_meta(meta)
    parts = []
    for rank in range(2):
        config = {"dp_rank": rank, "batch_index": 0, "task_name": "t", "partition_id": "p"}
        parts.append(client.get_meta(["x"], 4, "p", task_name="t", sampling_config=config).global_indexes)
    assert parts == [[0, 1, 6, 7], [2, 3, 4, 5]]


class Newest(tq.BaseSampler):
    """A sampler of the user's."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
        chosen = sorted(ready_indexes, reverse=True)[:batch_size]
        return chosen, chosen[:1]


@pytest.mark.parametrize("queue", [Newest], indirect=True, ids=["newest"])
def test_a_sampler_of_the_users_decides_what_is_consumed(queue):
    client = tq.get_client()
    client.put(rows(4), partition_id="p")
    picked = [client.get_meta(["x"], 2, "p", task_name="t").global_indexes for _ in range(3)]
    assert picked == [[3, 2], [2, 1], [1, 0]]
    client.clear_partition("p")
    assert len(client.get_meta(["x"], 2, "p", task_name="t")) == 0


def test_a_batch_made_by_hand_is_found_by_its_indexes(queue):
    client = tq.get_client()
    made = client.put(rows(3), partition_id="p")
    by_hand = tq.BatchMeta(made.global_indexes[1:], ["p", "p"], {"x": {}})
    assert client.get_data(by_hand)["x"].tolist() == [1, 2]
    with pytest.raises(tq.StorageKeyNotFoundError, match="99"):
        client.get_data(tq.BatchMeta([99], ["p"], {"x": {}}))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_goes_through_a_partition_and_stops(queue, workers):
    tq.kv_batch_put(keys(8), "p", rows(8, y=torch.arange(24).view(8, 3)))
    dataset = tq.StreamingDataset(None, 4, 2, ["x", "y"], "p", "t", 0, should_check_consumption_status=True)
    seen = []
    for data, meta in tq.StreamingDataLoader(dataset, num_workers=workers):
        assert len(meta) == 2 and data["y"].is_nested
        seen += data["x"].tolist()
    assert sorted(seen) == list(range(8))


# Checkpoints


def test_a_checkpoint_has_what_was_consumed_and_what_the_sampler_remembers(tmp_path):
    conf = {**POLLING, "controller": {"polling_mode": True, "sampler": "RankAwareSampler"}}
    config = {"dp_rank": 0, "batch_index": 0, "task_name": "t", "partition_id": "p"}
    tq.init(conf)
    tq.kv_put("gone", "p", tag={"v": 9})
    tq.kv_batch_put(keys(4), "p", rows(4), [{"v": row} for row in range(4)])
    tq.kv_clear("gone", "p")
    first = tq.get_client().get_meta(["x"], 2, "p", task_name="t", sampling_config=config)
    tq.save_checkpoint(tmp_path / "saved", metadata={"step": 3})
    tq.close()
    tq.init(conf)
    try:
        tq.load_checkpoint(tmp_path / "saved")
        assert tq.kv_list()["p"]["k3"] == {"v": 3}
        again = tq.get_client().get_meta(["x"], 2, "p", task_name="t", sampling_config=config)
        assert again.global_indexes == first.global_indexes == [1, 2]
        rest = tq.get_client().get_meta(
            ["x"], 2, "p", task_name="t", sampling_config={**config, "batch_index": 1}
        )
        assert tq.get_client().get_data(rest)["x"].tolist() == [2, 3]
    finally:
        tq.close()


# The config


def test_the_config_says_which_engine_serves_it():
    simple = {"backend": {"SimpleStorage": {"total_storage_size": 200}}}
    assert engine_config(merged(simple), 1)["backend"] == "shm"
    assert engine_config(merged(simple), 1)["storage_capacity"] == 200
    assert engine_config(merged(simple), 3)["backend"] == "simple"
    mooncake = merged({"backend": {"storage_backend": "MooncakeStore"}})
    assert engine_config(mooncake, 1)["backend"] == "mooncake_cpu"
    assert engine_config(merged({"rlplane": {"backend": "memory"}}), 1)["backend"] == "memory"
    with pytest.raises(ConfigError, match="'Yuanrong'"):
        engine_config(merged({"backend": {"storage_backend": "Yuanrong"}}), 1)
    with pytest.raises(ConfigError, match=r"rlplane\.backend is 'disk'"):
        engine_config(merged({"rlplane": {"backend": "disk"}}), 1)
    with pytest.raises(ValueError, match="'Random'"):
        build_sampler(merged({"controller": {"sampler": "Random"}}))


def test_the_memory_engine_serves_it_too():
    tq.init({**POLLING, "rlplane": {"backend": "memory"}})
    try:
        tq.kv_batch_put(keys(2), "p", rows(2, y=torch.ones(2, 3)))
        assert tq.kv_batch_get(keys(2), "p")["y"].is_nested
    finally:
        tq.close()


@pytest.mark.cluster
@pytest.mark.slow
def test_the_engine_of_a_cluster_serves_it_and_ray_workers_find_it(ray_cluster):
    import ray

    own = {key: value for key, value in cluster_config("simple").items() if key not in ("impl", "enabled")}
    tq.init({**POLLING, "rlplane": own})
    try:
        tq.kv_batch_put(
            keys(3), "p", rows(3, y=torch.arange(6.0).view(3, 2)), [{"v": row} for row in range(3)]
        )

        @ray.remote(num_cpus=0)
        def work() -> Any:
            from rlplane.compat import transfer_queue as theirs

            theirs.init()
            total = theirs.kv_batch_get(["k1", "k2"], "p", "y")["y"].values().sum().item()
            theirs.kv_put("k0", "p", {"total": torch.tensor([total])}, {"done": True})
            theirs.close()
            return total

        assert ray.get(work.remote(), timeout=300) == 14.0
        assert tq.kv_batch_get("k0", "p", "total")["total"].values().tolist() == [14.0]
        assert tq.kv_list("p")["p"]["k0"] == {"v": 0, "done": True}
    finally:
        tq.close()


# Under their name


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.strip()


def test_after_install_their_name_gives_our_modules():
    code = (
        "from rlplane.compat.transfer_queue_import import install\n"
        "install(); install()\n"
        "import transfer_queue, transfer_queue.sampler.rank_aware_sampler as ranks\n"
        "from transfer_queue.metadata import BatchMeta\n"
        "from rlplane.compat import transfer_queue as ours\n"
        "assert transfer_queue is ours and BatchMeta is ours.BatchMeta\n"
        "assert ranks.RankAwareSampler is ours.RankAwareSampler\n"
        "try:\n    import transfer_queue.controller\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    assert "has its public modules only, not 'transfer_queue.controller'" in run_python(code)


def test_install_is_refused_when_the_real_one_is_there_already():
    code = (
        "import sys, types; sys.modules['transfer_queue'] = types.ModuleType('transfer_queue')\n"
        "from rlplane.compat.transfer_queue_import import install\n"
        "try:\n    install()\nexcept RuntimeError as error:\n    print(error)"
    )
    assert "imported already" in run_python(code)


ON_A_CLUSTER = """
import sys
import ray, torch
from tensordict import TensorDict
import transfer_queue as tq

address, backend, storage, namespace = sys.argv[1:]
assert tq.__name__ == "rlplane.compat.transfer_queue"
mine = {"env_vars": {"RLPLANE_AS_TRANSFER_QUEUE": "1"}}
ray.init(address=address, log_to_driver=False, logging_level="ERROR", runtime_env=mine)
own = {"backend": backend, "transfer_queue.namespace": namespace, "transfer_queue.node_ip": "127.0.0.2",
       "num_storage_units": 1, "global_segment_size": 64 << 20, "local_buffer_size": 16 << 20}
tq.init({"backend": {"storage_backend": storage}, "rlplane": own})
x = TensorDict({"x": torch.arange(4.0).view(2, 2)}, batch_size=2)
tq.kv_batch_put(["a", "b"], "p", x, [{}, {"n": 1}])

@ray.remote(num_cpus=0)
def double():
    import transfer_queue
    transfer_queue.init()
    x = transfer_queue.kv_batch_get(["a", "b"], "p", "x")["x"]
    transfer_queue.kv_batch_put(["a", "b"], "p", TensorDict({"y": x * 2}, batch_size=2))
    name = transfer_queue.__name__
    transfer_queue.close()
    return name

assert ray.get(double.remote()) == "rlplane.compat.transfer_queue"
assert [row.tolist() for row in tq.kv_batch_get(["b"], "p", "y")["y"].unbind()] == [[4.0, 6.0]]
assert tq.kv_list("p")["p"]["b"] == {"n": 1}
tq.close()
print("done")
"""


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "storage"), [("simple", "SimpleStorage"), ("mooncake_cpu", "MooncakeStore")]
)
def test_a_job_that_knows_only_their_name_runs_on_a_cluster(ray_cluster, backend, storage):
    done = run_warm(
        [sys.executable, "-c", ON_A_CLUSTER, ray_cluster, backend, storage, f"standing-in-{backend}"],
        env={**os.environ, "RLPLANE_AS_TRANSFER_QUEUE": "1"},
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["done"]


def test_a_client_that_needs_the_real_one_says_so_where_ours_stands_in_for_it():
    code = (
        "from rlplane import load_config\n"
        "from rlplane.adapters.transfer_queue import native_queue\n"
        "native_queue._ensure_ray = lambda cfg, start: False\n"
        "try:\n    native_queue.RunningQueue(load_config('cluster-simple'), bootstrap=True)\n"
        "except ValueError as error:\n    print(error)"
    )
    assert "speaks to the real TransferQueue" in run_python(code, RLPLANE_AS_TRANSFER_QUEUE="1")


def test_a_variable_in_the_environment_of_a_job_does_the_same():
    code = (
        "import sys; assert 'torch' not in sys.modules\nimport transfer_queue; print(transfer_queue.__name__)"
    )
    assert run_python(code, RLPLANE_AS_TRANSFER_QUEUE="1") == "rlplane.compat.transfer_queue"
