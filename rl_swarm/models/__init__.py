"""Models that travel inside the package."""

from __future__ import annotations

from pathlib import Path

PICO_FOLDER = Path(__file__).parent / "data" / "pico"
