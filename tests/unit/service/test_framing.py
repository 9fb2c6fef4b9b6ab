"""Messages in whatever pieces they come."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplane.service.framing import Inbox, MessageTooLong, message

LONGEST = 200


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=LONGEST)), max_size=8),
    st.lists(st.integers(0, 300), max_size=20),
)
def test_messages_arrive_whole_and_in_order_in_whatever_pieces(
    sent: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(message(number, body) for number, body in sent)
    inbox, received, buffer = Inbox(LONGEST), [], bytearray(1000)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for begin, end in itertools.pairwise(edges):
        for at in range(begin, end, len(buffer)):
            piece = stream[at : min(end, at + len(buffer))]
            # One buffer for all pieces, as on a socket: what is kept must not be a view of it.
            buffer[: len(piece)] = piece
            view = memoryview(buffer)[: len(piece)]
            received += [(number, bytes(body)) for number, body in inbox.messages(view)]
    assert received == sent


def test_a_header_that_announces_too_much_is_refused_before_the_rest_has_come() -> None:
    inbox = Inbox(LONGEST)
    assert inbox.messages(memoryview(message(1, bytes(LONGEST)))) == [(1, memoryview(bytes(LONGEST)))]
    with pytest.raises(MessageTooLong, match="201 bytes; 200 is the most"):
        inbox.messages(memoryview(message(1, bytes(LONGEST + 1))[:20]))
