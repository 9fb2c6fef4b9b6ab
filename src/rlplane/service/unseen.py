"""``Unseen``: what a call is given that may be interrupted before it has it."""

from __future__ import annotations

import threading


class Unseen(threading.local):
    """The last request of the call that is under way in this thread, and the leases that it has got so far.
    Ctrl-C can come wherever nobody else knows of them."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.leases: list[int] = []

    def clear(self) -> None:
        """A call begins, or has what it was given."""
        self.number = None
        if self.leases:
            self.leases = []
