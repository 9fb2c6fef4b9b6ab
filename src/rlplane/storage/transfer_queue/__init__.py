"""TransferQueue's storage units.

units.py   StorageUnits: bytes in and out of them, over ZMQ, without TransferQueue's controller
theirs.py  TransferQueue's own modules, also where ours stand in for its public ones
"""
