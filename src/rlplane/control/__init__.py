"""The control state of a plane, pure: no socket, clock, thread, file or tensor.

state.py       ControlState: all partitions, what waits for room, which blocks are still needed
partition.py   one partition: registering, writing, removing, and the parts that it consists of
  samples.py        its samples by row, with their tags and fields
  names.py          the row of each sample by its id
  fields.py         where the values of one field are
  turns.py          the earlier pieces of those that grow turn by turn
  group_members.py  which rows are a group, how large it is to become, how long it has waited
  cursors.py        its tasks: what each has claimed, and the queues of what is ready
  claims.py         how claims are answered, those that wait among them
  flow_control.py   its flow policy, applied to rows
  looking.py        questions that change nothing
looking_ahead.py  what is looked at before a request, in pieces
staging.py     a put of many samples, made ready a slice at a time
clearing.py    a clear of many samples, a slice at a time
marking.py     many samples that are marked as claimed by hand, found a slice at a time
unclaiming.py  the end of a claim of many samples, a slice at a time
leaving.py     what a client held that is gone, given back a slice at a time
advancing.py   a new version, and what it makes too old, a slice at a time
snapshots.py   ids and tags of many samples at one moment, read a slice at a time
copies.py      columns at one moment, copied a slice at a time
sorted_rows.py  many samples in an order, sorted while they are read
losing.py      samples that have lost bytes, given up some rows at a time
arrays.py      columns that grow
queues.py      samples that are ready for a task, in the order in which they became ready
groups.py      the same for whole GRPO groups
making.py      a queue of many groups, built a slice at a time
ordered.py     groups in another order
ordered_rows.py  samples in another order
flow.py        what a partition remembers for its flow policy
steps.py       batches that data-parallel ranks share
tag_index.py   rows by the value of a tag, for tags that are asked for
group_names.py  the groups that samples get when a partition is registered with groups
versions.py    the version of each row, for policies that evict by it
conditions.py  which rows satisfy the conditions that were asked for
line.py        the order in which requests that wait for room get it
policies.py    FlowPolicy, and the decisions of flow control: age, admission, order
requests.py    Put, Claim, Batch, and Effects: what follows from a change
rules.py       what a request may say: names, ids, tag conditions
dump.py        the state as bytes
loading.py     the state built again from these, piece by piece
"""
