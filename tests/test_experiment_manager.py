"""The older entry points for notebooks: what they return is what notebooks were written against."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from swarms import NODES, toy_run

from rgym_exp.utils.experiment_manager import (
    cleanup_experiment,
    compare_experiments,
    export_experiment_summary,
    get_cumulative_rewards,
    get_experiment_metrics,
    get_experiment_status,
    init_experiment,
    list_experiments,
)
from rgym_exp.utils.notebook_utils import run_with_live_output
from rl_swarm.errors import ExperimentExists, ExperimentMissing, SettingsError
from rl_swarm.experiment import Experiment
from rl_swarm.stores.folder import FolderStore

STATUS_KEYS = (
    "current_round current_stage num_active_peers active_peers peer_ids last_updated latest_checkpoint "
    "cumulative_rewards total_cumulative_reward total_metric_entries"
)


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    chosen: dict[str, Any] = {"num_generations": 8, "eval_every": 2, "max_rounds": 4}
    chosen |= {"learning_rate": 8.0, "tasks": "arithmetic/bits"}
    return toy_run(FolderStore(tmp_path, durable=False), **chosen)[0]


@pytest.mark.usefixtures("experiment")
def test_the_status_has_the_keys_notebooks_use(tmp_path: Path) -> None:
    status = get_experiment_status(str(tmp_path), "trial")
    assert set(STATUS_KEYS.split()) <= set(status)
    assert (status["current_round"], status["total_metric_entries"]) == (3, 12)
    assert status["num_active_peers"] == status["active_peers"] == 0
    assert status["peer_ids"] == list(NODES)
    assert get_cumulative_rewards(str(tmp_path), "trial") == status["cumulative_rewards"]


def test_a_missing_experiment_is_an_error_in_the_status_and_an_exception_elsewhere(tmp_path: Path) -> None:
    root = str(tmp_path)
    for path, name in ((root, "nothing"), (root, "../x"), (str(tmp_path / "nowhere"), "nothing")):
        status = get_experiment_status(path, name)
        assert list(status) == ["error"] and status["error"]
    for function in (get_experiment_metrics, get_cumulative_rewards, export_experiment_summary, cleanup_experiment):
        with pytest.raises(ExperimentMissing, match="no experiment nothing"):
            function(root, "nothing")
    with pytest.raises(ExperimentMissing):
        compare_experiments(root, ["nothing"])


def test_metrics_are_a_frame_to_group_and_plot(tmp_path: Path, experiment: Experiment) -> None:
    frame = get_experiment_metrics(str(tmp_path), "trial")
    assert {"round", "stage", "node_id", "my_reward", "timestamp", "external_used", "external_wanted"} <= set(frame)
    assert len(frame) == 12
    by_round, by_node = frame.groupby("round")["my_reward"].mean(), frame.groupby("node_id")["my_reward"].mean()
    assert list(by_round.index) == [0, 1, 2, 3] and list(by_node.index) == list(NODES)
    rows = experiment.metrics("bob").rows
    assert by_node["bob"] == pytest.approx(sum(row["my_reward"] for row in rows) / 4)


def test_metrics_of_a_new_experiment_are_an_empty_frame_with_its_columns(tmp_path: Path) -> None:
    init_experiment(str(tmp_path), "new")
    frame = get_experiment_metrics(str(tmp_path), "new")
    assert len(frame) == 0 and {"round", "stage", "node_id", "my_reward", "timestamp"} <= set(frame)
    assert frame.groupby("round")["my_reward"].mean().empty


def test_experiments_are_made_with_settings_by_keyword_and_listed(tmp_path: Path) -> None:
    made = init_experiment(str(tmp_path), "first", num_transplant_trees=4, model_name="pico")
    init_experiment(str(tmp_path), "second")
    assert list_experiments(str(tmp_path)) == ["first", "second"]
    birth = json.loads((tmp_path / "experiments/first/experiment.json").read_text())
    assert birth["run"] == made["run"] and made["experiment"] == "first"
    assert (birth["settings"]["num_transplant_trees"], birth["settings"]["model_name"]) == (4, "pico")
    with pytest.raises(ExperimentExists):
        init_experiment(str(tmp_path), "first")
    for bad in ({"num_generations": 1}, {"no_such_setting": 1}, {"node_id": "a/b"}):
        with pytest.raises(SettingsError, match=r"NUM_GENERATIONS|NO_SUCH_SETTING|NODE_ID"):
            init_experiment(str(tmp_path), "third", **bad)
    assert list_experiments(str(tmp_path)) == ["first", "second"]


def test_a_summary_is_returned_and_written_where_asked(tmp_path: Path, experiment: Experiment) -> None:
    found = export_experiment_summary(str(tmp_path), "trial", str(tmp_path / "summary.json"))
    assert found == json.loads((tmp_path / "summary.json").read_text())
    assert found["status"]["run"] == experiment.run and found["settings"]["max_rounds"] == 4


def test_experiments_are_compared_side_by_side(tmp_path: Path, experiment: Experiment) -> None:
    toy_run(experiment.store, name="shorter", max_rounds=2, nodes=("ada", "bob"))
    init_experiment(str(tmp_path), "new")
    table = compare_experiments(str(tmp_path), ["trial", "shorter", "new"]).set_index("experiment")
    assert list(table["rounds"]) == [4, 2, 0] and list(table["nodes"]) == [3, 2, 0]
    rows = [row for node in NODES for row in experiment.metrics(node).rows]
    rewards = [row["my_reward"] for row in rows]
    assert table.loc["trial", "mean_reward"] == pytest.approx(sum(rewards) / 12)
    assert table.loc["trial", "cumulative_reward"] == pytest.approx(sum(rewards))
    first, last = ([row["eval_reward"] for row in rows if row["round"] == round] for round in (1, 3))
    assert sum(first) != sum(last)
    assert table.loc["trial", "final_eval_reward"] == pytest.approx(sum(last) / 3)
    assert pd.isna(table.loc["shorter", "final_eval_reward"]) and pd.isna(table.loc["new", "mean_reward"])


def test_cleaning_up_removes_one_experiment(tmp_path: Path, experiment: Experiment) -> None:
    init_experiment(str(tmp_path), "other")
    count = len(list(experiment.store.keys("experiments/trial/")))
    assert cleanup_experiment(str(tmp_path), "trial") == count
    assert list_experiments(str(tmp_path)) == ["other"]
    assert not (tmp_path / "experiments/trial").exists()


def test_a_childs_output_appears_and_its_exit_code_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import os, sys; print('out', os.environ['MARK']); print('err', file=sys.stderr); sys.exit(3)"
    assert run_with_live_output([sys.executable, "-c", program], env={"MARK": "here"}) == 3
    assert sorted(capsys.readouterr().out.splitlines()) == ["err", "out here"]
    assert run_with_live_output("exit 4") == 4


def test_a_child_that_fills_its_pipe_is_not_stopped_by_it(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import sys; [print('x' * 1000) for _ in range(1000)]; sys.stdout.buffer.write(b'\\xff end')"
    assert run_with_live_output([sys.executable, "-c", program]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1001 and lines[-1].endswith("end")
