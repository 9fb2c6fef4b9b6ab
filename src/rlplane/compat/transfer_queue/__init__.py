"""TransferQueue 0.1.11's module, on our engines: ``from rlplane.compat import transfer_queue as tq``.

Programs that ``import transfer_queue``, verl among them, get it under that name after :func:`install`, or
with ``RLPLANE_AS_TRANSFER_QUEUE=1`` in their environment. ``docs/verl.md`` says what is the same
and what is not.
"""

# Where things are:
#
#   interface.py    init, close, kv_put and its like: the functions of the module
#   client.py       TransferQueueClient: by index
#   metadata.py     KVBatchMeta and BatchMeta
#   sampler.py      the samplers;  sampling.py: how one is used by many processes
#   dataloader.py   StreamingDataset, StreamingDataLoader
#   calls.py        what each call does on the plane
#   session.py      this process's connection;  rendezvous.py: how it finds the plane;  conf.py: the config
#   metrics.py      /metrics
#   ../transfer_queue_import.py   install

from rlplane.compat.transfer_queue.calls import StorageKeyNotFoundError
from rlplane.compat.transfer_queue.client import TransferQueueClient
from rlplane.compat.transfer_queue.dataloader import StreamingDataLoader, StreamingDataset
from rlplane.compat.transfer_queue.interface import (
    async_kv_batch_get,
    async_kv_batch_get_by_meta,
    async_kv_batch_put,
    async_kv_clear,
    async_kv_list,
    async_kv_put,
    close,
    get_client,
    get_metrics_endpoint,
    init,
    kv_batch_get,
    kv_batch_get_by_meta,
    kv_batch_put,
    kv_clear,
    kv_list,
    kv_put,
    load_checkpoint,
    save_checkpoint,
)
from rlplane.compat.transfer_queue.metadata import BatchMeta, KVBatchMeta
from rlplane.compat.transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from rlplane.compat.transfer_queue_import import install

__all__ = [
    "BaseSampler",
    "BatchMeta",
    "GRPOGroupNSampler",
    "KVBatchMeta",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StorageKeyNotFoundError",
    "StreamingDataLoader",
    "StreamingDataset",
    "TransferQueueClient",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "install",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
]

__version__ = "0.1.11"
"""The version of TransferQueue whose interface this is."""
