"""Mooncake's distributed store.

store.py       MooncakeStore: bytes in and out of it
processes.py   its master, and the units that lend it their memory
network.py     this host's address; tcp or rdma
"""
