"""Columns and metas, as trainers handle them.

codec.py      padded <-> jagged columns
padding.py    where the tokens of padded rows are, as the caller says
io.py         kv_first_write, read_columns, write_columns
sharding.py   shard_meta_for_dp: a batch divided over data-parallel ranks
"""
