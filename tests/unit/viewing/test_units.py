"""Numbers for people."""

import pytest

from rlplane.viewing.units import (
    format_age,
    format_bytes,
    format_count,
    format_duration,
    format_full_count,
    format_ns,
    format_value,
)


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (format_count, 0, "0"),
        (format_count, 9_999, "9,999"),
        (format_count, 12_345, "12.3k"),
        (format_count, 999_950, "1M"),
        (format_count, 3.14159, "3.14"),
        (format_count, None, "–"),
        (format_bytes, 512, "512 B"),
        (format_bytes, 1023.9, "1 KiB"),
        (format_bytes, 54_525_952, "52 MiB"),
        (format_bytes, 8 * 2**60, "8,192 PiB"),
        (format_ns, 640_000, "640 µs"),
        (format_ns, 1_250_000, "1.25 ms"),
        (format_ns, None, "–"),
        (format_ns, 7, "7 ns"),
        (format_ns, 1_250_000_000, "1.25 s"),
        (format_ns, 72e9, "1m 12s"),
        (format_full_count, 1_234_567, "1,234,567"),
        (format_full_count, 1_234.5, "1,234"),
        (format_full_count, 0.5, "0.5"),
        (format_full_count, None, "–"),
        (lambda value: format_value(value, "bytes"), 13.2 * 2**20, "13.2 MiB"),
        (lambda value: format_value(value, "versions"), 12_345, "12,345"),
        (format_duration, 3.21, "3.2 s"),
        (format_duration, 245, "4m 05s"),
        (format_duration, 7_800, "2h 10m"),
        (format_duration, 200_000, "2d 7h"),
        (format_age, 0.3, "now"),
        (format_age, 12.0, "12 s"),
    ],
)
def test_a_number_is_short_and_has_a_unit(write, value, text) -> None:
    assert write(value) == text
