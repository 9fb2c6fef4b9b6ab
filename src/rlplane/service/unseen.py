"""``Unseen``: what an answer has given to a caller that may be interrupted before it has it."""

from __future__ import annotations

import threading

from rlplane.service import protocol as wire


class Unseen(threading.local):
    """The lease or the place that came with the last answer to this thread, until its caller has taken it
    over. Ctrl-C can come in between, where nobody else knows of it."""

    lease: int | None = None
    place: int | None = None

    def note(self, answer: wire.Answer) -> None:
        """An answer has come."""
        if isinstance(answer, wire.Located):
            self.lease = answer.lease
        elif isinstance(answer, wire.Reserved):
            self.place = answer.place.number

    def clear(self) -> None:
        """The caller has what came."""
        self.lease = self.place = None
