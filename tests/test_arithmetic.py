"""The arithmetic task: right answers, questions that rebuild from their names, a clean split, exact scores."""

from __future__ import annotations

import random
import re
from math import gcd
from statistics import fmean

import pytest

from rl_swarm.errors import MalformedRecord
from rl_swarm.randomness import SEED_BITS, named_rng
from rl_swarm.tasks.arithmetic import CONFIG, KINDS, Arithmetic
from rl_swarm.tasks.text import CLOSE, LONGEST_ANSWER, LONGEST_SCORED_TEXT, OPEN, is_held_out, tagged_answer
from rl_swarm.types import Question, QuestionName, Step

TASK = Arithmetic()


def drawn(kind: str, count: int = 300) -> list[Question]:
    return Arithmetic([kind]).sample(count, random.Random(f"test {kind}"))


def is_right(kind: str, prompt: str, answer: str) -> bool:
    """Checked from the prompt alone, and by other means than the task's own."""
    numbers = [int(digits) for digits in re.findall(r"\d+", prompt)]
    if kind == "reversal":
        return prompt == f"rev({answer[::-1]})="
    if kind == "fraction":
        top, bottom = map(int, answer.split("/"))
        return top * numbers[1] == bottom * numbers[0] and gcd(top, bottom) == 1
    if kind == "base":
        return int(answer, numbers[0]) == numbers[1] and answer[0] != "0"
    value = int(answer)
    if kind == "gcd":
        return [n for n in range(value, 100) if numbers[0] % n == numbers[1] % n == 0] == [value]
    return (
        value
        == {
            "sum": lambda: sum(numbers),
            "difference": lambda: numbers[0] - numbers[1],
            "product": lambda: numbers[0] * numbers[1],
            "bits": lambda: f"{numbers[0]:b}".count("1"),
            "remainder": lambda: numbers[0] % numbers[1],
        }[kind]()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_stored_answer_is_the_right_one(kind: str) -> None:
    questions = drawn(kind, 60)
    assert all(is_right(kind, question.prompt, question.answer) for question in questions)
    assert all(question.name.task == f"arithmetic/{kind}" for question in questions)


def test_a_question_is_rebuilt_from_its_name() -> None:
    questions = TASK.sample(500, random.Random(1))
    assert [TASK.rebuild(question.name) for question in questions] == questions


def test_a_name_once_published_keeps_its_meaning() -> None:
    name = QuestionName("arithmetic/fraction", "v1", 42464117738980, 0)
    assert TASK.rebuild(name) == Question(name, "35/45=", "7/9")


def test_every_kind_is_drawn_about_equally_often() -> None:
    questions = TASK.sample(1800, random.Random(2))
    counts = [sum(question.name.task == f"arithmetic/{kind}" for question in questions) for kind in KINDS]
    assert min(counts) > 150 and max(counts) < 250


def test_only_the_chosen_kinds_are_drawn_and_accepted() -> None:
    task = Arithmetic(["sum", "gcd"])
    assert {question.name.task for question in task.sample(50, random.Random(3))} == {
        "arithmetic/sum",
        "arithmetic/gcd",
    }
    with pytest.raises(MalformedRecord) as caught:
        task.rebuild(drawn("bits", 1)[0].name)
    assert caught.value.reason == "other_task"


def test_held_out_questions_are_never_drawn_for_training_nor_the_others_for_evaluation() -> None:
    for held_out in (False, True):
        questions = TASK.sample(300, random.Random(4), held_out=held_out)
        assert {is_held_out(question.prompt) for question in questions} == {held_out}
    training = {question.prompt for question in TASK.sample(1500, random.Random(5))}
    evaluation = {question.prompt for question in TASK.sample(800, random.Random(6), held_out=True)}
    assert not training & evaluation


def test_a_held_out_question_is_not_rebuilt_for_anyone() -> None:
    for question in TASK.sample(50, random.Random(7), held_out=True):
        with pytest.raises(MalformedRecord) as caught:
            TASK.rebuild(question.name)
        assert caught.value.reason == "held_out"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (QuestionName("arithmetic/telepathy", CONFIG, 1, 0), "unknown_task"),
        (QuestionName("arithmetic", CONFIG, 1, 0), "unknown_task"),
        (QuestionName("sum", CONFIG, 1, 0), "unknown_task"),
        (QuestionName("", CONFIG, 1, 0), "unknown_task"),
        (QuestionName("arithmetic/sum", "v2", 1, 0), "unknown_config"),
        (QuestionName("arithmetic/sum", CONFIG, -1, 0), "bad_question"),
        (QuestionName("arithmetic/sum", CONFIG, 1 << SEED_BITS, 0), "bad_question"),
        (QuestionName("arithmetic/sum", CONFIG, 1, 1), "bad_question"),
    ],
)
def test_a_name_that_means_nothing_is_refused_for_its_reason(name: QuestionName, reason: str) -> None:
    with pytest.raises(MalformedRecord) as caught:
        TASK.rebuild(name)
    assert caught.value.reason == reason


def test_a_question_with_its_answer_is_short() -> None:
    lengths = [len(q.prompt + OPEN + q.answer + CLOSE) for q in TASK.sample(3000, random.Random(8))]
    assert max(lengths) <= 36
    assert fmean(lengths) < 30


def test_nodes_get_questions_of_their_own_and_no_round_repeats_another() -> None:
    streams = {
        node: [q.name for round in range(100) for q in TASK.sample(8, named_rng(42, node, "questions", Step(round)))]
        for node in ("ada", "bob", "cleo", "node_1", "node_2")
    }
    together = [name for stream in streams.values() for name in stream]
    assert len(set(together)) == len(together) == 5 * 100 * 8
    prompts = {node: {TASK.rebuild(name).prompt for name in stream} for node, stream in streams.items()}
    assert all(len(found) > 600 for found in prompts.values()), "hardly a prompt comes twice either"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>7</answer>", 1.0),
        ("<answer> 7\n</answer>", 1.0),
        ("First <answer>6</answer>, no: <answer>7</answer>", 1.0),
        ("First <answer>7</answer>, no: <answer>6</answer>", 0.0),
        ("<answer>7</answer> and then <answer>6", 1.0),
        ("<answer>6 <answer>7</answer>", 1.0),
        ("<answer>7</answer></answer>", 1.0),
        ("7", 0.0),
        ("", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>7", 0.0),
        ("7</answer>", 0.0),
        ("<ANSWER>7</ANSWER>", 0.0),
        ("<answer>7.0</answer>", 0.0),
        ("<answer>+7</answer>", 0.0),
        ("<answer>07</answer>", 0.0),
        ("<answer>7 8</answer>", 0.0),
        ("<answer>3+4</answer>", 0.0),
        ("<answer>٧</answer>", 0.0),
    ],
)
def test_only_the_exact_answer_in_the_last_pair_of_tags_pays(text: str, reward: float) -> None:
    question = Question(QuestionName("arithmetic/sum", CONFIG, 1, 0), "3+4=", "7")
    assert TASK.score(question, text) == reward


def test_long_texts_are_judged_by_their_end() -> None:
    assert tagged_answer("<answer>1</answer>" + "x" * LONGEST_SCORED_TEXT) is None
    assert tagged_answer("x" * LONGEST_SCORED_TEXT + "<answer>1</answer>") == "1"
    assert tagged_answer(f"<answer>{'1' * LONGEST_ANSWER}</answer>") == "1" * LONGEST_ANSWER
    assert tagged_answer(f"<answer>{'1' * (LONGEST_ANSWER + 1)}</answer>") is None
