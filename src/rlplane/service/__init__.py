"""The control state behind a socket: one protocol, one server loop, one connection class, for every engine.

    core.py         ControlService: requests, places, leases and deadlines around a ControlState; no sockets
    clients.py      what a client holds, and requests that are not answered yet
    reservations.py Reservations: who gets a place, and when
    commits.py      how a write becomes part of the state, one of very many samples in slices
    questions.py    requests that change nothing
    deadlines.py    until when requests wait
    long_work.py    LongWork: what was begun, and is gone on with between others
    long_answers.py LongAnswer, CopiedAnswer: an answer of very many samples, encoded or copied in slices
    checkpoints.py  Checkpoints: a plane that is frozen to be saved, and replaced by one that is loaded
    protocol.py     the messages
    framing.py      messages over a stream socket
    parts.py        how the names of very many samples are divided over several requests
    naming.py       the samples of requests that name very many, which come before them
    sockets.py      unix:// and tcp:// addresses
    server.py       Server: one thread that serves a ControlService over a socket
    peers.py        a connection, as the server sees it
    connection.py   SocketConnection: a client's side of it, a channel per thread
    lifeline.py     Lifeline: what shows that a client lives
    async_connection.py   AsyncConnection: the same on an event loop, any number of requests at once
    in_process.py   both sides inside one process, without a socket
    journal.py      Journal: every input that changes something, on disk before it is answered
    recovery.py     a service built again from its journal, and how its clients come back to it
    forked_dump.py  ForkedDump: the state as it is now, written by a child process
    block_table.py  which blocks are in which places, and which places are still needed
    commit_checks.py, field_rows.py   what a commit says about its bytes, and what a read is told
    dead_rows.py    bytes that no sample refers to any more, in places that are still needed
    lost_rows.py    which rows were lost with a part of the storage
    admission.py    which put may use which part of the room
    stall.py        how long the loop was busy with one thing, and long looks in slices

Nothing here loads torch, so that a service starts in a fraction of a second.
"""
