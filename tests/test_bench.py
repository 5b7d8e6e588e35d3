"""`rl-swarm bench` as a user runs it: one JSON object whose figures agree with one another, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from rl_swarm import __version__
from rl_swarm.cli import main

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parent.parent
BENCH = [sys.executable, "-m", "rl_swarm.cli", "bench"]
NODES, QUESTIONS, GROUP, NEW_TOKENS, ROUNDS = 2, 3, 4, 5, 3
TINY = (
    f"--nodes {NODES} --num-train-samples {QUESTIONS} --num-generations {GROUP} --max-new-tokens {NEW_TOKENS}".split()
)


def environment(home: Path) -> dict[str, str]:
    home.mkdir()
    return {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A small run in an empty folder, which is still empty afterwards, as is the user's home."""
    here, home = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("user") / "home"
    flags = [*TINY, "--warm-up", "1", "--rounds", str(ROUNDS), "--device", "cpu", "--seed", "7"]
    done = subprocess.run(
        [*BENCH, *flags], cwd=here, env=environment(home), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert [*here.rglob("*"), *home.rglob("*")] == []
    return done


@pytest.fixture(scope="module")
def found(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def test_the_object_says_what_was_run(found: dict[str, Any]) -> None:
    run = found["run"]
    asked = {"model": "pico", "nodes": NODES, "questions": QUESTIONS, "group_size": GROUP, "max_new_tokens": NEW_TOKENS}
    chosen = {"dtype": "float32", "tasks": "arithmetic", "compile": "auto", "compiled": False, "cuda_graphs": False}
    assert (asked | chosen | {"seed": 7, "warm_up": 1, "rounds": ROUNDS, "devices": 1}).items() <= run.items()
    assert "2 nodes as one program" in run["policy"] and run["device"].endswith("(cpu)")
    versions = found["versions"]
    assert versions["rl-swarm"] == __version__ and {"python", "torch"} <= versions.keys()


def test_progress_is_told_beside_the_object(ended: subprocess.CompletedProcess[str]) -> None:
    lines = ended.stderr.splitlines()
    assert lines[0] == "loading pico"
    told = [line.partition(":")[0] for line in lines]
    assert [one for one in told if one.startswith(("warm-up", "round"))] == [
        "warm-up 1 of 1",
        *(f"round {number + 1} of {ROUNDS}" for number in range(ROUNDS)),
    ]


def test_medians_are_those_of_the_rounds(found: dict[str, Any]) -> None:
    rounds, medians = found["rounds"], found["medians"]
    assert len(rounds) == ROUNDS
    for name, part in (("seconds_a_round", "seconds"), ("seconds_generate", "generate"), ("seconds_update", "update")):
        assert medians[name] == pytest.approx(median(one[part] for one in rounds), abs=1e-6)
    sampled = [one["sampled_tokens"] / one["generate"] for one in rounds]
    trained = [one["trained_tokens"] / one["update"] for one in rounds]
    assert medians["sampled_tokens_a_second"] == pytest.approx(median(sampled), abs=0.06)
    assert medians["trained_tokens_a_second"] == pytest.approx(median(trained), abs=0.06)


def test_the_figures_of_a_round_agree_with_one_another(found: dict[str, Any]) -> None:
    completions = NODES * QUESTIONS * GROUP
    for one in found["rounds"]:
        assert one["generate"] > 0 and one["update"] > 0
        assert one["generate"] + one["update"] <= one["seconds"] + 1e-5
        assert one["sampled_tokens"] == pytest.approx(one["completion_tokens"] * completions, abs=0.006 * completions)
        assert completions <= one["sampled_tokens"] <= completions * NEW_TOKENS
        assert one["trained_tokens"] == one["sampled_tokens"], "every group is informative, no completion is left out"
        assert 0 <= one["logprob_gap"] < 1e-3, "in float32 training sees what sampling saw"
        assert one["memory_backoffs"] == 0 and one["device_gib"] is None
    for name in ("prompt_tokens", "completion_tokens"):
        assert found["run"][name] == pytest.approx(fmean(one[name] for one in found["rounds"]), abs=0.006)
    assert found["logprob_gap"] == max(one["logprob_gap"] for one in found["rounds"])


def test_the_first_round_is_told_apart_with_its_parts(found: dict[str, Any]) -> None:
    first = found["first_round"]
    assert all(first[part] > 0 for part in ("load", "generate", "update"))
    assert first["load"] + first["generate"] + first["update"] <= first["seconds"] + 1e-5


def test_the_machine_is_measured_too(found: dict[str, Any]) -> None:
    ceilings, memory = found["ceilings"], found["peak_memory"]
    assert 0 < ceilings["copy_gb_a_second"] < 1e5 and 0 < ceilings["matmul_tflops"] < 1e5
    assert ceilings["matmul_dtype"] == "float32"
    assert memory.keys() == {"resident_gib"} and 0.05 < memory["resident_gib"] < 100


def test_the_work_is_the_same_at_every_run_and_with_any_means(
    found: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*TINY, "--warm-up", "1", "--rounds", "1", "--device", "cpu", "--seed", "7", "--micro-batch-tokens", "64"]
    assert main(["bench", *flags]) == 0
    again = json.loads(capsys.readouterr().out)
    for name in ("sampled_tokens", "trained_tokens", "prompt_tokens"):
        assert again["rounds"][0][name] == found["rounds"][0][name]
    assert again["run"]["micro_batch_tokens"] == 64


def test_prompts_are_counted_as_the_model_reads_them(capsys: pytest.CaptureFixture[str]) -> None:
    """One token a character for pico: examples before a question make it longer."""
    counted = []
    for examples in ("0", "2"):
        flags = [*TINY, "--warm-up", "1", "--rounds", "1", "--device", "cpu", "--prompt-examples", examples]
        assert main(["bench", *flags]) == 0
        counted.append(json.loads(capsys.readouterr().out)["run"]["prompt_tokens"])
    assert counted[1] > 2 * counted[0]


def test_the_environment_names_the_model_where_no_flag_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODEL_NAME", "toy")
    assert main(["bench"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "MODEL_NAME='toy' is not allowed here" in shown.err and shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--model-name", "nonsense"], "MODEL_NAME='nonsense' is not allowed"),
        (["--model-name", "./nowhere"], "neither a folder here nor a Hub id"),
        (["--num-generations", "1"], "NUM_GENERATIONS='1' is not allowed"),
        (["--tasks", "dance"], "'dance' is no task"),
        (["--device", "tpu"], "DEVICE='tpu' is not allowed"),
    ],
)
def test_settings_that_are_wrong_are_one_sentence(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *flags]) == 2
    shown = capsys.readouterr()
    assert told in shown.err and shown.err.count("\n") == 1 and shown.out == ""


@pytest.mark.parametrize("flag", ["--nodes", "--rounds", "--warm-up"])
def test_counts_are_one_or_more(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", flag, "0"])
    assert caught.value.code == 2
    assert "'0' is not allowed: a whole number of 1 or more" in capsys.readouterr().err


def test_an_experiments_settings_are_not_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    for flag in ("--device", "--dtype", "--compile", "--cuda-graphs", "--micro-batch-tokens", "--lora-rank"):
        assert flag in shown
    for flag in ("--gdrive-path", "--max-rounds", "--num-transplant-trees", "--eval-every", "--off-policy"):
        assert flag not in shown
    assert "[pico]" in shown


def test_an_interrupt_ends_it_at_once_without_a_result(tmp_path: Path) -> None:
    bench = subprocess.Popen(
        [*BENCH, *TINY, "--rounds", "1000000", "--device", "cpu"],
        cwd=tmp_path,
        env=environment(tmp_path / "home"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where the tests run in the background, the signal is ignored, and children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert bench.stderr is not None
        assert any(line.startswith("round 1 of") for line in bench.stderr), "it came to the timed rounds"
        bench.send_signal(signal.SIGINT)
        out, told = bench.communicate(timeout=60)
    finally:
        if bench.poll() is None:
            bench.kill()
        bench.communicate()
    assert bench.returncode == 130
    assert out == "" and "Traceback" not in told
