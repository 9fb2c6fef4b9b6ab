"""Shared memory, for the processes of one machine.

directory.py   a plane's directory in /dev/shm: segments, socket, lock; how stale planes are found
arena.py       which bytes are whose; pure bookkeeping
host.py        ShmHost: the service's half, with the files behind the arena
client.py      ShmStorage: the client's half, which copies in and hands out without a copy
segment.py     one file: which of its addresses are free, which of its pages exist
holes.py       giving pages back to the machine
mapping.py     segments and private mappings of them, and the leases that those hold
doctor.py      whether this machine can do it
"""
