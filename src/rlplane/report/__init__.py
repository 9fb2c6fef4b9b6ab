"""The report of a run: made from one snapshot, found wherever the run left it, rendered for all readers.

``model``   :class:`Report`, and what is in it
``find``    gets the right snapshot
``tables``  the report as cells of text, which both renderers show
``text``    the report for a terminal
``html``    the report as a page that needs nothing else
``svg``     the page's plots
"""

from rlplane.report.find import find_report
from rlplane.report.html import render_html
from rlplane.report.model import Flow, OpSummary, Report
from rlplane.report.text import render_text

__all__ = ["Flow", "OpSummary", "Report", "find_report", "render_html", "render_text"]
