"""Checks answers to reasoning-gym questions with literal parsers only: the text may come from anyone.

The library's own scorers `eval` the answer, hand it to sympy or pay crumbs for nonsense, so none of them is used.
Here an answer is right or wrong, there is no partial credit; docs/tasks-reasoning-gym.md compares the two by task.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

from rl_swarm.types import Question

# The longest number among the library's answers has some 25 characters, the longest sensible conclusion some 15.
LONGEST_NUMBER = 60
LONGEST_FORMULA = 100
DEEPEST_FORMULA = 20
MOST_VARIABLES = 6

# Decimal answers count when they are right to three places, however many more places there are.
DECIMAL_TOLERANCE = Fraction(5, 10_000)

# The exponent has at most two digits: `1e999999999` would be a number of a billion digits.
_NUMBER = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d+|(?=\.))((?:\.\d+)?(?:[eE][+-]?\d{1,2})?)", re.ASCII)
_FRACTION = re.compile(
    r"\$?\s*(?:(\d{1,12})\s*/\s*(\d{1,12})|\\d?frac\s*\{\s*(\d{1,12})\s*\}\s*\{\s*(\d{1,12})\s*\})\s*\$?", re.ASCII
)
_PREMISE = re.compile(r"^\.?\d+\. (.+)$", re.MULTILINE)
_BINDS = {"↔": 1, "→": 2, "∨": 3, "∧": 4}


def verify(question: Question, given: str) -> bool:
    """Whether `given`, the text between the answer tags, answers the question."""
    return _VERIFIERS[question.name.task](question, given)


def parse_number(text: str) -> Fraction | None:
    """The value of an integer or decimal such as `-1,234.50` or `2.5E-7`; None for anything else, inf and nan too."""
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= LONGEST_NUMBER else None
    if match is None:
        return None
    sign, whole, rest = match.groups()
    return Fraction(sign + whole.replace(",", "") + rest)


def parse_fraction(text: str) -> tuple[int, int] | None:
    r"""Numerator and denominator of `a/b`, `$a/b$`, `\frac{a}{b}` or `\dfrac{a}{b}`, as written: not reduced."""
    match = _FRACTION.fullmatch(text) if len(text) <= LONGEST_NUMBER else None
    if match is None:
        return None
    numerator, denominator = (part for part in match.groups() if part is not None)
    return int(numerator), int(denominator)


def parse_grid(text: str) -> list[list[str]]:
    """Rows of cells: lines, and what stands between the blanks of a line."""
    return [line.split() for line in text.strip().splitlines()]


def truth_table(formula: str, columns: Mapping[str, int], rows: int) -> int | None:
    """The rows in which a formula over ∧ ∨ → ↔ ¬ and brackets is true, as a bit mask; None if it is not a formula.

    `columns` has the truth table of each variable, `rows` the mask of all rows.
    """
    if len(formula) > LONGEST_FORMULA:
        return None
    # The mark at the end spares every look at the next symbol a check for the end.
    symbols = "".join(formula.split()) + "."
    try:
        table, end = _formula(symbols, 0, 1, columns, rows, DEEPEST_FORMULA)
    except ValueError:
        return None
    return table if end == len(symbols) - 1 else None


def _formula(symbols: str, at: int, weakest: int, columns: Mapping[str, int], rows: int, depth: int) -> tuple[int, int]:
    """The table of the longest formula from `at` whose connectives bind at least as `weakest`, and where it ends."""
    left, at = _operand(symbols, at, columns, rows, depth)
    while (binds := _BINDS.get(symbols[at], 0)) >= weakest:
        connective = symbols[at]
        right, at = _formula(symbols, at + 1, binds + 1, columns, rows, depth)
        if connective == "∧":
            left &= right
        elif connective == "∨":
            left |= right
        elif connective == "→":
            left = rows & ~left | right
        else:
            left = rows & ~(left ^ right)
    return left, at


def _operand(symbols: str, at: int, columns: Mapping[str, int], rows: int, depth: int) -> tuple[int, int]:
    if depth == 0:
        raise ValueError("too deep")
    if symbols[at] == "¬":
        table, at = _operand(symbols, at + 1, columns, rows, depth - 1)
        return rows & ~table, at
    if symbols[at] == "(":
        table, at = _formula(symbols, at + 1, 1, columns, rows, depth - 1)
        if symbols[at] != ")":
            raise ValueError("open bracket")
        return table, at + 1
    if symbols[at] not in columns:
        raise ValueError("not a variable")
    return columns[symbols[at]], at + 1


def variable_columns(letters: str) -> tuple[dict[str, int], int]:
    """For each letter the mask of those among the 2^n rows in which it is true, and the mask of all rows."""
    count = 1 << len(letters)
    columns = {
        letter: sum(1 << row for row in range(count) if row >> place & 1) for place, letter in enumerate(letters)
    }
    return columns, (1 << count) - 1


@lru_cache(maxsize=1024)
def new_facts(prompt: str) -> tuple[tuple[int, ...], str]:
    """What can be concluded from the premises in a prompt, as truth tables over the letters that come with them.

    A new fact is a literal, or two literals joined by "or", that follows from the premises together, follows from
    no single premise, and of which no part follows already. There is none where the premises contradict one another.
    """
    premises = _PREMISE.findall(prompt)
    letters = "".join(sorted(set(re.findall("[A-Z]", "".join(premises)))))
    if len(letters) > MOST_VARIABLES:
        return (), letters
    columns, rows = variable_columns(letters)
    tables = [table for premise in premises if (table := truth_table(premise, columns, rows)) is not None]
    together = rows
    for table in tables:
        together &= table
    if len(tables) < len(premises) or together == 0:
        return (), letters

    def follows(fact: int) -> bool:
        return together & ~fact == 0

    literals = [literal for column in columns.values() for literal in (column, rows & ~column)]
    facts = [literal for literal in literals if follows(literal)]
    # What contains a literal that follows is only that literal weakened; P ∨ ¬P is true in every row.
    open_literals = [literal for literal in literals if not follows(literal)]
    facts += [a | b for a, b in combinations(open_literals, 2) if a | b != rows and follows(a | b)]
    return tuple(fact for fact in facts if all(table & ~fact for table in tables)), letters


def _concludes(question: Question, given: str) -> bool:
    """Whether `given` says one or several new facts and nothing else, with variables in at most two places.

    Two, because three leave room to write the premises down again with ∧ between them.
    """
    facts, letters = new_facts(question.prompt)
    columns, rows = variable_columns(letters)
    conclusion = truth_table(given, columns, rows)
    if conclusion is None or sum(symbol in columns for symbol in given) > 2:
        return False
    said = [fact for fact in facts if conclusion & ~fact == 0]
    together = rows
    for fact in said:
        together &= fact
    return bool(said) and together == conclusion


def _same_number(question: Question, given: str) -> bool:
    value = parse_number(given)
    return value is not None and value == parse_number(question.answer)


def _same_decimal(question: Question, given: str) -> bool:
    value, expected = parse_number(given), parse_number(question.answer)
    return value is not None and expected is not None and abs(value - expected) <= DECIMAL_TOLERANCE


def _same_fraction(question: Question, given: str) -> bool:
    value = parse_fraction(given)
    return value is not None and value == parse_fraction(question.answer)


def _same_grid(question: Question, given: str) -> bool:
    return parse_grid(given) == parse_grid(question.answer)


def _same_text(question: Question, given: str) -> bool:
    return given == question.answer


def _same_word(question: Question, given: str) -> bool:
    return given.lower() == question.answer.lower()


def _same_day_or_count(question: Question, given: str) -> bool:
    """Calendar answers are a weekday, Yes or No, or a count."""
    return _same_word(question, given) if question.answer.isalpha() else _same_number(question, given)


_VERIFIERS: Mapping[str, Callable[[Question, str], bool]] = {
    "base_conversion": _same_text,
    "basic_arithmetic": _same_number,
    "arc_1d": _same_grid,
    "bf": _same_text,
    "propositional_logic": _concludes,
    "fraction_simplification": _same_fraction,
    "decimal_arithmetic": _same_decimal,
    "calendar_arithmetic": _same_day_or_count,
    "binary_matrix": _same_grid,
    "chain_sum": _same_number,
    "gcd": _same_number,
    "lcm": _same_number,
    "count_bits": _same_number,
    "spell_backward": _same_word,
    "simple_equations": _same_number,
    "letter_counting": _same_number,
    "leg_counting": _same_number,
}
