"""Progress while something lasts: a line per round, or a table that changes in place."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rl_swarm.demo import Arm
from rl_swarm.monitor.figures import sparkline
from rl_swarm.monitor.screen import console, say, visible
from rl_swarm.types import Step
from rl_swarm.waiting import Watcher


class RoundLines(Watcher):
    """A line per round, below a progress bar where there is a terminal to draw it on."""

    def __init__(self, max_rounds: int) -> None:
        self._max_rounds = max_rounds
        self._progress: Progress | None = None
        self._bar: Any = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        if not console.is_terminal:
            yield
            return
        columns = (TextColumn("rounds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            self._progress = progress
            self._bar = progress.add_task("rounds", total=self._max_rounds)
            yield

    def say(self, line: str) -> None:
        console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {escape(visible(line))}")

    def rows(self, step: Step, rows: dict[str, dict[str, Any]]) -> None:
        values = list(rows.values())
        seconds: dict[str, float] = values[0]["seconds"]
        held_out = [row["eval_reward"] for row in values if "eval_reward" in row]
        parts = [
            f"round {step.round:4d}",
            f"reward {fmean(row['my_reward'] for row in values):.3f}",
            f"held out {fmean(held_out):.3f}" if held_out else "",
            f"peers' groups {sum(row['external_used'] for row in values)} of "
            f"{sum(row['external_wanted'] for row in values)}",
            f"{sum(seconds.values()) - seconds.get('wait', 0.0):.2f} s, waited {seconds.get('wait', 0.0):.2f} s",
        ]
        self.say("  ".join(part for part in parts if part) + _why_missing(values))
        if self._progress is not None:
            self._progress.update(self._bar, completed=step.round + 1)


def _why_missing(rows: list[dict[str, Any]]) -> str:
    """The reasons for peers' groups that were wanted and not used, in brackets; what was turned away by its cause."""
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons.update({reason: n for reason, n in row["external_missing"].items() if reason != "rejected"})
        if "rejected" in row["external_missing"]:
            reasons.update(row["rejected"])
    return f"  (missing: {', '.join(f'{reason} {n}' for reason, n in reasons.most_common(3))})" if reasons else ""


class DemoScreen:
    """Both arms of the demonstration side by side while they run."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._live: Live | None = None
        self._printed = -1

    @contextmanager
    def shown(self) -> Iterator[None]:
        if not console.is_terminal:
            yield
            return
        with Live(console=console, refresh_per_second=8) as live:
            self._live = live
            yield

    def update(self, arms: list[Arm]) -> None:
        if self._live is not None:
            self._live.update(self.table(arms))
            return
        arm = next((arm for arm in arms if not arm.finished), arms[-1])
        done = len(arm.own)
        if done and (done % 10 == 0 or arm.finished) and (stamp := done + 10_000 * arms.index(arm)) != self._printed:
            self._printed = stamp
            say(
                f"{arm.experiment}  round {done:3d} of {arm.rounds}  own reward {arm.own[-1]:.3f}  "
                f"held out {arm.end:.3f}  {arm.seconds / done:.2f} s a round"
            )

    def table(self, arms: list[Arm]) -> Table:
        grid = Table(title=f"{self._nodes} nodes, same seed, same own work; left alone and sharing")
        for column in ("experiment", "J", "round", "own reward", "held out", "", "peers' groups a node", "s a round"):
            grid.add_column(column, justify="left" if column in ("experiment", "") else "right")
        for arm in arms:
            done = len(arm.own)
            held_out = f"{arm.start:.3f} → {arm.end:.3f}" if arm.held_out else ""
            used = fmean(arm.external_used.values()) if arm.external_used else 0.0
            grid.add_row(
                arm.experiment,
                str(arm.transplants),
                f"{done}/{arm.rounds}",
                f"{fmean(arm.own[-5:]):.3f}" if done else "",
                held_out,
                sparkline(list(arm.held_out.values()), 13),
                f"{used:.0f}",
                f"{arm.seconds / done:.2f}" if done else "",
            )
        return grid
