"""Small lines of block characters: the last values of a figure, or how full something is."""

from __future__ import annotations

from collections.abc import Sequence

_LEVELS = "▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉█"


def spark(values: Sequence[float | None], width: int) -> str:
    """The last ``width`` values, from zero to the highest of them; a space where there is none."""
    shown = list(values)[-width:]
    known = [value for value in shown if value is not None]
    highest = max(known, default=0.0)
    if highest <= 0:
        return "".join(" " if value is None else _LEVELS[0] for value in shown).rjust(width)
    top = len(_LEVELS) - 1
    line = (" " if value is None else _LEVELS[min(top, round(top * value / highest))] for value in shown)
    return "".join(line).rjust(width)


def bar(share: float | None, width: int) -> str:
    """A bar that is ``share`` full, to an eighth of a character."""
    if share is None:
        return " " * width
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_PARTS[rest] if rest else "")).ljust(width)
