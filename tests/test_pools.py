"""MODEL_NAME=auto: which model a node gets, and that it stays with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from swarms import a_peer, toy_experiment, toy_settings

from rl_swarm import settings
from rl_swarm.experiment import Experiment, open_experiment
from rl_swarm.models.pools import GIB, LARGE_POOL, SMALL_POOL, choose_model, is_pooled
from rl_swarm.policies import gpu_memory
from rl_swarm.run import _settle_model
from rl_swarm.settings import Settings
from rl_swarm.stores.folder import FolderStore
from rl_swarm.stores.memory import MemoryStore

NODES = [f"node_{number}" for number in range(60)]


@pytest.mark.parametrize("gib", [0, 4, 16, 24, 32])
def test_small_cards_and_no_card_get_the_small_pool(gib: float) -> None:
    assert {choose_model(int(gib * GIB), 42, node).model for node in NODES} == set(SMALL_POOL)


@pytest.mark.parametrize("gib", [39.4, 40, 80, 141])
def test_cards_of_40_gib_get_the_large_pool_though_they_report_a_little_less(gib: float) -> None:
    assert {choose_model(int(gib * GIB), 42, node).model for node in NODES} == set(LARGE_POOL)


def test_the_choice_is_one_of_seed_and_name_alone() -> None:
    chosen = [choose_model(80 * GIB, 42, node).model for node in NODES]
    assert chosen == [choose_model(141 * GIB, 42, node).model for node in NODES]
    assert chosen != [choose_model(80 * GIB, 43, node).model for node in NODES]
    # For ever: a node that was chosen for once is chosen for the same way by every later version.
    assert choose_model(0, 42, "worker_1").model == "Qwen/Qwen3-0.6B"
    assert choose_model(80 * GIB, 42, "worker_1").model == "Gensyn/Qwen2.5-1.5B-Instruct"


def test_the_reason_is_said() -> None:
    model, reason = choose_model(80 * GIB, 42, "worker_1")
    assert reason == f"auto: 80 GiB of GPU memory, so one of the large pool: {model}"
    model, reason = choose_model(0, 42, "worker_1")
    assert reason == f"auto: no GPU, so one of the small pool: {model}"


def test_every_model_of_the_pools_has_the_same_defaults_as_auto() -> None:
    """So it does not matter that the defaults are filled in before the model is chosen."""
    auto = dict(settings.load({"model_name": "auto", "node_id": "a"}))
    for model in SMALL_POOL + LARGE_POOL:
        assert dict(settings.load({"model_name": model, "node_id": "a"})) == auto | {"model_name": model}


def test_a_device_without_memory_of_its_own_counts_as_no_gpu() -> None:
    assert gpu_memory("cpu", 2) == gpu_memory("mps", 2) == 0


# What a worker does with it


def an_experiment(**models: str) -> Experiment:
    experiment = toy_experiment(MemoryStore(), toy_settings())
    for node, model in models.items():
        experiment.write_lease(experiment.peer_key(node), a_peer(experiment, node, model=model))
    return experiment


def auto(**given: object) -> Settings:
    return settings.load({"model_name": "auto", "device": "cpu", "node_id": "box", **given})


def test_a_named_model_is_left_alone() -> None:
    chosen = auto(model_name="pico")
    assert _settle_model(an_experiment(box=LARGE_POOL[0]), ["box"], chosen) == (chosen, "")


def test_a_new_node_gets_a_model_by_its_machine_and_name() -> None:
    chosen, reason = _settle_model(an_experiment(other=LARGE_POOL[0]), ["box"], auto())
    assert chosen.model_name == choose_model(0, 42, "box").model
    assert "no GPU" in reason
    assert dict(chosen) == dict(auto()) | {"model_name": chosen.model_name}


def test_a_node_keeps_the_model_it_began_with_whatever_machine_it_is_on() -> None:
    for model in SMALL_POOL + LARGE_POOL:
        chosen, reason = _settle_model(an_experiment(box=model), ["box"], auto())
        assert chosen.model_name == model
        assert reason == f"auto: box began with {model} in trial and keeps it"


def test_the_nodes_of_a_host_share_a_model_also_with_one_that_is_new() -> None:
    chosen, reason = _settle_model(an_experiment(box_1=LARGE_POOL[1]), ["box_0", "box_1", "box_2"], auto())
    assert chosen.model_name == LARGE_POOL[1] and "box_1" in reason


def test_a_model_outside_the_pools_is_not_kept() -> None:
    chosen, _ = _settle_model(an_experiment(box="pico"), ["box"], auto())
    assert is_pooled(chosen.model_name)


@pytest.mark.slow
def test_a_worker_says_what_was_chosen_and_does_not_join_without_it(tmp_path: Path) -> None:
    join = [sys.executable, "-m", "rl_swarm.cli", "join", "--gdrive-path", str(tmp_path), "--experiment-name", "trial"]
    join += ["--node-id", "worker_1", "--model-name", "auto", "--device", "cpu", "--coordinator-pace", "free"]
    # Where nothing can be downloaded it goes no further than that.
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(join, env=offline, capture_output=True, text=True, timeout=120)
    chosen = choose_model(0, 42, "worker_1")
    assert done.returncode == 1 and chosen.reason in done.stdout, done.stdout
    assert f"The model {chosen.model} could not be downloaded" in done.stderr
    experiment = open_experiment(FolderStore(tmp_path), "trial")
    assert not experiment.peers().known, "what cannot be loaded does not become a member"
    assert experiment.birth.settings["model_name"] == "auto"
