"""Every setting once: environment name, flag, default, help line and what is allowed.

A field `num_generations` is the variable NUM_GENERATIONS and the flag --num-generations; a flag wins over the
environment, the environment over the default. Some defaults depend on the model or on TEST_MODE: those fields are None
until `load` fills them in. Everything is checked before anything starts; what is wrong is one SettingsError.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from rl_swarm.errors import SettingsError
from rl_swarm.models.pools import AUTO
from rl_swarm.selection import RULES
from rl_swarm.tasks.names import check_tasks

DEFAULT_MODEL = "Gensyn/Qwen2.5-0.5B-Instruct"
COLAB_MOUNT = Path("/content/drive/MyDrive")


def check_name(name: str) -> str:
    """A node's or experiment's name: it becomes part of a path, so what could lead elsewhere is refused."""
    if not 1 <= len(name) <= 128 or len(name.encode()) > 200:
        raise ValueError("a name has 1 to 128 characters (and at most 200 bytes)")
    if "/" in name or "\\" in name or ".." in name or not name.isprintable():
        raise ValueError("a name has no slash, no backslash, no '..' and no control character")
    if name != name.strip() or name.startswith(".") or name.endswith("."):
        raise ValueError("a name neither starts nor ends with a dot or a space")
    if re.search(r"\.\d+$", name):
        raise ValueError("a name does not end in a dot and a number (NODE.0 is how parts of NODE's rollouts are named)")
    return name


def require_name(setting: str, name: str) -> None:
    """Check a name made from a setting, such as one of several nodes of a host."""
    try:
        check_name(name)
    except ValueError as error:
        raise SettingsError(f"{setting} makes the name {name!r}, which is not allowed: {error}.") from None


def _none_word(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip().lower() in ("none", "") else value


def _one_of(*allowed: str) -> AfterValidator:
    def check(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"allowed: {', '.join(allowed)}")
        return value

    return AfterValidator(check)


def _tasks(value: str) -> str:
    check_tasks(value)
    return value


def _model(value: str) -> str:
    # A path may be one of another machine: the coordinator reads the same settings and loads no model.
    if value not in ("pico", "toy", AUTO) and "/" not in value and not (value and Path(value).is_dir()):
        raise ValueError("allowed: a Hub id (owner/name), a folder, pico, toy or auto")
    return value


def _device(value: str) -> str:
    names = [name.strip() for name in value.split(",")]
    numbered = all(re.fullmatch(r"cuda:(0|[1-9][0-9]*)", name) for name in names)
    if names not in (["auto"], ["cuda"], ["mps"], ["cpu"]) and not (numbered and len(set(names)) == len(names)):
        raise ValueError("allowed: auto, cuda, mps, cpu, or GPUs by number, each once: cuda:1, or cuda:0,cuda:2")
    return ",".join(names)


Name = Annotated[str, AfterValidator(check_name)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _setting(default: Any, group: str, help: str, shown: str | None = None, **limits: Any) -> Any:
    """A field with its help line; `shown` words a default that depends on something."""
    return Field(default, description=help, json_schema_extra={"group": group, "shown": shown}, **limits)


class Settings(BaseSettings):
    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_ignore_empty=True, validate_default=False)

    # Where and who
    gdrive_path: str = _setting(
        "", "where", "Root of all experiments: a folder every node can reach (a mounted Drive, a share, a disk).",
        f"{COLAB_MOUNT}/rl-swarm where that mount exists, else ./rl-swarm-data",
    )  # fmt: skip
    experiment_name: Name = _setting("default_experiment", "where", "The experiment to take part in.")
    node_role: Annotated[str, _one_of("coordinator", "worker")] = _setting(
        "worker", "where", "What the launcher starts: coordinator or worker."
    )
    node_id: Name = _setting(
        "", "where", "This node's name, unique in the experiment.", "node_ and 8 random hex digits"
    )
    model_name: Annotated[str, AfterValidator(_model)] = _setting(
        DEFAULT_MODEL,
        "where",
        "A Hub id, a local folder, pico (embedded), toy (no model at all, for trials) or auto (a small or a larger "
        "model, by the GPU's memory).",
    )
    device: Annotated[str, AfterValidator(_device)] = _setting(
        "auto",
        "where",
        "auto, cuda, mps or cpu; auto takes the first of these that is there. Several nodes are spread over all GPUs; "
        "cuda:1 is one of these, cuda:0,cuda:2 are some.",
    )
    huggingface_access_token: Annotated[str | None, BeforeValidator(_none_word)] = _setting(
        None, "where", "For models that need a login, and for push; the word None means none.", repr=False
    )
    seed: Count = _setting(42, "where", "Seeds everything; nodes differ by their names.")

    # Rounds
    test_mode: bool = _setting(False, "rounds", "A short trial: changes the defaults to 3 rounds, I=4, G=4.")
    max_rounds: Positive = _setting(2000, "rounds", "Rounds until the experiment is finished.", "2000 (test mode: 3)")
    max_stages: Positive = _setting(1, "rounds", "Share-and-learn cycles in a round.")
    coordinator_round_interval: Seconds = _setting(60.0, "rounds", "The longest a round lasts, in seconds.")
    coordinator_pace: Literal["interval", "quorum", "free"] = _setting(
        "quorum",
        "rounds",
        "interval: by the timer alone; quorum: when all live workers are done, or the interval is over; "
        "free: no common clock, every worker at its own speed.",
    )
    coordinator_join_grace: Annotated[float, Field(ge=0, allow_inf_nan=False)] = _setting(
        15.0, "rounds", "Under quorum, round 0 stays open until nobody has joined for this many seconds."
    )
    lease_seconds: Seconds = _setting(
        20.0, "rounds", "A node that gives no sign of life for this long is taken for dead."
    )

    # Sharing
    num_train_samples: Annotated[int, Field(ge=1, le=256)] = _setting(
        8, "sharing", "I: own questions a round.", "8 (test mode: 4)"
    )
    num_transplant_trees: Count = _setting(0, "sharing", "J: peers' groups a round; 0 means no sharing.")
    num_generations: Annotated[int, Field(ge=2, le=256)] = _setting(
        8, "sharing", "G: completions a question, at least 2.", "8 (test mode: 4)"
    )
    select: Annotated[str, _one_of(*RULES)] = _setting(
        "informative", "sharing", "Which peers' groups: informative (the paper's rule) or uniform (no filter)."
    )
    rollout_publish_frequency: Literal["generation", "stage", "round"] = _setting(
        "stage",
        "sharing",
        "generation: a file per finished question; stage: one per stage; round: one after the update, "
        "so peers see it a round later.",
    )
    rollout_staleness: Count = _setting(1, "sharing", "How many rounds back peers' groups may come from.")
    fetch_max_peers: Positive = _setting(10, "sharing", "From how many peers a node reads in a round, at most.")
    fetch_timeout_seconds: Seconds = _setting(30.0, "sharing", "How long a node reads from peers in a round, at most.")
    cache_rollouts: bool = _setting(True, "sharing", "Keep peers' files in memory while they may be used again.")
    rollout_cleanup_enabled: bool = _setting(False, "sharing", "Remove this node's old rollout files.")
    rollout_keep_last_n_rounds: Positive = _setting(10, "sharing", "With cleanup: how many rounds of them stay.")
    rollout_archive_old: bool = _setting(False, "sharing", "With cleanup: move them to archives/ instead of removing.")

    # Learning
    tasks: Annotated[str, AfterValidator(_tasks)] | None = _setting(
        None,
        "learning",
        "Comma-separated: arithmetic, arithmetic/KIND, reasoning_gym (the paper's nine) or its task names.",
        "pico and toy: arithmetic; others: reasoning_gym",
    )
    task_difficulty: Literal["default", "easy"] = _setting(
        "default",
        "learning",
        "Of reasoning-gym's questions: the library's own settings, or easy ones for small models.",
    )
    prompt_examples: Annotated[int, Field(ge=0, le=16)] = _setting(
        0,
        "learning",
        "Solved questions shown before each question, as earlier turns of the conversation: with three or so, small "
        "models use the answer tags.",
    )
    learning_rate: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = _setting(
        None, "learning", "Adam's step size.", "pico 5e-5, toy 0.5, others 1e-6"
    )
    max_new_tokens: Positive | None = _setting(
        None, "learning", "Longest completion, in tokens.", "pico and toy 16, others 256"
    )
    temperature: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = _setting(
        1.0, "learning", "Of sampling; training scores tokens at the same temperature."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = _setting(
        1.0, "learning", "Sample from the likeliest tokens that make up this much probability."
    )
    loss: Literal["grpo", "gspo", "cispo"] = _setting(
        "grpo",
        "learning",
        "The objective: grpo (clipped ratio per token), gspo (one ratio per completion) or cispo (clipped weights).",
    )
    advantage: Literal["std", "mean", "leave_one_out"] = _setting(
        "std",
        "learning",
        "Of a completion against its siblings: std (divided by their spread, the paper), mean (not divided) or "
        "leave_one_out (against the mean of the others).",
    )
    aggregate: Literal["token", "sequence", "constant"] | None = _setting(
        None,
        "learning",
        "Mean of the loss: token (over all tokens, the paper), sequence (each completion alike) or constant "
        "(by MAX_NEW_TOKENS, no bias by length; with ADVANTAGE=mean it is Dr. GRPO).",
        "token; with LOSS=gspo: sequence",
    )
    minibatches: Annotated[int, Field(ge=1, le=64)] = _setting(
        1, "learning", "Updates a round, each on its share of the groups; with 1 the ratio is 1 and no clip can bind."
    )
    negative_weight: Annotated[float, Field(ge=0, le=1)] = _setting(
        1.0, "learning", "What a negative advantage of the node's own text counts; 1 is the paper's rule."
    )
    off_policy: Literal["none", "damp", "positive", "topr", "truncated"] = _setting(
        "damp",
        "learning",
        "Peers' text: none treats it as one's own (the paper); damp counts its negative advantages "
        "PEER_NEGATIVE_WEIGHT, positive drops them, topr weighs them by how likely the text is here and was there, "
        "truncated weighs all text so.",
    )
    peer_negative_weight: Annotated[float, Field(ge=0, le=1)] = _setting(
        0.2, "learning", "With OFF_POLICY=damp: what a negative advantage of a peer's text counts."
    )
    truncated_completions: Literal["score", "zero", "leave_out"] = _setting(
        "score",
        "learning",
        "Completions cut off at MAX_NEW_TOKENS: score them like others, give them zero, or leave them out of learning.",
    )
    clip_low: Annotated[float, Field(ge=0, lt=1)] = _setting(0.2, "learning", "Lower clip of the ratio: 1 - this.")
    clip_high: Annotated[float, Field(ge=0, le=10)] = _setting(0.28, "learning", "Upper clip of the ratio: 1 + this.")
    kl_beta: Annotated[float, Field(ge=0, le=100)] = _setting(
        0.0, "learning", "Weight of a KL term that holds the model near its start; 0 (the paper) has none."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = _setting(
        "auto", "learning", "Compute type over float32 weights; auto: bfloat16 on a recent GPU, else float32."
    )
    chat_template: Literal["auto", "none"] = _setting(
        "auto", "learning", "auto puts questions through the model's chat template where it has one; none never."
    )
    micro_batch_tokens: Positive | None = _setting(
        None,
        "learning",
        "Tokens in one forward and backward pass: lower it when memory runs out.",
        "by memory: half of what is free on a GPU, 1.25 GiB on a CPU, there at most 8192",
    )
    gradient_checkpointing: bool = _setting(False, "learning", "Recompute layers instead of keeping them: less memory.")
    compile: Literal["auto", "on", "off"] = _setting(
        "auto", "learning", "Compile training: half a minute at the start, then quicker. `auto`: large models on a GPU."
    )
    cuda_graphs: bool = _setting(True, "learning", "Sample with CUDA graphs on an NVIDIA GPU; the tokens are the same.")
    lora_rank: Annotated[int, Field(ge=0, le=1024)] = _setting(
        0,
        "learning",
        "Train LoRA adapters of this rank instead of whole models; 0: whole models. They bear a higher LEARNING_RATE.",
    )
    adaptive_ij_enabled: bool = _setting(
        False, "sharing", "Move J with the measured share of informative groups, I+J fixed; J is then at least 1."
    )
    eval_every: Count = _setting(0, "learning", "Rounds between evaluations on held-out questions; 0: never.")
    eval_questions: Positive = _setting(64, "learning", "Held-out questions in an evaluation.")

    # Checkpoints
    checkpoint_interval: Count = _setting(10, "checkpoints", "Rounds between checkpoints; 0: only when a node ends.")
    checkpoint_keep: Positive = _setting(2, "checkpoints", "How many checkpoints of a node stay.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings

    @property
    def shares(self) -> bool:
        """Whether peers' groups are looked at at all."""
        return self.num_transplant_trees > 0 or self.adaptive_ij_enabled

    @property
    def most_groups(self) -> int:
        """The most own or peers' groups a node has in a round."""
        if self.adaptive_ij_enabled:
            return self.num_train_samples + self.num_transplant_trees - 1
        return max(self.num_train_samples, self.num_transplant_trees)

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if self.adaptive_ij_enabled and self.num_train_samples + self.num_transplant_trees < 2:
            raise ValueError(
                "ADAPTIVE_IJ_ENABLED=True is not allowed with NUM_TRAIN_SAMPLES + NUM_TRANSPLANT_TREES below 2: there "
                "is nothing to divide"
            )
        if self.rollout_publish_frequency == "round" and self.rollout_staleness == 0 and self.shares:
            raise ValueError(
                "ROLLOUT_PUBLISH_FREQUENCY='round' is not allowed with ROLLOUT_STALENESS=0: files appear after the "
                "update, so peers can only use them a round later; set ROLLOUT_STALENESS to 1 or more"
            )
        if self.rollout_cleanup_enabled and self.checkpoint_interval == 0:
            raise ValueError(
                "ROLLOUT_CLEANUP_ENABLED=True is not allowed with CHECKPOINT_INTERVAL=0: a restarted node needs the "
                "rollouts since its last checkpoint"
            )
        return self


_TEST_MODE = {"max_rounds": 3, "num_train_samples": 4, "num_generations": 4}


@dataclass(frozen=True)
class _ModelDefaults:
    tasks: str
    learning_rate: float
    max_new_tokens: int


_MODEL_DEFAULTS = {
    "pico": _ModelDefaults("arithmetic", 5e-5, 16),
    "toy": _ModelDefaults("arithmetic/bits,arithmetic/gcd,arithmetic/remainder", 0.5, 16),
}
_OTHER_MODELS = _ModelDefaults("reasoning_gym", 1e-6, 256)


def load(given: Mapping[str, Any] | None = None, defaults: Mapping[str, Any] | None = None) -> Settings:
    """Settings from the given values, the environment and the defaults, in this order, complete and checked.

    `defaults` are a command's own, where they differ from the declared ones.
    """
    try:
        settings = Settings(**(given or {}))
        chosen = settings.model_fields_set
        own = {name: value for name, value in (defaults or {}).items() if name not in chosen}
        settings = Settings(**{name: getattr(settings, name) for name in chosen}, **own)
        filled = dict(settings)
        if settings.test_mode:
            filled |= {name: value for name, value in _TEST_MODE.items() if name not in chosen}
        for name, value in asdict(_MODEL_DEFAULTS.get(settings.model_name, _OTHER_MODELS)).items():
            if filled[name] is None:
                filled[name] = value
        filled["aggregate"] = filled["aggregate"] or ("sequence" if settings.loss == "gspo" else "token")
        filled["node_id"] = settings.node_id or f"node_{secrets.token_hex(4)}"
        filled["gdrive_path"] = settings.gdrive_path or _default_root()
        return Settings(**filled)
    except ValidationError as error:
        raise SettingsError(_sentence(error)) from None


def _default_root() -> str:
    return str(COLAB_MOUNT / "rl-swarm") if COLAB_MOUNT.is_dir() else "./rl-swarm-data"


def _sentence(error: ValidationError) -> str:
    """The first thing that is wrong, as one sentence with the setting's name, its value and what is allowed."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:] if message[:2] != message[:2].upper() else message
    if not first["loc"]:
        return message.rstrip(".") + "."
    name = str(first["loc"][0]).upper()
    if first["type"] == "extra_forbidden":
        return f"{name} is not a setting."
    shown = "(hidden)" if name == "HUGGINGFACE_ACCESS_TOKEN" else repr(first["input"])
    return f"{name}={shown} is not allowed: {message.rstrip('.')}."


def public(settings: Settings) -> dict[str, Any]:
    """The settings as they may be written where others read: everything but the secret."""
    return {name: value for name, value in dict(settings).items() if name != "huggingface_access_token"}


def fields() -> Mapping[str, FieldInfo]:
    return Settings.model_fields


def group_of(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["group"])


def default_of(field: FieldInfo) -> str:
    """The default in words, for help and reference."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    if extra["shown"] is not None:
        return str(extra["shown"])
    return "none" if field.default is None else str(field.default)


def markdown() -> str:
    """The settings reference, docs/settings.md, as text."""
    lines = ["# Settings", "", " ".join(_REFERENCE_HEAD.split()), ""]
    for group in dict.fromkeys(group_of(field) for field in fields().values()):
        lines += [f"## {group.capitalize()}", "", "| variable | default | meaning |", "|---|---|---|"]
        for name, field in fields().items():
            if group_of(field) == group:
                lines.append(f"| `{name.upper()}` | {default_of(field)} | {field.description} |")
        lines.append("")
    return "\n".join(lines)


_REFERENCE_HEAD = """Each setting is an environment variable and a flag of `rl-swarm host`, `join` and `coordinate`:
`NUM_GENERATIONS=4` is `--num-generations 4`. A flag wins over the environment. Bad values are refused at start with
exit code 2 and one sentence. This page is made by `python -m rl_swarm.settings > docs/settings.md`."""


if __name__ == "__main__":
    os.write(1, markdown().encode())
