"""The live metrics service: one picture of all processes of a run, exact at the end. Loads no torch.

The way of an event, module by module:

``events``            what a worker says, and the batch it travels in
``event_publisher``   the worker's side, on a thread of ``background``
``aggregator``        the process that collects
``launcher``          starts an aggregator from a program and brings its report back
``discovery``         finds the aggregators of this machine
``event_logger``      the events as JSON lines, and the figures from them once more
``run_state``         all that is known about a run: batches go in, snapshots come out
``operations``        operations by partition and by worker
``sample_lifecycle``  samples and partitions in numbers, on top of ``metrics_table``
``metrics_table``     one row per sample in flight
``timeline``          the whole run in a few hundred points
``registry``          counters, gauges and series
``hdr``, ``values``   a series' histogram and its raw values
``snapshot``          what is published
``publisher``         publishes snapshots at a fixed rate, and the final one to a file too
``subscriber``        a viewer's side
"""
