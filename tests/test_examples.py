"""Examples before a question: of its kind, right, never the question itself, never held out, and never on the wire."""

from __future__ import annotations

import random

import pytest
from swarms import toy_experiment, toy_host, toy_settings

from rl_swarm.experiment import PublishedFile
from rl_swarm.stores.memory import MemoryStore
from rl_swarm.tasks import open_tasks
from rl_swarm.tasks.arithmetic import Arithmetic
from rl_swarm.tasks.text import is_held_out
from rl_swarm.types import Question, QuestionName, Step


def check(question: Question, count: int) -> None:
    assert len(question.examples) == count
    assert len({one.prompt for one in question.examples}) == count
    assert question.prompt not in [one.prompt for one in question.examples]
    assert not any(is_held_out(one.prompt) for one in question.examples)


def test_every_question_carries_right_examples_of_its_own_kind() -> None:
    task, plain = open_tasks("arithmetic", "default", 3), Arithmetic()
    known = {question.prompt: question for question in plain.sample(4000, random.Random(0))}
    for question in task.sample(100, random.Random(1)) + task.sample(20, random.Random(2), held_out=True):
        check(question, 3)
        for example in question.examples:
            twin = known[example.prompt]
            assert plain.score(twin, example.answer) == 1.0 and twin.name.task == question.name.task


def test_examples_are_the_same_for_everyone_and_for_ever() -> None:
    first, second = (open_tasks("arithmetic", "default", 2) for _ in range(2))
    questions = first.sample(30, random.Random(5))
    other_way_round = {q.prompt: q.examples for q in reversed([second.rebuild(q.name) for q in reversed(questions)])}
    for question in questions:
        assert other_way_round[question.prompt] == question.examples
        assert first.rebuild(question.name) == question


def test_without_the_setting_there_are_none() -> None:
    assert all(not question.examples for question in open_tasks("arithmetic", "default").sample(5, random.Random(0)))


@pytest.mark.slow
def test_tasks_of_the_library_have_examples_that_earn_the_reward_and_are_found_in_time() -> None:
    task = open_tasks("reasoning_gym", "easy", 2)
    seen = set()
    for question in task.sample(60, random.Random(3)):
        seen.add(question.name.task)
        # Its answers are many, and the library stores none.
        check(question, 0 if question.name.task == "propositional_logic" else 2)
        for example in question.examples:
            assert example.answer.startswith("<answer>") and example.answer.endswith("</answer>")
    assert len(seen) == 9


def test_examples_stay_at_home_and_nodes_with_other_ones_understand_each_other() -> None:
    settings = toy_settings(prompt_examples=2, num_transplant_trees=4, num_generations=8)
    experiment = toy_experiment(MemoryStore(), settings)
    with_examples, without = toy_host(experiment, ["a"], settings), toy_host(experiment, ["b"], toy_settings())
    assert settings.tasks is not None
    with_examples.task = open_tasks(settings.tasks, "default", settings.prompt_examples)
    shared = {host: host.share(Step(0)) for host in (with_examples, without)}
    files = [file for file in experiment.published(Step(0)) if isinstance(file, PublishedFile)]
    wire = {file.node: experiment.read_rollouts(file) for file in files}
    for node, task in (("a", without.task), ("b", with_examples.task)):
        for id, question in wire[node].questions.items():
            (prompt,) = {rollout.prompt for rollout in wire[node].rollouts[id]}
            assert "answer" not in prompt
            name = QuestionName(question.task, question.config, question.seed, question.index)
            assert task.rebuild(name).prompt == prompt
    assert shared[with_examples].mine["a"][0].group.question.examples
