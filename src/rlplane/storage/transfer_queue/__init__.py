"""TransferQueue's storage units.

units.py   StorageUnits: bytes in and out of them, over ZMQ, without TransferQueue's controller
"""
