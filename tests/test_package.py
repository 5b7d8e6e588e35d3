"""The built package holds everything: it works from any folder, without the source tree."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
