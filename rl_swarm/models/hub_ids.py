"""What may be the name of a model on the Hugging Face Hub: OWNER/NAME."""

from __future__ import annotations

import re

# The Hub's own rule: a word begins and ends with a letter, a digit or '_'.
_WORD = r"\w(?:[\w.-]*\w)?"
_HUB_ID = re.compile(f"{_WORD}/{_WORD}", re.ASCII)
LONGEST_WORD = 96


def is_hub_id(text: str) -> bool:
    doubled = "--" in text or ".." in text
    fits = max(map(len, text.split("/"))) <= LONGEST_WORD
    return _HUB_ID.fullmatch(text) is not None and fits and not doubled and not text.endswith(".git")
