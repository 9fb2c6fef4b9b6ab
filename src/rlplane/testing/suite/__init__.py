"""The checks, one file per subject of the contract. ``rlplane.testing.checks()`` lists them in this order.

registering.py   register_partition, the first time and again
writing.py       put_samples: all or nothing, replaced fields, merged tags, the meta that comes back
columns.py       tensors: dtype, shape, layout and values come back as they went in
objects.py       Python objects in columns and tags
trees.py         rows that are trees of tensors and objects
appending.py     fields that grow turn by turn
capacity.py      a plane that is full
claiming.py      claim_meta: each sample once per task, in the order of readiness
tails.py         when a blocking claim returns less than a batch
waiting.py       what wakes a waiting claim, and what a timeout does
groups.py        claims of whole groups
where.py         conditions on tags
budgets.py       claims of so many tokens
peeking.py       peek_meta and count: a look that moves nothing
ordering.py      claims in another order
reuse.py         samples that a task claims more than once
flow.py          flow policies: how old a sample may be, and which prompts may begin
short_groups.py  groups that end short
ranks.py         claims of data-parallel ranks
reading.py       get_samples and get_data: the rows and fields that were asked for, in that order
isolation.py     changes to what was read or written are seen by nobody else
consumption.py   check_consumption_status
clearing.py      clear_samples
closing.py       close, and the classes of errors
status.py        the optional list_sample_ids and partition_status
"""
