"""Questions of the library reasoning-gym: drawn fresh for ever, rebuilt from their names, checked by our verifiers.

The library is imported on first use: it takes seconds, and the names below serve the settings without it.
"""

from __future__ import annotations

import decimal
import importlib
import importlib.metadata
import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from rl_swarm.errors import MalformedRecord, SettingsError, SwarmError
from rl_swarm.randomness import SEED_BITS
from rl_swarm.tasks.text import INSTRUCTION, is_held_out, tagged_answer
from rl_swarm.tasks.verifiers import new_facts, verify
from rl_swarm.types import Question, QuestionName

PAPER_TASKS = (
    "base_conversion",
    "basic_arithmetic",
    "arc_1d",
    "bf",
    "propositional_logic",
    "fraction_simplification",
    "decimal_arithmetic",
    "calendar_arithmetic",
    "binary_matrix",
)
SUPPORTED_TASKS = (
    *PAPER_TASKS,
    "chain_sum",
    "gcd",
    "lcm",
    "count_bits",
    "spell_backward",
    "simple_equations",
    "letter_counting",
    "leg_counting",
)

# Per named configuration what differs from the library's defaults. A name once published must keep its meaning.
CONFIGURATIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "default": {},
    "easy": {
        "base_conversion": {"min_value": 1, "max_value": 63, "max_base": 10},
        "basic_arithmetic": {"max_terms": 2, "max_digits": 2},
        "arc_1d": {"max_size": 10},
        "propositional_logic": {"max_vars": 3, "max_statements": 2, "min_complexity": 2},
        "fraction_simplification": {"max_value": 20, "min_factor": 2, "max_factor": 10, "styles": ("plain",)},
        "decimal_arithmetic": {"min_num_decimal_places": 1, "max_num_decimal_places": 1, "max_terms": 2},
        "calendar_arithmetic": {"tasks": ["weekday_offset"], "offset_upper_bound": 14},
        "binary_matrix": {"max_n": 4},
        "chain_sum": {"max_terms": 2, "max_digits": 2},
        "gcd": {"max_value": 20},
        "lcm": {"max_value": 20},
        "count_bits": {"max_n": 1023},
        "spell_backward": {"max_word_len": 4},
        "simple_equations": {"max_terms": 2, "max_value": 10},
        "letter_counting": {"min_words": 3, "max_words": 5},
        "leg_counting": {"min_animals": 1, "max_animals": 2, "max_instances": 3},
    },
}

LARGEST_INDEX = 1000
# One draw in eight is held out, and one logic puzzle in four has a conclusion: so many draws fail only by a mistake.
MOST_DRAWS = 10_000
# The library divides such a number by everything up to its root: beyond, one peer's seed would hold a node for minutes.
LARGEST_FACTORED = 10**10

# The brainf*ck compiler keeps its state in globals.
_LOCK = threading.Lock()


class ReasoningGym:
    """A Task. Draws in one named configuration, and accepts peers' questions in any of them."""

    def __init__(self, tasks: Sequence[str] = PAPER_TASKS, difficulty: str = "default") -> None:
        unknown = [task for task in tasks if task not in SUPPORTED_TASKS]
        if unknown:
            raise SettingsError(f"No such reasoning-gym task: {unknown[0]}. Choose from {', '.join(SUPPORTED_TASKS)}.")
        if not tasks or len(set(tasks)) < len(tasks):
            raise SettingsError("Name at least one reasoning-gym task, and each only once.")
        if difficulty not in CONFIGURATIONS:
            raise SettingsError(f"No such difficulty: {difficulty}. Choose from {', '.join(CONFIGURATIONS)}.")
        self.tasks = tuple(tasks)
        self.difficulty = difficulty
        self.version = _installed_version()

    def sample(self, count: int, rng: random.Random, *, held_out: bool = False) -> list[Question]:
        return [self._draw(rng.choice(self.tasks), rng, held_out) for _ in range(count)]

    def _draw(self, task: str, rng: random.Random, held_out: bool) -> Question:
        for _ in range(MOST_DRAWS):
            # Item i of the library comes from Random(seed + i): only far-apart seeds make questions independent.
            name = QuestionName(task, f"{self.difficulty}@{self.version}", rng.getrandbits(SEED_BITS), 0)
            question = _build(name, self.difficulty)
            if question is not None and is_held_out(question.prompt) == held_out:
                return question
        raise SwarmError(f"reasoning-gym {self.version} yields no usable question for {task}: install 0.1.25.")

    def rebuild(self, name: QuestionName) -> Question:
        configuration, _, version = name.config.partition("@")
        if name.task not in SUPPORTED_TASKS:
            raise MalformedRecord("unknown_task", name.task[:40])
        if name.task not in self.tasks:
            raise MalformedRecord("other_task", name.task)
        if configuration not in CONFIGURATIONS:
            raise MalformedRecord("unknown_config", configuration[:40])
        if version != self.version:
            raise MalformedRecord("other_version", version[:40])
        if not (0 <= name.seed < 1 << SEED_BITS and 0 <= name.index <= LARGEST_INDEX):
            raise MalformedRecord("bad_question", "seed or index out of range")
        question = _build(name, configuration)
        if question is None:
            raise MalformedRecord("bad_question", "not answerable")
        if is_held_out(question.prompt):
            raise MalformedRecord("held_out")
        return question

    def score(self, question: Question, text: str) -> float:
        given = tagged_answer(text)
        return float(given is not None and verify(question, given))


def _installed_version() -> str:
    # The library's own `__version__` names another release.
    try:
        return importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        raise SettingsError("These tasks need a library: pip install reasoning-gym==0.1.25") from None


def _build(name: QuestionName, configuration: str) -> Question | None:
    """The question, or None where the library has made one that cannot be answered as it is put."""
    # Every call gets the same arithmetic, and the library's change of the precision ends with the block.
    with _LOCK, decimal.localcontext(decimal.Context(prec=50)):
        try:
            entry = _dataset(name.task, configuration)[name.seed + name.index]
        except ArithmeticError:
            return None  # it divided by zero, or was about to factor too large a number
        prompt = f"{entry['question'].rstrip()}\n\n{INSTRUCTION}"
        if not _answerable(name.task, entry, prompt):
            return None
    return Question(name, prompt, entry["answer"] or "")


def _answerable(task: str, entry: dict[str, Any], prompt: str) -> bool:
    if task == "base_conversion":
        # Zero is written as an empty string, in the question and in the answer.
        return bool(entry["answer"])
    if task == "basic_arithmetic":
        # One answer in a hundred is that of `//` where the question says `/`.
        evaluate = importlib.import_module("reasoning_gym.arithmetic.decimal_arithmetic").evaluate_expression
        return bool(evaluate(entry["metadata"]["expression"]) == int(entry["answer"]))
    if task == "calendar_arithmetic":
        # Spans that end in the next year are printed with this year's number.
        start, end = (entry["metadata"].get(key, "") for key in ("start_date", "end_date"))
        return bool(not end or end[:4] == start[:4])
    if task == "simple_equations":
        # Two equal constants may cancel and take the variable with them: 0 = 0.
        return bool(entry["metadata"]["variable"] in entry["metadata"]["equation"])
    if task == "propositional_logic":
        return bool(new_facts(prompt)[0])
    return True


@cache
def _dataset(task: str, configuration: str) -> Any:
    # With seed 0, item n is item 0 of the dataset with seed n: so the word lists are read only once.
    return _library().create_dataset(task, seed=0, **CONFIGURATIONS[configuration].get(task, {}))


@cache
def _library() -> Any:
    """The library, with two habits mended that would hurt: endless factoring, and dots printed on our screen."""
    library = importlib.import_module("reasoning_gym")
    arithmetic: Any = importlib.import_module("reasoning_gym.arithmetic.basic_arithmetic")
    arithmetic.find_common_divisors = _bounded(arithmetic.find_common_divisors)
    optimizer: Any = importlib.import_module("reasoning_gym.code.contrib.bfit.Compiler.Optimizer")
    optimizer.print = _silence
    return library


def _bounded(find_common_divisors: Callable[[int, int], list[int]]) -> Callable[[int, int], list[int]]:
    def bounded(a: int, b: int) -> list[int]:
        if math.gcd(a, b) > LARGEST_FACTORED:
            raise OverflowError
        return find_common_divisors(a, b)

    return bounded


def _silence(*values: object, end: str = "\n") -> None:
    pass
