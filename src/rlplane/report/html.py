"""The report as one HTML file that needs nothing else: no script, no font, no request."""

from __future__ import annotations

import html
import math
from collections.abc import Callable

from rlplane.metrics.snapshot import SeriesStat, StepStat, TimelinePoint
from rlplane.report.model import Report
from rlplane.report.svg import bar_plot, line_plot
from rlplane.report.tables import Table, tables
from rlplane.report.text import LOG_LINES_SHOWN, headline
from rlplane.viewing.units import (
    format_bytes,
    format_duration,
    format_full_count,
    format_ns,
    format_share,
    format_value,
)

_MAX_HISTOGRAMS = 24

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2230; --dim: #687083; --paper: #fff; --line: #dfe3ea;
  --accent: #2563eb; --warn: #b45309; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --dim: #98a1b3; --paper: #12151c;
  --line: #2a303c; --accent: #7aa2ff; --warn: #fbbf24; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 0 auto; max-width: 1400px; padding: 16px; }
h1 { font-size: 1.3rem; margin: 0 0 4px; } h2 { font-size: 1.05rem; margin: 28px 0 8px; }
p { margin: 2px 0; color: var(--dim); } .warning { color: var(--warn); font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 12px; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: 8px; }
figcaption { font-size: .85rem; font-weight: 600; } svg { width: 100%; height: auto; display: block; }
.line { fill: none; stroke: var(--accent); stroke-width: 1.5; } .area { fill: var(--accent); opacity: .15; }
.bar { fill: var(--accent); } .grid { stroke: var(--line); }
.mark { stroke: var(--warn); stroke-dasharray: 3 2; }
.tick { font-size: 9px; fill: var(--dim); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px 3px 0; text-align: left; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 600; } .n { text-align: right; }
"""


def render_html(report: Report) -> str:
    """The report as a page; everything that comes from the run is escaped."""
    first, *rest = headline(report)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<title>{html.escape(f'rlplane: run {report.run_id}')}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(first)}</h1>",
        *(f"<p>{html.escape(line)}</p>" for line in rest),
        *(f'<p class="warning">{html.escape(warning)}</p>' for warning in report.warnings),
        _plots("Training steps", _step_plots(report.steps)),
        _plots("Over time", _time_plots(report.timeline)),
        _plots("Distributions", _histograms(report)),
        *(_table(table) for table in tables(report)),
        _log(report),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _plots(title: str, plots: list[str]) -> str:
    return f'<h2>{html.escape(title)}</h2><div class="plots">{"".join(plots)}</div>' if plots else ""


def _step_plots(steps: list[StepStat]) -> list[str]:
    marked = [step for step in steps if step.seconds]
    plots = []
    if len(marked) > 1:
        for title, part in (
            ("Share of the step in the plane", "plane_s"),
            ("Share of the step spent waiting", "waiting_s"),
        ):
            line = [(step.elapsed_s, getattr(step, part) / step.seconds) for step in marked]
            plots.append(line_plot(title, line, format_share, format_duration))
        if any(step.tokens for step in marked):
            line = [(step.elapsed_s, step.tokens / step.seconds) for step in marked]
            plots.append(line_plot("Tokens per second", line, format_full_count, format_duration))
    for name in sorted({name for step in steps for name in step.scalars}):
        values = [(step.elapsed_s, step.scalars[name]) for step in steps if name in step.scalars]
        line = [(at, value) for at, value in values if math.isfinite(value)]
        if len(line) > 1:
            plots.append(line_plot(name, line, lambda value: f"{value:.4g}", format_duration))
    return plots[:_MAX_HISTOGRAMS]


def _time_plots(points: list[TimelinePoint]) -> list[str]:
    if len(points) < 2:
        return []

    def per_second(name: str) -> Callable[[TimelinePoint], float]:
        return lambda point: getattr(point, name) / point.seconds if point.seconds else 0.0

    wanted: list[tuple[str, Callable[[TimelinePoint], float], Callable[[float], str]]] = [
        ("Operations per second", per_second("ops"), format_full_count),
        ("Bytes per second", per_second("bytes"), format_bytes),
        ("Mean latency of an operation", lambda p: p.busy_ns / p.ops if p.ops else 0.0, format_ns),
        (
            "Operations that wait",
            lambda p: p.wait_ns / 1e9 / p.seconds if p.seconds else 0.0,
            format_full_count,
        ),
        ("Mean wait of those that wait", lambda p: p.wait_ns / p.waits if p.waits else 0.0, format_ns),
        ("Samples held", lambda p: p.samples_held, format_full_count),
        ("Bytes held", lambda p: p.bytes_held, format_bytes),
        ("Samples written per second", per_second("written"), format_full_count),
        ("Samples claimed per second", per_second("claimed"), format_full_count),
        ("Samples cleared per second", per_second("cleared"), format_full_count),
        (
            "Mean staleness at the claim, in weight versions",
            lambda p: p.stale_sum / p.stale_count if p.stale_count else 0.0,
            format_full_count,
        ),
        ("Failures per second", per_second("failures"), format_full_count),
    ]
    plots = []
    for title, value, format_y in wanted:
        line = [(point.elapsed_s, float(value(point))) for point in points]
        if any(y for _, y in line):
            plots.append(line_plot(title, line, format_y, format_duration))
    return plots


def _histograms(report: Report) -> list[str]:
    series = [op.latency for op in report.ops if op.latency is not None] + report.series
    return [_histogram(stat) for stat in series[:_MAX_HISTOGRAMS] if len(stat.bucket_counts) > 1]


def _histogram(stat: SeriesStat) -> str:
    of = " / ".join(stat.labels.values())
    title = f"{stat.name.replace('_', ' ')}{': ' + of if of else ''} (n = {stat.count:,})"
    marks = [(name, stat.percentiles[name]) for name in ("p50", "p99") if name in stat.percentiles]
    return bar_plot(
        title, stat.bucket_edges, stat.bucket_counts, lambda value: format_value(value, stat.unit), marks
    )


def _table(table: Table) -> str:
    side = [' class="n"' if table.is_numeric(column) else "" for column in range(len(table.columns))]
    head = "".join(f"<th{s}>{html.escape(cell)}</th>" for cell, s in zip(table.columns, side, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{s}>{html.escape(c)}</td>" for c, s in zip(row, side, strict=True)) + "</tr>"
        for row in table.rows
    )
    return (
        f'<h2>{html.escape(table.title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _log(report: Report) -> str:
    if not report.log:
        return ""
    lines = report.log[-LOG_LINES_SHOWN:]
    rows = [[line.level, line.worker or "–", str(line.count), line.message] for line in lines]
    return _table(Table("Log (last lines)", ["level", "worker", "times", "message"], rows))
