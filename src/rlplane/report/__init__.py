"""The report of a run: made from one snapshot, found wherever the run left it, rendered for all readers.

``model.py`` has :class:`Report` and says what is in it, ``find.py`` gets the right snapshot, ``text.py`` and
``html.py`` render what ``tables.py`` lays out; ``svg.py`` draws, ``units.py`` writes numbers.
"""

from rlplane.report.find import find_report
from rlplane.report.html import render_html
from rlplane.report.model import Flow, OpSummary, Report
from rlplane.report.text import render_text

__all__ = ["Flow", "OpSummary", "Report", "find_report", "render_html", "render_text"]
