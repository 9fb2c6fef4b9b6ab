"""Numbers as people read them."""

from __future__ import annotations

__all__ = ["format_bytes", "format_count", "format_duration", "format_ns", "format_value"]


def format_ns(nanoseconds: float | None) -> str:
    """A duration with three significant figures: ``812 µs``, ``1.25 s``."""
    if nanoseconds is None:
        return "–"
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return f"{_figures(nanoseconds / size)} {unit}"
    return f"{nanoseconds:.0f} ns"


def format_duration(seconds: float) -> str:
    """A longer time: ``42.1 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_bytes(size: float | None) -> str:
    """A size in powers of 1024: ``13.2 MiB``."""
    if size is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} B" if unit == "B" else f"{_figures(size)} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_count(number: float | None) -> str:
    """A count: digits in groups, decimals only when it is small."""
    if number is None:
        return "–"
    if number == int(number):
        return f"{int(number):,}"
    return f"{number:,.0f}" if abs(number) >= 100 else _figures(number)


def format_value(value: float | None, unit: str) -> str:
    """A value of a series in its unit."""
    if unit == "ns":
        return format_ns(value)
    return format_bytes(value) if unit == "bytes" else format_count(value)


def _figures(number: float) -> str:
    if abs(number) >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"
