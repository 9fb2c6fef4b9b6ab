"""Where the bytes are, and how they get there and back.

    places.py          Layout, Place, and the two halves of a storage: StorageHost and StorageClient
    layout.py          tensors, nested tensors, objects, trees, enums as bytes: the only place that knows
    assembly.py        bytes as tensors again: rows of many blocks become the columns of one read
    joining.py         several answers to one read, as if they had been one
    trees.py           rows with tensors in them: what refers to bytes, and reading one leaf of it
    sums.py            checksums of rows, for readers that verify what they read
    objects.py         Python objects and tags as msgpack, without pickle unless it is allowed
    copying.py         large copies by several threads, and past the caches (_copy.c)
    scratch.py         memory by the page, and a pool of it for what a read gathers
    leases.py          what keeps the bytes of a read from being recycled
    checkpoint.py      all blocks and the control state in one safetensors file
    rows.py            where the rows of a block lie in it
    keyed.py           the service's half of storages that address bytes by a key: counting, and discarding
    chunks.py          the client's half of storages that bytes travel to: places cut into chunks
    memory.py          a dictionary, for clients of one process
    shm/               shared memory, for the processes of one machine
    transfer_queue/    TransferQueue's storage units, on a Ray cluster
    mooncake/          Mooncake's distributed store

Nothing here knows samples, tasks or claims. The service's half of every storage loads no torch.
"""
