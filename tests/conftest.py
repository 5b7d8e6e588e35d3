"""Every test starts from the same surroundings: none of this project's variables set, one torch thread."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rl_swarm import settings

os.environ["OMP_NUM_THREADS"] = "1"
# Triton reads it once, when it is imported: its interpreter runs our kernels on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Left out means not even imported: the fast part runs where torch is not installed."""
    if "not torch" in config.option.markexpr and collection_path.suffix == ".py":
        return "pytestmark = pytest.mark.torch" in collection_path.read_text() or None
    return None


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.fields():
        monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.delenv(name, raising=False)
