"""`dsx bench codec`: the keys of its JSON, what it refuses, and that its figures are plausible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import dsx.bench.codec as bench
from dsx.cli import app
from dsx.compress.wire.formats import FORMATS

SPEEDS = ("encode", "decode", "encode_ef", "reduce")
KEYS = {
    "format",
    "device",
    "kernels",
    "bytes_per_element",
    "nmse_gaussian",
    "memcpy_gb_per_second",
    *(f"{name}_percent_memcpy" for name in SPEEDS),
    *(f"{name}_gb_per_second" for name in SPEEDS),
}


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "codec", *arguments])
    return result.exit_code, result.output


def figures(path: Path) -> list[dict[str, float]]:
    return [figure for figure in json.loads(path.read_text()) if figure["device"] == "cpu"]


def test_every_format_has_a_row_and_an_object(tmp_path: Path) -> None:
    path = tmp_path / "codec.json"
    code, output = run("--numel", "163840", "--kernels", "eager", "--json", str(path))
    assert code == 0, output
    assert [figure["format"] for figure in figures(path)] == list(FORMATS)
    for figure in figures(path):
        assert set(figure) == KEYS
        assert str(figure["format"]) in output
        assert figure["kernels"] == "eager"
        percent = 100 * figure["encode_gb_per_second"] / figure["memcpy_gb_per_second"]
        assert figure["encode_percent_memcpy"] == pytest.approx(percent, rel=0.01, abs=0.1)
    int4 = next(figure for figure in figures(path) if figure["format"] == "int4")
    assert int4["bytes_per_element"] == 0.53125
    assert 0.0110 < int4["nmse_gaussian"] < 0.0122


def test_options_reach_the_format(tmp_path: Path) -> None:
    path = tmp_path / "codec.json"
    given = tmp_path / "pseudo_gradients.safetensors"
    save_file({"a": torch.ones(64, 3, dtype=torch.bfloat16), "b": torch.zeros(1)}, given)
    code, output = run(
        *("--formats", "int4, fp32", "--numel", "4096", "--group-size", "32", "--repeats", "1"),
        *("--kernels", "eager", "--pseudo-gradients", str(given), "--json", str(path)),
    )
    assert code == 0, output
    int4, fp32 = figures(path)
    assert int4["bytes_per_element"] == 0.5625
    assert fp32["nmse_gaussian"] == 0
    assert int4["nmse_pseudo_gradients"] < 2**-15  # ones lose what the scale's 8 bits do


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "int5"], "format 'int5' is not known; allowed: fp32, bf16,"),
        (["--kernels", "fast"], "kernels='fast' is not known; allowed: 'auto', 'native'"),
        (["--group-size", "48"], "group_size=48 must be one of 32, 64, 128, 256"),
        (["--formats", "bf16", "--group-size", "64"], "group_size=64 has no effect on bf16"),
        (["--pseudo-gradients", "/nowhere.safetensors"], "/nowhere.safetensors"),
    ],
)
def test_mistakes_end_with_one_line(arguments: list[str], message: str) -> None:
    code, output = run("--numel", "64", *arguments)
    assert code == 2
    assert output.startswith("dsx bench codec: ") and message in output
    assert len(output.splitlines()) == 1


def test_without_a_compiler_it_measures_eager_kernels_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "is_native", lambda kernels: False)
    monkeypatch.setattr(bench, "unavailable", lambda device: "no g++")
    path = tmp_path / "codec.json"
    code, output = run("--formats", "int8", "--numel", "4096", "--json", str(path))
    assert code == 0, output
    assert figures(path)[0]["kernels"] == "eager"
    assert "measuring eager kernels: no compiler works on cpu: no g++" in caplog.text
