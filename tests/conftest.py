"""Every test starts from the same surroundings: none of this project's variables set, one torch thread."""

from __future__ import annotations

import os

import pytest

from rl_swarm import settings

os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.fields():
        monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.delenv(name, raising=False)
