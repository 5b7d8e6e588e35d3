"""The built package holds everything: it works from any folder, without the source tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rl_swarm.models import PICO_FOLDER

ROOT = Path(__file__).parent.parent


@pytest.mark.torch
def test_a_wheel_built_of_the_tree_runs_the_demo_from_any_folder(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(ROOT)], check=True, timeout=240)
    (wheel,) = tmp_path.glob("rl_swarm-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(installed)
    for needed in ("model.safetensors", "tokenizer.json", "config.json"):
        assert f"rl_swarm/models/data/pico/{needed}" in names
    assert "rl_swarm/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "docs/"))]
    # -P keeps the folder of the source out; the wheel's own folder comes before an editable install.
    program = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        "import rl_swarm.cli; print(rl_swarm.__file__)\n"
        "sys.exit(rl_swarm.cli.main(['demo', '--nodes', '2', '--rounds', '1']))"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))
    assert (elsewhere / "rl-swarm-data" / "demo.png").exists()


@pytest.mark.torch
def test_an_exported_node_is_an_ordinary_model_folder(tmp_path: Path) -> None:
    import torch
    import transformers

    run = [sys.executable, "-m", "rl_swarm.cli"]
    where = ["--gdrive-path", str(tmp_path / "root")]
    flags = ["--nodes", "2", "--node-id", "n", "--experiment-name", "x", "--model-name", "pico", "--max-rounds", "2"]
    host = [*run, "host", *where, *flags, "--learning-rate", "1e-3", "--num-train-samples", "4"]
    subprocess.run(host, check=True, capture_output=True, timeout=240, cwd=tmp_path)
    export = [*run, "export", "x", *where, "--node", "n_1", "--out", str(tmp_path / "model")]
    done = subprocess.run(export, check=True, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert "after round 1" in done.stdout
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer("12+7=", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=4, do_sample=False).shape[1] > ids.input_ids.shape[1]
    saved = tmp_path / "root" / "experiments" / "x" / "checkpoints" / "round_1" / "n_1.pt"
    state = torch.load(saved, weights_only=True)
    assert torch.equal(state["weights"]["model.norm.weight"], model.model.norm.weight)
    assert state["note"]["round"] == 1


@pytest.mark.torch
@pytest.mark.parametrize("rank", [0, 4])
def test_an_export_keeps_what_was_learned_in_float32_adapters_included(rank: int, tmp_path: Path) -> None:
    """Of a base model stored in half precision, whose configuration says so: loaded plainly, nothing is rounded off."""
    import torch
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(PICO_FOLDER, dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(PICO_FOLDER / name, tmp_path / "base" / name)
    run = [sys.executable, "-m", "rl_swarm.cli"]
    where = ["--gdrive-path", str(tmp_path / "root")]
    flags = ["--nodes", "2", "--node-id", "n", "--experiment-name", "x", "--model-name", str(tmp_path / "base")]
    flags += ["--tasks", "arithmetic", "--max-new-tokens", "16", "--max-rounds", "2", "--lora-rank", str(rank)]
    host = [*run, "host", *where, *flags, "--learning-rate", "1e-4", "--num-train-samples", "4", "--device", "cpu"]
    subprocess.run(host, check=True, capture_output=True, timeout=240, cwd=tmp_path)
    export = [*run, "export", "x", *where, "--node", "n_1", "--out", str(tmp_path / "model")]
    subprocess.run(export, check=True, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.float32
    start = dict(base.float().named_parameters())
    changes = [(weight - start[name]).abs().max().item() for name, weight in model.named_parameters()]
    assert 0 < max(changes) < 1e-2
    halved = [torch.equal(weight, weight.bfloat16().float()) for _, weight in model.named_parameters()]
    assert not all(halved), "more than half precision could hold"
