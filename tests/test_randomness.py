"""Randomness by name: the same name always gives the same draws, any other name gives others."""

from __future__ import annotations

from itertools import product

from rl_swarm.randomness import SEED_BITS, named_rng, named_seed
from rl_swarm.types import Step


def test_a_name_gives_the_same_seed_on_every_machine_and_for_ever() -> None:
    assert named_seed(42, "ada", "questions", Step(3, 1)) == 216202478237821
    assert named_rng(42, "ada", "questions", Step(3, 1)).random() == 0.7162338023255349


def test_every_part_of_the_name_matters() -> None:
    nodes, purposes = ("ada", "bob", "node_1", "node_11", "1"), ("questions", "select", "peers", "generate 0")
    steps = [Step(round, stage) for round in range(30) for stage in range(2)]
    seeds = [named_seed(*name) for name in product((0, 1, 42, 421), nodes, purposes, steps)]
    assert len(set(seeds)) == len(seeds) == 4 * 5 * 4 * 60


def test_seeds_use_the_whole_range_that_json_holds_exactly() -> None:
    seeds = [named_seed(1, "ada", "questions", Step(round)) for round in range(500)]
    assert all(0 <= seed < 2**SEED_BITS for seed in seeds)
    assert max(seeds) > 0.99 * 2**SEED_BITS and min(seeds) < 0.01 * 2**SEED_BITS


def test_a_draw_does_not_depend_on_what_was_drawn_before() -> None:
    first = named_rng(42, "ada", "select", Step(5))
    first.random()
    assert named_rng(42, "ada", "select", Step(5)).random() != first.random()
    assert named_rng(42, "ada", "select", Step(5)).random() == named_rng(42, "ada", "select", Step(5)).random()
