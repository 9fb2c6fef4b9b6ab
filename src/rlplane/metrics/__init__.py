"""The live metrics service: one picture of all processes of a run, exact at the end. Loads no torch.

The way of an event, module by module:

``events``      what a worker says, and the batch it travels in
``sender``      the worker's side
``aggregator``  the process that collects; ``launcher`` starts it from a program, ``discovery`` finds it
``ledger``      counts: ``operations``, ``lives`` (on top of ``table``), ``timeline``
``registry``    counters, gauges and series; ``hdr`` and ``values`` are a series' histogram and raw values
``snapshot``    what is published; ``publisher`` and ``subscriber`` are its two ends
``journal``     the events as JSON lines, and the figures from them once more
"""
