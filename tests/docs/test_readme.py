"""The README is short, its script trains, and pages name nothing that is not there."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import the_default_port
from tests.docs.pages import ROOT, blocks, pages, prose, read

MEGATRON = ["megatron_patches/README.md"]


def test_it_is_short() -> None:
    text = (ROOT / "README.md").read_bytes()
    assert len(text) <= 12_000
    assert len(text.splitlines()) <= 200


@pytest.mark.ci
@pytest.mark.timeout(600)  # the port may be taken for a while
def test_its_script_trains(tmp_path: Path) -> None:
    """That of the page on DeepSpeed is the same."""
    pytest.importorskip("deepspeed")
    scripts = [
        block.text
        for page in ("README.md", "docs/deepspeed.md")
        for block in blocks(page)
        if block.title == "train.py"
    ]
    assert scripts[0] == scripts[1]
    (tmp_path / "train.py").write_text(scripts[0])
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    command = "deepspeed --num_gpus 2 train.py"
    assert any(command in block.commands for block in blocks("README.md"))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
    }
    with the_default_port():
        done = subprocess.run(
            command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "runs" / "minimal" / "metrics.jsonl").read_text().splitlines()
    first, kinds = json.loads(lines[0]), [json.loads(line)["kind"] for line in lines]
    assert (first["kind"], first["preset"], first["num_clusters"]) == ("start", "diloco", 2)
    assert first["axes"]["schedule"]["interval"] == 10 and first["ranks"] == 1
    sizes = [[math.prod(shape) for shape in of.values()] for of in first["parameters"]]
    syncs = [json.loads(line) for line in lines if '"kind": "sync"' in line]
    assert {sync["numel"] for sync in syncs} == {sum(sizes[0])}
    assert all(0 < sync["coding_seconds"] < sync["transfer_seconds"] for sync in syncs)
    assert kinds.count("step") == 4096 // 2 // 16  # every second sample, 16 at a time
    assert kinds.count("sync") == kinds.count("step") // 10
    assert "do all clusters read the same batches" not in done.stderr


def test_its_tour_is_of_six_files() -> None:
    tour = read("README.md").split("## The code in six files")[1]
    assert len(re.findall(r"^\| \[`dsx/", tour, re.M)) == 6


@pytest.mark.parametrize("page", [*(p for p in pages() if p != "CHANGELOG.md"), *MEGATRON])
def test_every_file_it_names_exists(page: str) -> None:
    named = re.findall(
        r"\b((?:configs|scripts|dsx|tests)/[\w/]+\.(?:json|py|sh|flags))", read(page)
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", [p for p in pages() if not p.startswith("docs/")] + MEGATRON)
def test_links_to_files_resolve(page: str) -> None:
    """Those of README and its neighbours; `mkdocs build --strict` checks those within docs."""
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            file = (ROOT / page).parent / path
            assert file.exists(), f"{page} links to {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)", file.read_text(), re.M)
                slugs = [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
                assert anchor in slugs, f"{page} links to {target}"


@pytest.mark.parametrize("page", pages())
def test_pages_have_no_placeholders(page: str) -> None:
    """`<...>` is only for parts of names, such as `cluster_<m>`, never for a whole argument."""
    for command in [c for b in blocks(page) if b.language == "sh" for c in b.commands]:
        assert not re.search(r"<|\bHOST\b|\bPATH/TO\b|example\.com", command), command


def test_nothing_tells_to_install_another_project() -> None:
    """The name dsx on the index is not ours: it is `dsx-train`, or a checkout."""
    files = [
        ROOT / name
        for name in subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    ]
    wrong = re.compile(r"pip install [^\n`]*\bdsx\b(?!-train)|\bdsx" + r"\[")
    found = []
    for file in files:
        if file.suffix in {".md", ".py", ".sh", ".toml", ".yml", ".cfg"} and file.exists():
            for number, line in enumerate(file.read_text().splitlines(), 1):
                if wrong.search(line):
                    found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []
