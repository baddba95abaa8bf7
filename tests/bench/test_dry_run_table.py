"""The table of docs/results/dry-run.md is what its script prints."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.pages import ROOT
from tests.installed import needs

CLUSTERS = (2, 8, 32, 128)
PAGE = ROOT / "docs" / "results" / "dry-run.md"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("file", "clusters"),
    [
        pytest.param("llama_70b.flags", 32, marks=pytest.mark.ci),
        pytest.param("qwen_107b.flags", 8, marks=pytest.mark.ci),
        pytest.param("qwen_107b_pipeline.json", 8, marks=pytest.mark.ci),
        pytest.param("qwen_235b_a22b.flags", 2, marks=pytest.mark.ci),
        *(pytest.param("llama_70b.flags", c, marks=pytest.mark.slow) for c in (2, 8, 128)),
        *(pytest.param("qwen_107b.flags", c, marks=pytest.mark.slow) for c in (2, 32, 128)),
        *(pytest.param("qwen_107b_zero3.json", c, marks=pytest.mark.slow) for c in CLUSTERS),
        *(pytest.param("qwen_107b_pipeline.json", c, marks=pytest.mark.slow) for c in (2, 32, 128)),
        *(pytest.param("qwen_235b_a22b.flags", c, marks=pytest.mark.slow) for c in (8, 32, 128)),
    ],
)
@needs("megatron", "deepspeed")
def test_a_row_is_as_printed(file: str, clusters: int) -> None:
    words = ["--files", file, "--clusters", str(clusters)]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "dry_run_table.py", *words],
        capture_output=True, text=True, cwd=ROOT, timeout=500, check=True,
    )  # fmt: skip
    *head, row = done.stdout.splitlines()
    page = PAGE.read_text()
    assert "\n".join(head) in page and f"\n{row}\n" in page, done.stdout
