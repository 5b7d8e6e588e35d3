"""Nine small kinds of arithmetic in compact notation, with no dependency: the embedded model's home ground.

Prompt and tagged answer together stay within about thirty characters, so a round takes well under a second on a CPU.
The reward is 1 for the exact answer between answer tags and 0 for anything else; there is no partial credit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from rl_swarm.errors import MalformedRecord
from rl_swarm.randomness import SEED_BITS
from rl_swarm.tasks.text import is_held_out, tagged_answer
from rl_swarm.types import Question, QuestionName

CONFIG = "v1"
FAMILY = "arithmetic"

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _sum(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    return f"{a}+{b}=", str(a + b)


def _difference(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    return f"{a}-{b}=", str(a - b)


def _product(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(2, 19), rng.randint(2, 99)
    return f"{a}*{b}=", str(a * b)


def _gcd(rng: random.Random) -> tuple[str, str]:
    common = rng.randint(1, 12)
    a, b = common * rng.randint(1, 99 // common), common * rng.randint(1, 99 // common)
    return f"gcd({a},{b})=", str(math.gcd(a, b))


def _base(rng: random.Random) -> tuple[str, str]:
    base, largest = rng.choice(((2, 63), (3, 242), (4, 255), (8, 511)))
    number = rng.randint(1, largest)
    digits, rest = "", number
    while rest:
        rest, digit = divmod(rest, base)
        digits = str(digit) + digits
    return f"b{base}({number})=", digits


def _fraction(rng: random.Random) -> tuple[str, str]:
    factor = rng.randint(2, 9)
    a, b = factor * rng.randint(1, 12), factor * rng.randint(2, 12)
    common = math.gcd(a, b)
    return f"{a}/{b}=", f"{a // common}/{b // common}"


def _bits(rng: random.Random) -> tuple[str, str]:
    number = rng.randint(1, 1023)
    return f"bits({number})=", str(bin(number).count("1"))


def _reversal(rng: random.Random) -> tuple[str, str]:
    word = "".join(rng.choice(_LETTERS) for _ in range(rng.randint(3, 5)))
    return f"rev({word})=", word[::-1]


def _remainder(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(10, 299), rng.randint(2, 12)
    return f"{a}%{b}=", str(a % b)


KINDS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "sum": _sum,
    "difference": _difference,
    "product": _product,
    "gcd": _gcd,
    "base": _base,
    "fraction": _fraction,
    "bits": _bits,
    "reversal": _reversal,
    "remainder": _remainder,
}


class Arithmetic:
    """A Task over some or all of the kinds, each drawn equally often. On the wire a kind is `arithmetic/KIND`."""

    def __init__(self, kinds: Sequence[str] = tuple(KINDS)) -> None:
        self._kinds = tuple(kinds)

    def sample(self, count: int, rng: random.Random, *, held_out: bool = False) -> list[Question]:
        questions: list[Question] = []
        while len(questions) < count:
            kind = rng.choice(self._kinds)
            question = _build(QuestionName(f"{FAMILY}/{kind}", CONFIG, rng.getrandbits(SEED_BITS), 0), kind)
            if is_held_out(question.prompt) == held_out:
                questions.append(question)
        return questions

    def rebuild(self, name: QuestionName) -> Question:
        family, _, kind = name.task.partition("/")
        if family != FAMILY or kind not in KINDS:
            raise MalformedRecord("unknown_task", name.task)
        if kind not in self._kinds:
            raise MalformedRecord("other_task", name.task)
        if name.config != CONFIG:
            raise MalformedRecord("unknown_config", name.config)
        if not 0 <= name.seed < 1 << SEED_BITS or name.index != 0:
            raise MalformedRecord("bad_question", f"seed {name.seed}, index {name.index}")
        question = _build(name, kind)
        if is_held_out(question.prompt):
            raise MalformedRecord("held_out", question.prompt)
        return question

    def score(self, question: Question, text: str) -> float:
        return 1.0 if tagged_answer(text) == question.answer else 0.0


def _build(name: QuestionName, kind: str) -> Question:
    prompt, answer = KINDS[kind](random.Random(f"{name.task}\x1f{name.config}\x1f{name.seed}\x1f{name.index}"))
    return Question(name, prompt, answer)
