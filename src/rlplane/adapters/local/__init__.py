"""Engines for one machine: a client is a connection and a storage.

memory.py       MemoryDataPlaneClient: service and storage inside the process
shm.py          ShmDataPlaneClient: a service process, Unix sockets and shared memory
process.py      the process that the service of one machine runs in
logs.py         where that process logs to, without waiting for a reader
supervisor.py   Supervisor: starts that process, and starts it again when it dies
"""
