"""Figures of experiments, for files and reports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def save_curves(path: Path, curves: Mapping[str, Mapping[int, float]], title: str, ylabel: str) -> None:
    """One line per name over rounds, as an image file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), marker="o", markersize=3, label=name)
    axes.set(title=title, xlabel="round", ylabel=ylabel, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def sparkline(values: list[float], width: int = 40) -> str:
    """A curve in one line of text, scaled from zero to its highest value."""
    if not values:
        return ""
    count = min(width, len(values))
    picked = [values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(count)]
    highest = max(picked) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(max(0.0, value) / highest * 7.999))] for value in picked)
