"""The report as plain text, for a terminal."""

from __future__ import annotations

import time

from rlplane.report.model import Report
from rlplane.report.tables import Table, tables
from rlplane.viewing.units import format_bytes, format_duration, format_full_count, format_share

_ROWS_SHOWN = 40
LOG_LINES_SHOWN = 20


def render_text(report: Report) -> str:
    """The whole report. Long tables are cut, and say so; the JSON has everything."""
    parts = ["\n".join([*headline(report), *(f"WARNING: {warning}" for warning in report.warnings)])]
    parts += [_table(table) for table in tables(report)]
    if report.log:
        lines = [
            f"  {line.level}: {line.worker + ': ' if line.worker else ''}{line.message}"
            + (f" ({line.count} times)" if line.count > 1 else "")
            for line in report.log
        ]
        parts.append("\n".join(["Log (last lines)", *lines[-LOG_LINES_SHOWN:]]))
    return "\n\n".join(parts) + "\n"


def headline(report: Report) -> list[str]:
    """What to know first, in a few lines."""
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.started_ns / 1e9))
    gauges, peaks = report.gauges, report.peaks
    return [
        f"Run {report.run_id}: {report.state.value}{'' if report.complete else ' (incomplete)'}",
        f"Started {started}, {format_duration(report.elapsed_s)}, "
        f"{format_full_count(report.totals.get('events', 0))} events, {len(report.workers)} workers, "
        f"percentiles {'exact' if report.exact else 'from a histogram'}",
        f"Held: {format_full_count(gauges.get('samples_held'))} samples, "
        f"{format_bytes(gauges.get('bytes_held'))}; at peak "
        f"{format_full_count(peaks.get('samples_held'))} samples, "
        f"{format_bytes(peaks.get('bytes_held'))}",
        *_step_lines(report),
    ]


def _step_lines(report: Report) -> list[str]:
    """The training steps that were marked, and the last of the numbers that were logged."""
    totals, lines = report.step_totals, []
    if totals.count:
        each = format_duration(totals.seconds / totals.count)
        lines.append(
            f"Training steps: {format_full_count(totals.count)}, of {each} each;"
            f" {format_share(totals.share())} of it in the plane"
            f" (waiting {format_share(totals.share('waiting_s'))},"
            f" round trips {format_share(totals.share('round_trips_s'))},"
            f" bytes {format_share(totals.share('bytes_s'))});"
            f" {format_full_count(totals.tokens_per_s)} tokens/s"
        )
    last = {name: value for step in report.steps for name, value in step.scalars.items()}
    if last:
        lines.append("Logged last: " + ", ".join(f"{name} {value:.4g}" for name, value in last.items()))
    return lines


def _table(table: Table) -> str:
    rows = [table.columns, *table.rows[:_ROWS_SHOWN]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    right = [table.is_numeric(column) for column in range(len(table.columns))]
    lines = [table.title]
    for row in rows:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    if len(table.rows) > _ROWS_SHOWN:
        lines.append(f"  … and {len(table.rows) - _ROWS_SHOWN} more")
    return "\n".join(lines)
