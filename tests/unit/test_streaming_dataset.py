"""StreamingDataset: each sample once, from one reader or many, to the end of the flow."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from rlplane import DataPlaneClient, build_data_plane_client, load_config, pack_jagged_fields
from rlplane.data import StreamingDataset


@pytest.fixture
def client() -> Iterator[DataPlaneClient]:
    with build_data_plane_client(load_config("local")) as client:
        yield client


@pytest.fixture
def shared() -> Iterator[DataPlaneClient]:
    small = {"global_segment_size": 64 << 20, "local_buffer_size": 1 << 20}
    with build_data_plane_client(load_config("shm", small)) as client:
        yield client


def register(client: DataPlaneClient, num_samples: int, group_size: int | None = None) -> None:
    client.register_partition("p", ["x", "y"], num_samples, ["train"], group_size)


def write(client: DataPlaneClient, numbers: range, field: str = "x", tag: int = 0) -> None:
    values = TensorDict({field: torch.tensor(list(numbers))}, batch_size=[len(numbers)])
    client.put_samples([f"s{n}" for n in numbers], "p", values, [{"tag": tag}] * len(numbers))


def read(dataset: Any) -> list[list[int]]:
    return [batch["x"].tolist() for batch in dataset]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_it_gives_each_sample_once_in_order_and_ends_when_the_partition_is_drained(
    client: DataPlaneClient, prefetch: int
) -> None:
    register(client, 10)
    write(client, range(10))
    dataset = StreamingDataset(client, "p", "train", ["x"], 4, prefetch=prefetch)
    assert read(dataset) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert read(dataset) == []


def test_it_goes_on_while_the_flow_does(client: DataPlaneClient) -> None:
    register(client, 12)
    write(client, range(4))
    batches = iter(StreamingDataset(client, "p", "train", ["x"], 4))
    assert next(batches)["x"].tolist() == [0, 1, 2, 3]

    def write_the_rest() -> None:
        for first in range(4, 12, 2):
            write(client, range(first, first + 2))

    writer = threading.Thread(target=write_the_rest)
    writer.start()
    assert read(batches) == [[4, 5, 6, 7], [8, 9, 10, 11]]
    writer.join()


def test_it_waits_for_the_fields_it_reads(client: DataPlaneClient) -> None:
    register(client, 4)
    write(client, range(4))
    batches = iter(StreamingDataset(client, "p", "train", ["x", "y"], 4))
    got: list[Any] = []
    reader = threading.Thread(target=lambda: got.extend(batches))
    reader.start()
    write(client, range(4), "y")
    reader.join(30)
    assert [batch["y"].tolist() for batch in got] == [[0, 1, 2, 3]]


def test_a_flow_that_goes_past_its_number_of_samples_is_read_to_its_end(client: DataPlaneClient) -> None:
    register(client, 4)
    write(client, range(7))
    batches = read(StreamingDataset(client, "p", "train", ["x"], 4))
    assert [number for batch in batches for number in batch] == list(range(7))


def test_with_a_condition_it_ends_when_nothing_that_is_left_can_match(client: DataPlaneClient) -> None:
    register(client, 6)
    write(client, range(3), tag=1)
    write(client, range(3, 6), tag=2)
    assert read(StreamingDataset(client, "p", "train", ["x"], 2, where={"tag": 2})) == [[3, 4], [5]]
    assert client.partition_status("p")["tasks"]["train"]["unclaimed"] == 3


def test_a_group_that_never_becomes_whole_does_not_keep_it_open(client: DataPlaneClient) -> None:
    register(client, 3, group_size=2)
    values = TensorDict({"x": torch.arange(3)}, batch_size=[3])
    client.put_samples(["a_g0", "a_g1", "b_g0"], "p", values)
    assert read(StreamingDataset(client, "p", "train", ["x"], 2)) == [[0, 1]]


def test_it_clears_what_it_has_read_when_asked(client: DataPlaneClient) -> None:
    register(client, 6)
    write(client, range(6))
    assert read(StreamingDataset(client, "p", "train", ["x"], 3, clear=True)) == [[0, 1, 2], [3, 4, 5]]
    assert client.list_sample_ids("p") == []


def test_the_meta_comes_along_when_asked(client: DataPlaneClient) -> None:
    register(client, 2)
    write(client, range(2))
    ((meta, data),) = StreamingDataset(client, "p", "train", ["x"], 2, with_meta=True)
    assert meta.sample_ids == ["s0", "s1"] and data["x"].tolist() == [0, 1]


def test_an_iteration_that_is_left_ends_its_thread(client: DataPlaneClient) -> None:
    register(client, 0)
    write(client, range(8))
    batches = iter(StreamingDataset(client, "p", "train", ["x"], 2, prefetch=2))
    assert isinstance(batches, Generator)
    next(batches)
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rlplane-prefetch"]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_the_plane_reaches_the_reader(client: DataPlaneClient, prefetch: int) -> None:
    register(client, 1)
    with pytest.raises(KeyError, match="nobody"):
        next(iter(StreamingDataset(client, "p", "nobody", ["x"], 1, prefetch=prefetch)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fields": []}, "fields is empty"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"prefetch": -1}, "prefetch is -1"),
    ],
)
def test_arguments_that_can_never_be_right_are_refused(
    client: DataPlaneClient, change: dict[str, Any], message: str
) -> None:
    wanted = {"partition_id": "p", "task_name": "train", "fields": ["x"], "batch_size": 2, **change}
    with pytest.raises(ValueError, match=message):
        StreamingDataset(client, **wanted)


def test_an_engine_of_one_process_refuses_loader_workers(client: DataPlaneClient) -> None:
    register(client, 2)
    write(client, range(2))
    loader = DataLoader(
        StreamingDataset(client, "p", "train", ["x"], 1),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
    )
    with pytest.raises(ValueError, match="lives in one process"):
        list(loader)


@pytest.mark.parametrize(("start", "layout"), [("fork", "padded"), ("fork", "jagged"), ("spawn", "jagged")])
def test_loader_workers_share_the_samples_out(shared: DataPlaneClient, start: str, layout: Any) -> None:
    register(shared, 24)
    rows = [torch.full((1 + n % 5,), n) for n in range(24)]
    columns = pack_jagged_fields({"x": rows}, lengths=[len(row) for row in rows], token_aligned_fields=["x"])
    shared.put_samples([f"s{n}" for n in range(24)], "p", columns)
    dataset = StreamingDataset(shared, "p", "train", ["x"], 4, layout=layout)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=start)
    assert sorted(row[0].item() for batch in loader for row in batch["x"].unbind()) == list(range(24))
    assert shared.check_consumption_status("p", ["train"])


def test_ranks_that_read_at_the_same_time_get_each_sample_once(shared: DataPlaneClient) -> None:
    register(shared, 40)
    write(shared, range(40))
    got: list[list[int]] = [[], []]

    def rank(number: int) -> None:
        dataset = StreamingDataset(shared, "p", "train", ["x"], 4, dp_rank=number)
        got[number] = [sample for batch in read(dataset) for sample in batch]

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(got[0] + got[1]) == list(range(40))


def test_it_builds_a_client_of_its_own_from_a_config(shared: DataPlaneClient) -> None:
    register(shared, 2)
    write(shared, range(2))
    assert read(StreamingDataset(load_config("shm"), "p", "train", ["x"], 2)) == [[0, 1]]


# Ranks


def ranks(client: DataPlaneClient, world: int, **how: Any) -> list[StreamingDataset]:
    return [
        StreamingDataset(client, "p", "train", ["x"], 2, dp_rank=rank, dp_world=world, **how)
        for rank in range(world)
    ]


def take(dataset: StreamingDataset, count: int | None = None) -> list[int]:
    """The samples of some batches, after which the iteration is left, or of all."""
    with contextlib.closing(iter(dataset)) as batches:  # type: ignore[type-var]
        return [number for batch in itertools.islice(batches, count) for number in batch["x"].tolist()]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("clear", [False, True])
def test_what_ranks_read_ahead_and_did_not_use_comes_with_the_next_iteration(
    client: DataPlaneClient, prefetch: int, clear: bool
) -> None:
    register(client, 12)
    write(client, range(12))
    both = ranks(client, 2, prefetch=prefetch, clear=clear)
    first = [take(dataset, 1) for dataset in both]
    rest = [take(dataset) for dataset in both]
    assert sorted(itertools.chain(*first, *rest)) == list(range(12))
    assert [len(numbers) for numbers in rest] == [4, 4]
    assert [read(dataset) for dataset in both] == [[], []]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_rank_that_is_started_again_goes_on_where_it_was(client: DataPlaneClient, prefetch: int) -> None:
    register(client, 12)
    write(client, range(12))
    both = ranks(client, 2, prefetch=prefetch, clear=True)
    used = take(both[0], 2) + take(both[1], 1)
    both = ranks(client, 2, prefetch=prefetch, clear=True)  # in another process
    used += take(both[1]) + take(both[0])
    assert sorted(used) == list(range(12))


def test_after_the_end_ranks_read_what_a_new_registration_brings(client: DataPlaneClient) -> None:
    both = ranks(client, 2, clear=True)
    for first in (0, 4):
        register(client, 4)
        write(client, range(first, first + 4))
        assert sorted(take(both[0]) + take(both[1])) == list(range(first, first + 4))


def test_the_last_group_is_read_although_it_ends_by_its_clock_only_after_the_flow(
    client: DataPlaneClient,
) -> None:
    policy = {"finished_fields": ["x"], "min_group_size": 1, "group_timeout_s": 0.5}
    client.register_partition("p", ["x"], 0, ["train"], 2, flow=policy)
    values = TensorDict({"x": torch.arange(3)}, batch_size=[3])
    client.put_samples(["a_g0", "a_g1", "b_g0"], "p", values)
    client.finish_partition("p")
    assert read(StreamingDataset(client, "p", "train", ["x"], 2)) == [[0, 1], [2]]
