"""Each folder of docs/examples: its command runs as printed, and both clusters end alike."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dsx.telemetry.report import summarize
from tests.distributed import the_default_port
from tests.docs.pages import ROOT, blocks
from tests.docs.test_examples import Reader, require_printed
from tests.installed import needs

FOLDERS = sorted(path.parent.name for path in (ROOT / "docs" / "examples").glob("*/README.md"))
PACKAGES = {
    "accelerate": ("accelerate",),
    "deepspeed": ("deepspeed",),
    "lightning": ("lightning",),
    "pipeline_experts": ("deepspeed",),
    "trainer": ("deepspeed", "transformers", "accelerate"),
    "trl": ("deepspeed", "transformers", "accelerate", "datasets", "trl", "peft"),
}


def test_every_folder_is_listed_and_has_no_line_of_dsx() -> None:
    index = (ROOT / "docs" / "examples" / "index.md").read_text()
    nav = (ROOT / "mkdocs.yml").read_text()
    for name in FOLDERS:
        assert f"({name}/README.md)" in index
        assert f"examples/{name}/README.md" in nav
        assert "dsx" not in (ROOT / "docs" / "examples" / name / "train.py").read_text()


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(*PACKAGES.get(name, ()))) for name in FOLDERS]
)
def test_its_command_runs_as_printed(name: str, tmp_path: Path) -> None:
    reader = Reader(tmp_path, "ci")
    block, *others = blocks(f"docs/examples/{name}/README.md")
    output = ""
    for command in block.commands:
        with the_default_port():
            done = subprocess.run(
                ["bash", "-c", command], cwd=reader.folder, env=reader.environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280,
            )  # fmt: skip
        output += done.stdout
        assert done.returncode == 0, output[-6000:]
    clusters = summarize(Path(tmp_path / block.commands[-1].split()[-1])).clusters
    assert len(clusters) == 2
    assert clusters[0].steps == clusters[1].steps > 0
    norms = re.findall(r"norm of the model ([\d.e+-]+)", output)
    assert len(norms) == 2 and norms[0] == norms[1], output[-3000:]
    if others and others[0].language == "text":  # the losses of both clusters, in any order
        lines = sorted(line for line in output.splitlines() if line.startswith("step "))
        shown = replace(others[0], text="\n".join(sorted(others[0].text.splitlines())))
        require_printed(shown, "\n".join(lines))
