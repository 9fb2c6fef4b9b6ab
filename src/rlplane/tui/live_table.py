"""A table that draws only the rows that are seen, so that 500 workers cost what 20 do.

Textual's own DataTable keeps and measures every cell. Here a row is any object, a column knows how to read
and write it, and text is made when a line is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from rlplane.viewing.units import printable

Row = TypeVar("Row")


class Column(NamedTuple, Generic[Row]):
    """One column. ``value`` sorts; ``form`` of it is shown, unless ``shows`` makes the text from the row;
    ``style`` may point something out."""

    title: str
    width: int
    value: Callable[[Row], Any]
    form: Callable[[Any], str] = str
    left: bool = False
    style: Callable[[Row], str] = lambda row: ""
    shows: Callable[[Row], str] | None = None

    def text(self, row: Row) -> str:
        return self.form(self.value(row)) if self.shows is None else self.shows(row)


class LiveTable(ScrollView, Generic[Row], can_focus=True):
    """Rows that change all the time, sorted, filtered, with a cursor that stays on its row.

    Args:
        columns: The columns; the first that is ``left`` takes the room that is left.
        key: Names a row, so that the cursor can stay on it.
        sort: The title of the column to sort by at first, descending; None keeps the order given.
    """

    DEFAULT_CSS = """
    LiveTable {
        height: 1fr;
        background: $surface;
        scrollbar-size-horizontal: 0;
        & > .live-table--head { background: $panel; color: $text-muted; text-style: bold; }
        & > .live-table--cursor { background: $primary-muted; color: $text; text-style: bold; }
        & > .live-table--row { background: $surface; color: $text; }
        & > .live-table--bad { color: $text-error; text-style: bold; }
        & > .live-table--warn { color: $text-warning; }
        & > .live-table--dim { color: #7a8494; }
        & > .live-table--line { color: #4fb8c9; }
    }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "live-table--head",
        "live-table--cursor",
        "live-table--row",
        "live-table--bad",
        "live-table--warn",
        "live-table--dim",
        "live-table--line",
    }
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("left", "scroll_left", "Left", show=False),
        Binding("right", "scroll_right", "Right", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "edge(0)", "First", show=False),
        Binding("end", "edge(-1)", "Last", show=False),
        Binding("enter", "choose", "Open"),
        Binding("s", "sort(1)", "Sort by next"),
        Binding("S", "sort(-1)", "Sort by previous", show=False),
        Binding("r", "reverse", "Reverse"),
    ]

    class Chosen(Message):
        """A row was opened with Enter or a click on the cursor's row."""

        def __init__(self, table: LiveTable[Any], row: Any) -> None:
            super().__init__()
            self.table = table
            self.row = row

        @property
        def control(self) -> LiveTable[Any]:
            return self.table

    def __init__(
        self,
        columns: Sequence[Column[Row]],
        key: Callable[[Row], str],
        *,
        sort: str | None = None,
        empty: str = "nothing yet",
        id: str | None = None,
    ) -> None:
        super().__init__(id=id)
        self.columns = list(columns)
        self._key = key
        self._empty = empty
        titles = [column.title for column in columns]
        self.sorted_by: int | None = None if sort is None else titles.index(sort)
        self.descending = True
        self.filter = ""
        self._all: Sequence[Row] = ()
        self.rows: list[Row] = []
        self.cursor = 0
        self._cursor_key: str | None = None

    # What is shown.

    def set_rows(self, rows: Sequence[Row]) -> None:
        """Show these rows; the order and the filter stay."""
        self._all = rows
        self._arrange()

    def set_filter(self, text: str) -> None:
        """Show only rows that have ``text`` in one of their ``left`` columns."""
        self.filter = text.lower()
        self._arrange()

    def _arrange(self) -> None:
        rows = [row for row in self._all if self._fits(row)]
        if self.sorted_by is not None:
            column = self.columns[self.sorted_by]
            known = [row for row in rows if column.value(row) is not None]
            unknown = [row for row in rows if column.value(row) is None]
            known.sort(key=self._key)
            known.sort(key=column.value, reverse=self.descending)
            rows = known + unknown
        self.rows = rows
        if self._cursor_key is not None:
            found = (at for at, row in enumerate(rows) if self._key(row) == self._cursor_key)
            self.cursor = next(found, min(self.cursor, max(0, len(rows) - 1)))
        self._cursor_key = self._key(rows[self.cursor]) if rows and self.cursor < len(rows) else None
        self.virtual_size = Size(self._width(), len(rows) + 1)
        self.refresh()

    def _fits(self, row: Row) -> bool:
        if not self.filter:
            return True
        return any(self.filter in column.text(row).lower() for column in self.columns if column.left)

    def _width(self) -> int:
        return sum(column.width + 1 for column in self.columns) + 1

    def _widths(self) -> list[int]:
        widths = [column.width for column in self.columns]
        spare = self.size.width - self._width()
        grows = next((at for at, column in enumerate(self.columns) if column.left), None)
        if spare > 0 and grows is not None:
            widths[grows] += spare
        return widths

    def render_line(self, y: int) -> Strip:
        left, top = self.scroll_offset
        width = self.size.width
        base = self.get_component_rich_style("live-table--row")
        if y == 0:
            strip = self._head(self.get_component_rich_style("live-table--head"))
        elif not self.rows:
            said = "nothing fits the filter" if self._all else self._empty
            text = f" {said}" if y == 1 else ""
            strip = Strip([Segment(text, self.get_component_rich_style("live-table--dim"))])
        else:
            at = top + y - 1
            strip = self._line(self.rows[at], at, base) if at < len(self.rows) else Strip([])
        return strip.crop_extend(left, left + width, base)

    def _head(self, style: Style) -> Strip:
        cells = []
        for at, (column, width) in enumerate(zip(self.columns, self._widths(), strict=True)):
            mark = ("▼" if self.descending else "▲") if at == self.sorted_by else ""
            cells.append(Segment(_fit(f"{column.title}{mark}", width, column.left) + " ", style))
        return Strip([Segment(" ", style), *cells])

    def _line(self, row: Row, at: int, base: Style) -> Strip:
        if at == self.cursor and self.has_focus:
            base = self.get_component_rich_style("live-table--cursor")
        segments = [Segment(" ", base)]
        for column, width in zip(self.columns, self._widths(), strict=True):
            name = column.style(row)
            style = base
            if name:
                pointed = self.get_component_rich_style(f"live-table--{name}", partial=True)
                style = base + Style(color=pointed.color, bold=pointed.bold)
            segments.append(Segment(_fit(column.text(row), width, column.left) + " ", style))
        return Strip(segments)

    # What people do.

    def _move_to(self, at: int) -> None:
        if not self.rows:
            return
        self.cursor = min(len(self.rows) - 1, max(0, at))
        self._cursor_key = self._key(self.rows[self.cursor])
        # The head is always in the first line, so a row is seen one line lower than it lies.
        self.scroll_to_region(Region(0, self.cursor, 1, 2), animate=False, force=True)
        self.refresh()

    def action_move(self, by: int) -> None:
        self._move_to(self.cursor + by)

    def action_page(self, by: int) -> None:
        self._move_to(self.cursor + by * max(1, self.size.height - 2))

    def action_edge(self, at: int) -> None:
        self._move_to(0 if at == 0 else len(self.rows) - 1)

    def action_choose(self) -> None:
        if self.rows:
            self.post_message(self.Chosen(self, self.rows[self.cursor]))

    def action_sort(self, by: int) -> None:
        current = -1 if self.sorted_by is None else self.sorted_by
        self._sort_by((current + by) % len(self.columns))

    def _sort_by(self, column: int) -> None:
        self.descending = not self.columns[column].left
        self.sorted_by = column
        self._arrange()

    def action_reverse(self) -> None:
        self.descending = not self.descending
        self._arrange()

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None:
            return
        if offset.y == 0:
            column = self._column_at(offset.x + self.scroll_offset.x)
            if column is not None and column == self.sorted_by:
                self.action_reverse()
            elif column is not None:
                self._sort_by(column)
            return
        at = self.scroll_offset.y + offset.y - 1
        if at == self.cursor:
            self.action_choose()
        elif at < len(self.rows):
            self._move_to(at)

    def _column_at(self, x: int) -> int | None:
        start = 1
        for at, width in enumerate(self._widths()):
            if start <= x <= start + width:
                return at
            start += width + 1
        return None


def _fit(text: str, width: int, left: bool) -> str:
    text = printable(text)
    size = cell_len(text)
    if size > width:
        return set_cell_size(text, width - 1) + "…"
    return text + " " * (width - size) if left else " " * (width - size) + text
