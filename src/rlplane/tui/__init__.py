"""``rlplane top``: a run on the terminal. Needs the extra ``tui``; loads no torch.

app.py         the application: takes each snapshot and gives every pane its share
header.py      state, health, how old the picture is, and the figures of now
panes.py       which columns the tables of operations, partitions, workers, samples and the log have
live_table.py  a table that draws only the rows that are seen
screens.py     one partition, the final report, the keys
sparks.py      lines of blocks
"""
