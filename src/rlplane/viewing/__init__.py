"""What every viewer of a run needs, whether it draws on a terminal or on a page. Loads no torch.

feed.py        find a run, subscribe to it, follow it over restarts, and say how old the picture is
history.py     a bounded, downsampled past of a run
health.py      what is wrong with it, in words
flow.py        who writes, who claims, who clears, and which stage holds everything up
grid.py        percentiles of what came between two snapshots
operations.py  operations summed up over all partitions
trace.py       a run as a Chrome trace
units.py       numbers for people
"""
