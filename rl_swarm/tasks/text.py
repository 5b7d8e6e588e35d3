"""What tasks share about text: the answer tags, the instruction that asks for them, and the held-out split."""

from __future__ import annotations

import hashlib
import re

OPEN, CLOSE = "<answer>", "</answer>"
INSTRUCTION = f"Put your final answer, and nothing else, between {OPEN} and {CLOSE} tags."

# A verifier looks at no more than this much of a completion: longer ones are cut at the front, the answer comes last.
LONGEST_SCORED_TEXT = 20_000
LONGEST_ANSWER = 2_000

_ANSWER = re.compile(re.escape(OPEN) + r"((?:(?!" + re.escape(OPEN) + r").)*?)" + re.escape(CLOSE), re.DOTALL)

# One prompt in eight is held out. The split goes by content, not by seed, because small tasks repeat their questions.
HELD_OUT_SHARE = 8


def tagged_answer(text: str) -> str | None:
    """What stands between the last complete pair of answer tags, stripped; None without such a pair."""
    found = None
    for match in _ANSWER.finditer(text[-LONGEST_SCORED_TEXT:]):
        found = match.group(1)
    if found is None or len(found) > LONGEST_ANSWER:
        return None
    return found.strip()


def is_held_out(prompt: str) -> bool:
    """Whether this prompt belongs to the evaluation set, on every machine and for ever."""
    return hashlib.blake2b(prompt.encode(), digest_size=8).digest()[0] % HELD_OUT_SHARE == 0
