"""What is on the screen while the job runs: a live panel on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from typing import Any, Self

from rlplane.demo.job import Death
from rlplane.demo.results import mean
from rlplane.viewing.units import format_bytes

_BARS = " ▁▂▃▄▅▆▇█"
_RECENT = 10


def choose_display(total: int, quiet: bool) -> LineDisplay | LiveDisplay:
    """What is told of every step and of every worker that died: the live panel where stdout and stderr are
    looked at, else lines on stderr."""
    return LiveDisplay(total) if sys.stdout.isatty() and not quiet else LineDisplay(total)


class LineDisplay:
    """A line every few steps."""

    def __init__(self, total: int) -> None:
        self._total, self._steps = total, list[dict[str, Any]]()
        self._every = max(1, min(10, total // 10))

    def step(self, step: dict[str, Any]) -> None:
        self._steps.append(step)
        if step["step"] % self._every == 0 or step["step"] == self._total:
            figures = ", ".join(f"{name} {value}" for name, value in figures_of(self._steps[-self._every :]))
            _print_line(f"step {step['step']:>4}/{self._total}  {figures}")

    def death(self, death: Death) -> None:
        _print_line(f"killed {death.worker} (process {death.pid}); {death.replaced_by} takes its place")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        pass


class LiveDisplay:
    """A panel that is drawn anew with each step."""

    def __init__(self, total: int) -> None:
        from rich.live import Live

        self._total, self._steps = total, list[dict[str, Any]]()
        self._deaths: list[Death] = []
        self._live = Live(self._panel(), refresh_per_second=8, transient=False)

    def step(self, step: dict[str, Any]) -> None:
        self._steps.append(step)
        self._live.update(self._panel())

    def death(self, death: Death) -> None:
        self._deaths.append(death)
        self._live.update(self._panel())

    def _panel(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        done = self._steps[-1]["step"] if self._steps else 0
        table = Table.grid(padding=(0, 3))
        for _ in range(5):
            table.add_column(justify="left")
        figures = figures_of(self._steps[-_RECENT:]) if self._steps else [("the workers start", "…")]
        table.add_row(*(Text(name, style="dim") for name, _ in figures))
        table.add_row(*(Text(value, style="bold") for _, value in figures))
        parts: list[Any] = [
            table,
            Text("reward 0 to 1", style="dim"),
            Text(curve([step["reward"] for step in self._steps], 72), style="cyan"),
        ]
        parts += [
            Text(f"killed {death.worker}; {death.replaced_by} takes its place", style="yellow")
            for death in self._deaths[-3:]
        ]
        parts.append(ProgressBar(total=self._total, completed=done, width=76))
        title = f"asynchronous GRPO through the plane: step {done} of {self._total}"
        return Panel(Group(*parts), title=title, expand=False, width=80)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._live.__exit__(*exc_info)


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def figures_of(recent: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What people watch, over the last few steps."""
    seconds = sum(step["seconds"] for step in recent)
    return [
        ("reward", f"{mean(recent, 'reward'):.3f}"),
        ("tokens/s", f"{sum(step['tokens'] for step in recent) / seconds:.0f}"),
        ("staleness", f"{mean(recent, 'staleness'):.1f}"),
        ("held", format_bytes(recent[-1]["bytes_held"])),
        ("data plane", f"{sum(step['plane_seconds'] for step in recent) / seconds:.1%}"),
        ("waiting", f"{sum(step['waiting_seconds'] for step in recent) / seconds:.0%}"),
    ]


def curve(values: list[float], width: int) -> str:
    """Values from 0 to 1 as a row of bars, the means of equal shares of them."""
    columns = min(width, len(values))
    shares = [values[i * len(values) // columns : (i + 1) * len(values) // columns] for i in range(columns)]
    return "".join(_BARS[round(sum(share) / len(share) * (len(_BARS) - 1))] for share in shares)
