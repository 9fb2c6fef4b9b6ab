"""How a client is put together, engine by engine.

client.py          PlaneClient: the one client, over a connection and a storage
async_client.py    AsyncPlaneClient: the same on an event loop
calls.py           PlaneCalls: what each call does, as steps that both of them perform
many.py            calls that name very many samples, divided into requests of fewer
steps.py           what a call consists of
link.py            the connection and the storage of a connected client
checkpoint.py      saving and loading a plane, on every engine
local/             one machine: memory and shared memory
transfer_queue/    a cluster: TransferQueue and Mooncake, on Ray; the names of document 002
"""
