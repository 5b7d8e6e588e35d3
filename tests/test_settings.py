"""Settings: each by variable and by flag, every bad value one sentence and exit code 2, and no secret in the open."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rl_swarm import settings
from rl_swarm.cli import main
from rl_swarm.errors import SettingsError
from rl_swarm.settings import load

ROOT = Path(__file__).parent.parent
SECRET = "hf_thisIsTheSecret"

# For each setting a value other than its default, as a user types it. Settings of one possible value are left out.
OTHER_VALUES = {
    "gdrive_path": "elsewhere",
    "experiment_name": "another",
    "node_role": "coordinator",
    "node_id": "laptop",
    "model_name": "toy",
    "device": "cpu",
    "huggingface_access_token": SECRET,
    "seed": "7",
    "test_mode": "true",
    "max_rounds": "11",
    "max_stages": "2",
    "coordinator_round_interval": "1.5",
    "coordinator_pace": "free",
    "coordinator_join_grace": "0.5",
    "lease_seconds": "2.5",
    "num_train_samples": "5",
    "num_transplant_trees": "3",
    "num_generations": "6",
    "select": "uniform",
    "rollout_publish_frequency": "generation",
    "rollout_staleness": "4",
    "fetch_max_peers": "9",
    "fetch_timeout_seconds": "3.5",
    "cache_rollouts": "false",
    "rollout_cleanup_enabled": "true",
    "rollout_keep_last_n_rounds": "12",
    "rollout_archive_old": "true",
    "tasks": "arithmetic/gcd,basic_arithmetic",
    "task_difficulty": "easy",
    "learning_rate": "0.25",
    "max_new_tokens": "33",
    "temperature": "0.5",
    "top_p": "0.75",
    "off_policy": "topr",
    "loss": "cispo",
    "advantage": "leave_one_out",
    "aggregate": "constant",
    "minibatches": "4",
    "negative_weight": "0.5",
    "peer_negative_weight": "0.25",
    "truncated_completions": "leave_out",
    "kl_beta": "0.125",
    "chat_template": "none",
    "prompt_examples": "3",
    "lora_rank": "8",
    "adaptive_ij_enabled": "true",
    "clip_low": "0.125",
    "clip_high": "0.5",
    "dtype": "bfloat16",
    "micro_batch_tokens": "512",
    "gradient_checkpointing": "true",
    "compile": "off",
    "cuda_graphs": "false",
    "eval_every": "6",
    "eval_questions": "16",
    "checkpoint_interval": "4",
    "checkpoint_keep": "3",
}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def is_switch(name: str) -> bool:
    return settings.fields()[name].annotation is bool


def flag(name: str, value: str) -> list[str]:
    words = name.replace("_", "-")
    if is_switch(name):
        return [f"--{words}" if value == "true" else f"--no-{words}"]
    return [f"--{words}", value]


def typed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def initialised(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The settings of an experiment made by `rl-swarm init`, as they lie on disk."""
    assert main(["init", "made", *arguments]) == 0, capsys.readouterr().err
    (path,) = Path().glob("*/experiments/made/experiment.json")
    found: dict[str, Any] = json.loads(path.read_text())["settings"]
    assert found["gdrive_path"].lstrip("./") == str(path.parents[2])
    return found


def test_this_file_knows_every_setting() -> None:
    assert set(OTHER_VALUES) == set(settings.fields())
    defaults = load()
    for name, value in OTHER_VALUES.items():
        assert typed(value) != dict(defaults)[name], f"{name}: that is the default"


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_a_setting_is_read_from_its_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name.upper(), OTHER_VALUES[name])
    assert dict(load())[name] == typed(OTHER_VALUES[name])


@pytest.mark.parametrize(
    "name", sorted(set(OTHER_VALUES) - {"experiment_name", "huggingface_access_token", "node_role"})
)
def test_a_setting_is_read_from_its_flag_which_wins_over_the_variable(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    field, value = settings.fields()[name], OTHER_VALUES[name]
    # The variable has the default, where it can be written down: to win, the flag must change something.
    ordinary = str(field.default) if field.default not in (None, "") else value
    monkeypatch.setenv(name.upper(), ordinary)
    assert initialised(capsys, *flag(name, value))[name] == typed(value)


def test_all_variables_together_are_all_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OTHER_VALUES.items():
        monkeypatch.setenv(name.upper(), value)
    assert {name: dict(load())[name] for name in OTHER_VALUES} == {n: typed(v) for n, v in OTHER_VALUES.items()}


def test_given_values_win_over_variables_and_those_over_a_commands_own_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"seed": 1, "max_rounds": 1, "eval_every": 1}
    monkeypatch.setenv("SEED", "2")
    monkeypatch.setenv("MAX_ROUNDS", "2")
    loaded = load({"seed": 3}, defaults=own)
    assert (loaded.seed, loaded.max_rounds, loaded.eval_every) == (3, 2, 1)


def test_an_empty_variable_is_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    before = load({"node_id": "a"})
    for name in settings.fields():
        monkeypatch.setenv(name.upper(), "")
    assert load({"node_id": "a"}) == before


# Defaults that depend on something


def test_the_defaults_are_the_documented_ones() -> None:
    found = load()
    assert (found.max_rounds, found.num_train_samples, found.num_transplant_trees, found.num_generations) == (
        2000,
        8,
        0,
        8,
    )
    assert (found.experiment_name, found.node_role, found.seed) == ("default_experiment", "worker", 42)
    assert (found.coordinator_round_interval, found.coordinator_pace) == (60, "quorum")
    assert (found.rollout_publish_frequency, found.rollout_staleness) == ("stage", 1)
    assert (found.rollout_cleanup_enabled, found.rollout_keep_last_n_rounds, found.rollout_archive_old) == (
        False,
        10,
        False,
    )
    assert (found.cache_rollouts, found.fetch_max_peers, found.fetch_timeout_seconds) == (True, 10, 30)
    assert (found.checkpoint_interval, found.checkpoint_keep, found.adaptive_ij_enabled) == (10, 2, False)
    assert found.huggingface_access_token is None
    assert found.gdrive_path == "./rl-swarm-data"


def test_a_mounted_drive_is_the_default_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "COLAB_MOUNT", tmp_path)
    assert load().gdrive_path == f"{tmp_path}/rl-swarm"
    assert load({"gdrive_path": "mine"}).gdrive_path == "mine"


def test_test_mode_changes_three_defaults_and_nothing_else() -> None:
    ordinary, short = dict(load({"node_id": "a"})), dict(load({"node_id": "a", "test_mode": True}))
    differing = {name: short[name] for name in short if short[name] != ordinary[name]}
    assert differing == {"test_mode": True, "max_rounds": 3, "num_train_samples": 4, "num_generations": 4}


def test_in_test_mode_what_is_set_explicitly_wins_even_if_it_is_the_ordinary_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TEST_MODE", "True")
    monkeypatch.setenv("MAX_ROUNDS", "2000")
    found = initialised(capsys, "--num-generations", "8")
    assert (found["max_rounds"], found["num_train_samples"], found["num_generations"]) == (2000, 4, 8)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("pico", ("arithmetic", 5e-5, 16)),
        ("toy", ("arithmetic/bits,arithmetic/gcd,arithmetic/remainder", 0.5, 16)),
        ("Gensyn/Qwen2.5-0.5B-Instruct", ("reasoning_gym", 1e-6, 256)),
    ],
)
def test_some_defaults_depend_on_the_model(model: str, expected: tuple[object, ...]) -> None:
    found = load({"model_name": model})
    assert (found.tasks, found.learning_rate, found.max_new_tokens) == expected
    chosen = {"tasks": "gcd", "learning_rate": 0.125, "max_new_tokens": 9}
    found = load({"model_name": model, **chosen})
    assert (found.tasks, found.learning_rate, found.max_new_tokens) == ("gcd", 0.125, 9)


def test_a_node_without_a_name_gets_one_of_its_own() -> None:
    first, second = load().node_id, load().node_id
    assert re.fullmatch(r"node_[0-9a-f]{8}", first)
    assert first != second


def test_loaded_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load().seed = 1


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(SettingsError, match="NUM_GENERATION is not a setting"):
        load({"num_generation": 4})


# Bad values

COUNT, POSITIVE = "greater than or equal to 0", "greater than or equal to 1"
NAME = "no slash, no backslash, no '..' and no control character"
BAD_VALUES = [
    ("seed", "-1", COUNT),
    ("seed", "many", "a valid integer"),
    ("seed", "1.5", "a valid integer"),
    ("max_rounds", "0", POSITIVE),
    ("max_stages", "-1", POSITIVE),
    ("num_train_samples", "0", POSITIVE),
    ("num_train_samples", "257", "less than or equal to 256"),
    ("num_transplant_trees", "-2", COUNT),
    ("num_generations", "1", "greater than or equal to 2"),
    ("num_generations", "257", "less than or equal to 256"),
    ("rollout_staleness", "-1", COUNT),
    ("checkpoint_keep", "0", POSITIVE),
    ("coordinator_round_interval", "0", "greater than 0"),
    ("coordinator_round_interval", "inf", "finite"),
    ("lease_seconds", "nan", "finite"),
    ("fetch_timeout_seconds", "soon", "a valid number"),
    ("learning_rate", "0", "greater than 0"),
    ("learning_rate", "1e9", "less than or equal to 10"),
    ("temperature", "-0.5", "greater than 0"),
    ("top_p", "1.01", "less than or equal to 1"),
    ("top_p", "nan", "1"),
    ("clip_low", "1", "less than 1"),
    ("clip_high", "nan", "10"),
    ("kl_beta", "-1", COUNT),
    ("lora_rank", "-8", COUNT),
    ("loss", "ppo", "'grpo', 'gspo' or 'cispo'"),
    ("advantage", "z", "'std', 'mean' or 'leave_one_out'"),
    ("aggregate", "sum", "'token', 'sequence' or 'constant'"),
    ("prompt_examples", "99", "less than or equal to 16"),
    ("chat_template", "chatml", "'auto' or 'none'"),
    ("minibatches", "0", "greater than or equal to 1"),
    ("negative_weight", "1.5", "less than or equal to 1"),
    ("peer_negative_weight", "-1", "greater than or equal to 0"),
    ("truncated_completions", "drop", "'score', 'zero' or 'leave_out'"),
    ("coordinator_pace", "fast", "'interval', 'quorum' or 'free'"),
    ("rollout_publish_frequency", "never", "'generation', 'stage' or 'round'"),
    ("off_policy", "yes", "'none', 'damp', 'positive', 'topr' or 'truncated'"),
    ("loss", "ppo", "'grpo'"),
    ("dtype", "float16", "'auto', 'float32' or 'bfloat16'"),
    ("task_difficulty", "hard", "'default' or 'easy'"),
    ("device", "tpu", "auto, cuda, mps, cpu"),
    ("device", "gpu", "GPUs by number, each once: cuda:1, or cuda:0,cuda:2"),
    ("device", "cuda:", "GPUs by number"),
    ("device", "cuda:-1", "GPUs by number"),
    ("device", "cuda:01", "GPUs by number"),
    ("device", "cpu,cpu", "GPUs by number"),
    ("device", "cuda:0,cpu", "GPUs by number"),
    ("device", "cuda:0,", "GPUs by number"),
    ("device", "cuda:1,cuda:1", "each once"),
    ("select", "best", "informative, uniform"),
    ("tasks", "telepathy", "arithmetic, arithmetic/sum"),
    ("tasks", "arithmetic,", "arithmetic, arithmetic/sum"),
    ("tasks", "arithmetic/sums", "arithmetic, arithmetic/sum"),
    ("model_name", "pcio", "a Hub id (owner/name), a folder, pico, toy or auto"),
    ("gdrive_path", "s3://bucket/prefix", "give a folder"),
    ("node_id", "a/b", NAME),
    ("node_id", "../x", NAME),
    ("node_id", "a..b", NAME),
    ("node_id", "a\\b", NAME),
    ("node_id", "a\nb", NAME),
    ("node_id", "a\x1b[2Jb", NAME),
    ("node_id", "a\u202eb", NAME),
    ("node_id", " a", "starts nor ends with a dot or a space"),
    ("node_id", ".hidden", "starts nor ends with a dot or a space"),
    ("node_id", "a.7", "a dot and a number"),
    ("node_id", "n" * 129, "1 to 128 characters"),
    ("node_id", "n" * 300, "1 to 128 characters"),
    ("node_id", "\N{SNAKE}" * 60, "200 bytes"),
    ("experiment_name", "../../x", NAME),
    ("experiment_name", "x" * 129, "1 to 128 characters"),
]


def check_refusal(capsys: pytest.CaptureFixture[str], name: str, value: str, allowed: str) -> None:
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1 and shown.err.endswith(".\n")
    assert shown.err.startswith(f"rl-swarm: {name.upper()}=")
    assert value in shown.err or repr(value) in shown.err
    assert "is not allowed" in shown.err and allowed in shown.err
    assert "Traceback" not in shown.err and shown.err.rstrip("\n").isprintable()
    assert list(Path().iterdir()) == []


# Were such a value taken, the command would wait for an experiment, or for workers, for ever.
@pytest.mark.timeout(30)
@pytest.mark.parametrize(("name", "value", "allowed"), BAD_VALUES, ids=lambda value: repr(value)[:40])
def test_a_bad_value_is_one_sentence_and_exit_code_2_by_variable_and_by_flag(
    name: str, value: str, allowed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["join", f"--{name.replace('_', '-')}={value}"]) == 2
    check_refusal(capsys, name, value, allowed)
    monkeypatch.setenv(name.upper(), value)
    assert main(["coordinate"]) == 2
    check_refusal(capsys, name, value, allowed)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("test_mode", "maybe", "a valid boolean"),
        ("cache_rollouts", "2", "a valid boolean"),
        ("node_role", "boss", "worker"),
    ],
)
def test_a_bad_value_that_only_a_variable_can_have_is_refused_too(
    name: str, value: str, allowed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rgym_exp.runner.swarm_launcher import main as launcher

    monkeypatch.setenv(name.upper(), value)
    assert launcher() == 2
    check_refusal(capsys, name, value, allowed)


def test_a_division_needs_something_to_divide(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "--adaptive-ij-enabled", "--num-train-samples", "1"]) == 2
    check_refusal(capsys, "adaptive_ij_enabled", "True", "nothing to divide")


def test_each_loss_has_its_own_mean() -> None:
    assert [load({"loss": loss}).aggregate for loss in ("grpo", "gspo", "cispo")] == ["token", "sequence", "token"]
    assert load({"loss": "gspo", "aggregate": "token"}).aggregate == "token"


def test_publishing_after_the_round_needs_a_window_into_the_past(capsys: pytest.CaptureFixture[str]) -> None:
    publish = ["--rollout-publish-frequency", "round", "--rollout-staleness", "0"]
    assert main(["join", *publish, "--num-transplant-trees", "1"]) == 2
    check_refusal(capsys, "rollout_publish_frequency", "round", "set ROLLOUT_STALENESS to 1 or more")
    assert load({"rollout_publish_frequency": "round", "rollout_staleness": 0}).num_transplant_trees == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "VERB"),
        (["dance"], "'dance'"),
        (["join", "--num-generation", "4", "--nonsense"], "--nonsense"),
        (["join", "--seed"], "--seed"),
        (["host"], "--nodes"),
        (["host", "--nodes", "0"], "'0' is not allowed: a whole number of 1 or more"),
        (["host", "--nodes", "two"], "'two' is not allowed: a whole number of 1 or more"),
        (["demo", "--rounds", "-1"], "'-1' is not allowed"),
    ],
)
def test_words_that_are_not_understood_are_one_line_and_exit_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    shown = capsys.readouterr()
    assert caught.value.code == 2
    assert shown.err.count("\n") == 1 and told in shown.err and "--help" in shown.err
    assert list(Path().iterdir()) == []


# Secrets


def test_the_token_is_read_and_the_word_none_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("None", "none", " NONE "):
        monkeypatch.setenv("HUGGINGFACE_ACCESS_TOKEN", word)
        assert load().huggingface_access_token is None
    monkeypatch.setenv("HUGGINGFACE_ACCESS_TOKEN", SECRET)
    assert load().huggingface_access_token == SECRET


def test_the_token_is_written_nowhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HUGGINGFACE_ACCESS_TOKEN", SECRET)
    assert "huggingface_access_token" not in initialised(capsys)
    flags = ["--model-name", "toy", "--max-rounds", "2", "--num-transplant-trees", "2", "--experiment-name", "run"]
    assert main(["host", "--nodes", "2", *flags]) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
    assert main(["export", "run", "--out", "out"]) == 0
    assert SECRET not in Path("out/summary.json").read_text()
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err


def test_the_token_is_neither_in_the_settings_text_nor_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load({"huggingface_access_token": SECRET})
    assert SECRET not in repr(loaded) and SECRET not in str(loaded)
    assert SECRET not in repr(settings.public(loaded))
    monkeypatch.setenv("HUGGINGFACE_ACCESS_TOKEN", SECRET)
    bad: list[dict[str, Any]] = [
        {"seed": -1},
        {"num_train_samples": 1, "adaptive_ij_enabled": True},
        {"huggingface_access_token": [SECRET]},
        {"nonsense": 1},
    ]
    for given in bad:
        with pytest.raises(SettingsError) as caught:
            load(given)
        assert SECRET not in str(caught.value)
        assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert load({"huggingface_access_token": "None"}).huggingface_access_token is None


# The reference


def test_the_reference_is_what_the_settings_say() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == settings.markdown(), "run: python -m rl_swarm.settings > docs/settings.md"
    for name, field in settings.fields().items():
        assert f"| `{name.upper()}` |" in page
        assert field.description and field.description.endswith(".")


def test_every_setting_but_the_role_is_in_the_help_of_join(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["join", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for name in settings.fields():
        assert (f"--{name.replace('_', '-')}" in shown) == (name != "node_role")
