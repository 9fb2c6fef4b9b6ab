"""Numbers for people: short, with a unit, and of a width that does not jump."""

from __future__ import annotations

from collections.abc import Mapping

_NONE = "–"


def format_count(value: float | None) -> str:
    """``1234567`` as ``1.23M``; below 10,000 in full."""
    if value is None:
        return _NONE
    if abs(value) < 10_000:
        return format_full_count(value)
    return _scaled(value, 1000.0, ("", "k", "M", "G", "T", "P"))


def format_full_count(value: float | None) -> str:
    """``1234567`` as ``1,234,567``, for tables in which the last digit counts."""
    if value is None:
        return _NONE
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.3g}"


def format_value(value: float | None, unit: str) -> str:
    """A value of a series in its unit."""
    if unit == "ns":
        return format_ns(value)
    return format_bytes(value) if unit == "bytes" else format_full_count(value)


def format_bytes(value: float | None) -> str:
    """Bytes in binary units: ``52.4 MiB``."""
    if value is None:
        return _NONE
    return _scaled(value, 1024.0, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def format_ns(value: float | None) -> str:
    """Nanoseconds in the unit that fits: ``640 µs``."""
    if value is None:
        return _NONE
    if abs(value) < 60e9:
        return _scaled(value, 1000.0, (" ns", " µs", " ms", " s"))
    return format_duration(value / 1e9)


def format_duration(seconds: float | None) -> str:
    """Seconds as ``3.2 s``, ``4m 05s`` or ``2h 10m``."""
    if seconds is None:
        return _NONE
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours < 48 else f"{hours // 24}d {hours % 24}h"


def format_age(seconds: float | None) -> str:
    """How long ago: ``now`` below a second."""
    if seconds is None:
        return _NONE
    return "now" if seconds < 1 else format_duration(seconds)


def format_percent(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:.0f}%"


def format_share(share: float | None) -> str:
    """A share that may be small, with two figures: ``34%``, ``0.41%``."""
    return _NONE if share is None else f"{float(f'{100 * share:.2g}'):g}%"


def format_reasons(counts: Mapping[str, int]) -> str:
    """Counts by reason: ``12 stale, 3 timeout``."""
    return ", ".join(f"{format_count(count)} {reason}" for reason, count in counts.items()) or _NONE


def printable(text: str) -> str:
    """A name as one line of text: what would move a terminal's cursor, or paint, becomes a space."""
    return "".join(char if char.isprintable() else " " for char in text)


def _scaled(value: float, base: float, units: tuple[str, ...]) -> str:
    size = float(value)
    for unit in units[:-1]:
        # 999.5 would be rounded to 1000: it belongs to the next unit.
        if abs(size) < base - 0.5:
            return f"{size:.0f}{unit}" if size == int(size) or abs(size) >= 100 else f"{size:.3g}{unit}"
        size /= base
    return f"{size:.3g}{units[-1]}" if abs(size) < 1000 else f"{size:,.0f}{units[-1]}"
