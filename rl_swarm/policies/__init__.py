"""Models that sample and learn. `open_policy` loads what MODEL_NAME names; only then is torch imported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl_swarm.errors import ModelError, SettingsError
from rl_swarm.models import PICO_FOLDER
from rl_swarm.policies.toy import ToyPolicy
from rl_swarm.protocols import Policy
from rl_swarm.settings import Settings

if TYPE_CHECKING:
    from rl_swarm.policies.engine import Learning


def open_policy(settings: Settings, nodes: Sequence[str]) -> Policy:
    """One model for each node, all starting from the same weights."""
    assert settings.learning_rate is not None and settings.max_new_tokens is not None, "filled in by settings.load"
    if settings.model_name == "toy":
        return ToyPolicy(nodes, settings.learning_rate)
    folder = model_folder(settings.model_name, settings.huggingface_access_token)

    _before_torch()

    from rl_swarm.policies.engine import pick_devices
    from rl_swarm.policies.reading import read_config, unsupported
    from rl_swarm.policies.spread import spread

    devices = pick_devices(settings.device, len(nodes))
    learning = learning_of(settings, devices[0])
    reason = unsupported(read_config(folder))
    if settings.lora_rank or reason:
        from rl_swarm.policies.huggingface import huggingface_learner

        return spread(
            nodes, devices, lambda held, device: huggingface_learner(held, folder, learning, device, reason or "")
        )

    from rl_swarm.policies.stacked import stacked_learner

    return spread(nodes, devices, lambda held, device: stacked_learner(held, folder, learning, device))


def learning_of(settings: Settings, device: str) -> Learning:
    """The learner's part of the settings, which has the same names."""
    from rl_swarm.policies.engine import Learning, is_recent_gpu

    values = {name: getattr(settings, name) for name in Learning.__dataclass_fields__ if name in Settings.model_fields}
    if settings.dtype == "auto":
        values["dtype"] = "bfloat16" if is_recent_gpu(device) else "float32"
    return Learning(**values)


def gpu_memory(device: str, nodes: int) -> int:
    """Bytes of the smallest GPU that so many nodes would be on; 0 where there is none, or it shares the machine's."""
    if device in ("mps", "cpu"):
        return 0
    _before_torch()

    import torch

    from rl_swarm.policies.engine import pick_devices

    taken = [name for name in pick_devices(device, nodes) if name.startswith("cuda")]
    return min((int(torch.cuda.get_device_properties(name).total_memory) for name in taken), default=0)


def _before_torch() -> None:
    # Read once, when torch loads: threads that wait give up their core. Spinning ones made rounds up to ten times
    # slower as soon as anything else ran on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def model_is_findable(name: str) -> None:
    """Refuse, before anything starts, a path that leads nowhere and cannot be a Hub id either."""
    if not Path(name).is_dir() and (name.count("/") != 1 or name.startswith((".", "/"))):
        raise SettingsError(
            f"MODEL_NAME={name!r} is not allowed: it is neither a folder here nor a Hub id (owner/name)."
        )


def model_folder(name: str, token: str | None = None) -> Path:
    """Where the model lies on this machine; a Hub id is downloaded first."""
    if name == "pico":
        return PICO_FOLDER
    if Path(name).is_dir():
        return Path(name)
    model_is_findable(name)

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name, token=token, allow_patterns=["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"The model {name} could not be downloaded: {reason}") from None
