"""What the documents show works as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rl_swarm import cli
from rl_swarm.stores.folder import FolderStore

ROOT = Path(__file__).parent.parent


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


@pytest.mark.torch
def test_the_readmes_python_runs_against_a_finished_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "--nodes", "2", "--rounds", "2"]) == 0
    assert (tmp_path / "rl-swarm-data" / "demo.png").stat().st_size > 1000
    examples = blocks("README.md", "python")
    assert examples
    for example in examples:
        plt.close("all")
        scope: dict[str, object] = {}
        exec(example, scope)
        axes = plt.gca()
        assert len(axes.patches) == 2, "a bar for each node"
        assert len(axes.lines[0].get_xdata()) == 2, "a point for each round"  # type: ignore[arg-type]
    plt.close("all")


@pytest.mark.torch
def test_the_examples_for_extending_run_one_after_the_other() -> None:
    scope: dict[str, object] = {}
    for example in blocks("docs/extending.md", "python"):
        exec(example, scope)
    rows = scope["rows"]
    assert isinstance(rows, list)
    assert len(rows) == 6


@pytest.mark.parametrize("document", ["README.md", "docs/concepts.md", "docs/protocol.md", "docs/extending.md"])
def test_every_command_shown_is_one_that_is_understood(document: str) -> None:
    for block in blocks(document, "bash"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["rl-swarm"]:
                words = words[1 : words.index(">")] if ">" in words else words[1:]
                cli._parser().parse_args(words)
            elif words[:1] == ["make"]:
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words


@pytest.mark.parametrize(
    "document", sorted(p.relative_to(ROOT).as_posix() for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    folder = (ROOT / document).parent
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / document).read_text()):
        if "://" not in target:
            assert (folder / target.partition("#")[0]).exists(), f"{document} points to {target}"


def test_every_reason_a_peer_is_turned_away_for_is_documented() -> None:
    reasons: set[str] = set()
    for path in (ROOT / "rl_swarm").rglob("*.py"):
        reasons |= set(re.findall(r"MalformedRecord\(\s*\"(\w+)\"", path.read_text()))
    page = (ROOT / "docs" / "protocol.md").read_text()
    assert len(reasons) > 15
    for reason in reasons:
        assert f"`{reason}`" in page, f"docs/protocol.md does not explain {reason}"


@pytest.mark.torch
def test_a_demo_can_be_repeated_but_never_replaces_somebody_elses_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["demo", "--nodes", "2", "--rounds", "1", "--gdrive-path", str(tmp_path)]
    assert cli.main(flags) == 0
    assert cli.main(flags) == 0
    output = capsys.readouterr().out
    assert "held-out reward" in output
    assert "Peers' groups each node learned from" in output
    from rl_swarm.experiment import create_experiment, open_experiment

    store = FolderStore(tmp_path)
    open_experiment(store, "demo_alone").delete()
    create_experiment(store, "demo_alone", {}, 0.0)
    assert cli.main(flags) == 1
    assert "was not made by the demo" in capsys.readouterr().err
