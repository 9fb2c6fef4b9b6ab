"""``observability: {verify: true}`` on a cluster: the same sums, over bytes that have travelled."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from rlplane.adapters.transfer_queue import TQDataPlaneClient
from rlplane.service import protocol as wire
from rlplane.storage.chunks import Chunk, ChunkedStorage, chunk_keys
from rlplane.storage.places import Located
from rlplane.storage.scratch import scratch
from rlplane.storage.sums import CheckCounts

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
VERIFY = {"observability.enabled": True, "observability.verify": True}
IDS = ["a", "b", "c"]


def read(client: TQDataPlaneClient, ids: list[str]) -> CheckCounts:
    client.get_samples(ids, "p", ["x", "mm"])
    assert client.row_checks is not None
    return client.row_checks.take()


def change_a_byte(client: TQDataPlaneClient) -> None:
    """Of field ``x`` of sample ``a``, in the storage unit that holds it."""
    link = client._link()
    located = link.request(wire.Locate("p", ["a"], ["x"]), Located)
    ((_, start, _),) = located.blocks.values()
    assert isinstance(link.storage, ChunkedStorage)
    (place,) = located.places
    (key,) = chunk_keys(place)
    buffer, chunk = scratch.empty(place.size), Chunk(key, 0, place.size)
    link.storage._store.get([chunk], buffer)
    buffer[start] ^= 1
    link.storage._store.drop([chunk])
    link.storage._store.put([chunk], buffer, time.monotonic() + 60)
    link.connection.release(located.lease)


@pytest.mark.parametrize("backend", ["simple", "mooncake_cpu"])
def test_what_another_client_wrote_is_verified(
    backend: str, start_plane: Callable[..., TQDataPlaneClient]
) -> None:
    client = start_plane(backend, **VERIFY)
    client.register_partition("p", ["x", "mm"], 3, ["train"])
    trees = NonTensorStack(*[{"image": torch.rand(n + 1, 5), "note": "x"} for n in range(3)])
    client.put_samples(IDS, "p", TensorDict({"x": torch.rand(3, 4), "mm": trees}, batch_size=[3]))
    reader = TQDataPlaneClient(client._cfg, bootstrap=False)
    try:
        found = read(reader, ["c", "a", "b"])
        assert (found.checked, found.mismatched.total()) == ({("p", "x"): 3, ("p", "mm"): 3}, 0)
        if backend == "simple":  # Mooncake keeps a value for a while that somebody has read
            change_a_byte(client)
            assert [m[1:] for m in read(reader, IDS).mismatches] == [("x", "a")]
    finally:
        reader.close()
