"""What a dry run assumes: what no option gives, by name, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from dsx.bench.dry_run.asked import Asked, rates_of, require_rates
from dsx.plan.model_files import read_model
from tests.installed import needs
from tests.plan.test_plan_command import QWEN

ASKED = Asked(QWEN)
GIVEN = replace(ASKED, step_seconds=2.0, gbps=3.0, latency_ms=0.0, disk_mb_s=5.0)
TOKENS = 256 * 4096


def test_what_is_not_given_is_assumed_and_said() -> None:
    files = read_model(QWEN, None, None)
    rates = rates_of(ASKED, files, 10**11)
    assert (rates.gbps, rates.latency_ms, rates.disk_mb_s) == (1.0, 20.0, 500.0)
    assert rates.step_seconds == 6 * 10**11 * TOKENS / (80 * 0.4 * 312e12)
    assert list(rates.assumed) == ["gbps", "latency_ms", "step_seconds", "disk_mb_s"]
    for name, (value, words) in rates.assumed.items():
        assert value == getattr(rates, name) and f"--{name.replace('_', '-')}" in words
    faster = rates_of(replace(ASKED, gpu="h100", mfu=0.2), files, 10**11)
    assert faster.step_seconds == 6 * 10**11 * TOKENS / (80 * 0.2 * 989e12)


def test_what_is_given_is_taken_a_latency_of_none_too() -> None:
    rates = rates_of(GIVEN, read_model(QWEN, None, None), 10**11)
    assert not rates.assumed and rates.link.latency_seconds == 0
    assert (rates.step_seconds, rates.gbps, rates.disk_mb_s) == (2.0, 3.0, 5.0)


def test_where_a_file_tells_no_batch_a_step_is_a_micro_batch_as_in_a_run(tmp_path: Path) -> None:
    words = QWEN.read_text().replace("--global-batch-size 256", "")
    (tmp_path / "one.flags").write_text(words)
    files = read_model(tmp_path / "one.flags", None, 160)  # two replicas
    assert rates_of(ASKED, files, 10**11).step_seconds == pytest.approx(
        6 * 10**11 * 2 * 4096 / (160 * 0.4 * 312e12)
    )


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (replace(ASKED, gbps=0.0), "--gbps=0 must be 1e-09 to"),
        (replace(ASKED, latency_ms=-1.0), "--latency-ms=-1 must be 0 to"),
        (replace(ASKED, step_seconds=0.0), "--step-seconds=0 must be"),
        (replace(ASKED, mfu=1.5), "--mfu=1.5 must be"),
        (replace(ASKED, gpu="b200"), "--gpu b200 is not known; allowed: a100, a800, h100"),
        (replace(GIVEN, gpu="a800"), "--gpu estimates a step's seconds, and --step-seconds gives"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_before_anything_is_built(
    asked: Asked, words: str
) -> None:
    require_rates(GIVEN)
    with pytest.raises(ValueError, match=words):
        require_rates(asked)


@needs("deepspeed")
@pytest.mark.ci
@pytest.mark.timeout(300)
def test_the_json_of_the_107_b_is_built_as_it_is_with_every_second_told() -> None:
    """In a process of its own, as engines look at a world of their own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "x.json"
        command = [
            sys.executable,
            "-m",
            "dsx",
            "dry-run",
            QWEN.with_name("qwen_107b_pipeline.json"),
        ]
        subprocess.run([*command, "--json", out], check=True, timeout=280)
        told = json.loads(out.read_text())
    assert (told["ranks"], round(told["params"] / 1e9, 1)) == (80, 107.2)
    assert [name for name, value in told.items() if value is None] == []
    assert 0.9 < told["utilization"] <= 1 and told["start_seconds"] < told["start_seconds_unequal"]
