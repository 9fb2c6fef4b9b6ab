"""Mooncake's distributed store.

store.py       MooncakeStore: bytes in and out of it
sharing.py     one connection to it for all of a process
processes.py   its master, and the units that lend it their memory
network.py     this host's address; tcp or rdma
"""
