"""`dsx export --hf`: what is written, and what is refused; without transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from dsx.checkpoint.averaged_model import MODULE_FACTS, find_model
from dsx.checkpoint.files import FORMAT
from dsx.checkpoint.tags import Manifest, begin_tag, complete_tag
from dsx.checkpoint.weight_files import write_safetensors
from dsx.cli import app
from dsx.comm.topology import RankInfo
from dsx.engines.hf_folder import folder
from dsx.engines.hf_folder.architecture import Architecture
from dsx.engines.hf_folder.names import Tensors, left_out, require_same
from tests.checkpoint.saved import save_state
from tests.checkpoint.test_averaged_model import trained
from tests.simulated import Simulated

CONFIG = {"model_type": "tiny", "torch_dtype": "float32", "hidden_size": 6}
LAST = "layers.3.weight"


@pytest.fixture(autouse=True)
def _without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "is_transformers_installed", lambda: False)


@pytest.fixture(scope="module")
def run() -> Simulated:
    return trained("streaming_diloco", 6)


def save(run: Simulated, base: Path, file: str = MODULE_FACTS, **facts: Any) -> Path:
    """Save as an engine does, but for its own files."""
    for m, loop in enumerate(run.loops):
        directory = base / f"cluster_{m}"
        unfinished = directory / begin_tag(directory, "a")
        save_state(loop, unfinished, RankInfo(m, 2, 0, 1), "run", {}, {})
        (unfinished / file).write_text(json.dumps(facts))
        complete_tag(directory, "a", Manifest(FORMAT, run.num_steps, "run", 2, 1))
    return base


def export(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["export", *map(str, arguments)], env={"COLUMNS": "500"})
    return result.exit_code, result.output


def averaged(run: Simulated) -> dict[str, Tensor]:
    with run.averaged() as model:
        return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def hf_folder(base: Path, **changes: Any) -> Path:
    """Write what stands beside the weights of a Hugging Face folder; return it."""
    base.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (base / "generation_config.json").write_text('{"do_sample": true}')
    (base / "tokenizer.json").write_text("{}")
    (base / "merges.txt").write_text("a b")
    (base / "training_args.bin").write_text("not for others")
    return base


def test_a_folder(run: Simulated, tmp_path: Path) -> None:
    base, start = save(run, tmp_path / "run" / "checkpoints"), hf_folder(tmp_path / "start")
    out = tmp_path / "out"
    code, said = export(base, "--hf", out, "--config", start / "config.json", "--dtype", "bf16")
    assert code == 0, said
    assert f"not compared with {start}/config.json, as transformers is not installed" in said
    assert {path.name for path in out.iterdir()} == {
        "README.md", "config.json", "generation_config.json", "merges.txt", "model.safetensors",
        "tokenizer.json",
    }  # fmt: skip
    assert json.loads((out / "config.json").read_text()) == {**CONFIG, "torch_dtype": "bfloat16"}
    assert (out / "merges.txt").read_text() == "a b"
    expected = averaged(run)
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in expected)
    card = (out / "README.md").read_text()
    assert 'from_pretrained("out")' in card and "| inner steps | 6 |" in card
    assert "their mean" in card and "The records of the run were not at hand" in card
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    assert not list(tmp_path.glob("out.*"))
    code, said = export(base, "--hf", out, "--config", start)
    assert code == 2 and f"--hf {out} holds files already" in said


def test_what_lies_in_the_checkpoint_and_a_tokenizer_from_elsewhere(
    run: Simulated, tmp_path: Path
) -> None:
    base = save(run, tmp_path / "run")
    hf_folder(tmp_path / "other").joinpath("config.json").unlink()
    (base / "cluster_0" / "a" / "config.json").write_text(json.dumps(CONFIG))
    out = tmp_path / "made" / "anew"
    code, said = export(base, "--hf", out, "--tokenizer", tmp_path / "other")
    assert code == 0, said  # config.json is taken from the checkpoint
    assert f"tokenizer of {tmp_path}/other: tokenizer.json, merges.txt" in said
    assert load_file(out / "model.safetensors").keys() == averaged(run).keys()
    code, said = export(base, "--hf", tmp_path / "none", "--tokenizer", base)
    assert code == 2 and f"--tokenizer {base} holds none of a tokenizer's files" in said


@pytest.mark.parametrize("ties", [True, False, None])
def test_a_tied_weight_is_written_once_where_config_json_ties_it(
    run: Simulated, ties: bool | None, tmp_path: Path
) -> None:
    base = save(run, tmp_path / "run", aliases={"head.weight": LAST})
    start = hf_folder(tmp_path / "start", **({} if ties is None else {"tie_word_embeddings": ties}))
    code, said = export(base, "--hf", tmp_path / "out", "--config", start)
    if ties is False:
        assert code == 2
        assert f"trained head.weight and {LAST} as one tensor, and {start}/config.json" in said
        assert not (tmp_path / "out").exists()
        return
    assert code == 0, said
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert ("head.weight" in names) == (ties is None) and LAST in names


def test_what_handle_save_wrote(run: Simulated, tmp_path: Path) -> None:
    start = hf_folder(tmp_path / "start")
    for m, loop in enumerate(run.loops):
        directory = tmp_path / f"cluster_{m}" / "end"
        save_state(loop, directory, RankInfo(m, 2, 0, 1), "run", {}, {})
    code, said = export(tmp_path / "cluster_0/end", "--hf", tmp_path / "out", "--config", start)
    assert code == 0 and "mean of 2 clusters at step 6" in said
    expected = averaged(run)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    (tmp_path / "cluster_1").rename(tmp_path / "elsewhere")
    code, said = export(tmp_path / "cluster_0/end", "--out", tmp_path / "anchor")
    assert code == 0 and "this is the anchor, which they share" in said
    code, said = export(tmp_path / "cluster_0/end", "--out", tmp_path / "anchor", "--tag", "b")
    assert code == 2 and "is one checkpoint, which has no tags" in said


def test_what_is_refused(run: Simulated, tmp_path: Path) -> None:
    base = save(run, tmp_path / "run")
    start, out = hf_folder(tmp_path / "start"), tmp_path / "out"
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "half.json").write_text('{"model_type": ')
    quantized = hf_folder(tmp_path / "quantized", quantization_config={"bits": 4})
    cases = [
        ([], "give one of --out DIR"),
        (["--out", out, "--hf", out], "give one of --out DIR"),
        (["--out", out, "--config", start], "--config goes with --hf DIR"),
        (["--out", out, "--tokenizer", start], "--tokenizer goes with --hf DIR"),
        (["--hf", out, "--format", "universal"], "--format universal goes with --out DIR"),
        (["--hf", out], f"no config.json in or beside {base}/cluster_0/a"),
        (["--hf", out, "--config", tmp_path / "none"], "no config file at"),
        (["--hf", out, "--config", tmp_path / "list.json"], "names no model_type"),
        (["--hf", out, "--config", tmp_path / "half.json"], "is not valid JSON"),
        (["--hf", out, "--config", quantized], "has a quantization_config"),
        (["--hf", start / "config.json" / "x", "--config", start], "config.json is a file"),
    ]
    for arguments, message in cases:
        code, said = export(base, *arguments)
        assert code == 2 and message in said, (arguments, said)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("file", "facts", "message"),
    [
        (
            "masters.json",
            {},
            r"of a Megatron run and lacks dsx_megatron.json, .* Megatron Bridge conv",
        ),
        (MODULE_FACTS, {"places": {"0": "tied_modules.e"}}, "is of a pipeline, whose parameters"),
    ],
)
def test_runs_whose_names_are_of_no_hugging_face_model(
    run: Simulated, file: str, facts: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base, start = save(run, tmp_path / "run", file, **facts), hf_folder(tmp_path / "start")
    code, said = export(base, "--hf", tmp_path / "out", "--config", start)
    assert code == 2 and re.search(message, said.replace("\n", "")), said


A, B, HEAD = (4, 2), (3,), (4, 2)
MODEL = Architecture("TinyForCausalLM", {"a": A, "b": B, "head": HEAD}, {})
TIED = Architecture("TinyForCausalLM", {"a": A, "b": B, "head": HEAD}, {"head": "a"})


def test_names_that_are_those_of_the_model(tmp_path: Path) -> None:
    require_same(Tensors({"a": A, "b": B, "head": HEAD}, {}), MODEL, tmp_path)
    require_same(Tensors({"a": A, "b": B}, {}), TIED, tmp_path)  # plain PyTorch notes no aliases
    require_same(Tensors({"a": A, "b": B}, {"head": "a"}), TIED, tmp_path)
    require_same(Tensors({"head": A, "b": B}, {"a": "head"}), TIED, tmp_path)


@pytest.mark.parametrize("aliases", [{"head": "a"}, {"a": "head"}])
def test_a_tied_weight_has_the_name_that_the_others_are_tied_to(
    aliases: dict[str, str], tmp_path: Path
) -> None:
    held = next(iter(aliases.values()))
    tensors = Tensors({held: A, "b": B}, aliases)
    assert left_out(tensors, TIED, {}, tmp_path) == {"head"}
    assert left_out(tensors, None, {"tie_word_embeddings": True}, tmp_path) == set(aliases)


def test_the_name_a_run_has_first_is_left_out_where_another_is_written(
    run: Simulated, tmp_path: Path
) -> None:
    base = save(run, tmp_path / "run", aliases={"head.weight": LAST})
    model = find_model(base, None)
    write_safetensors(model, {}, tmp_path, torch.float32, 10**9, lambda line: None, {LAST})
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert LAST not in file.keys()  # noqa: SIM118 - not a mapping
        assert file.get_tensor("head.weight").equal(model.tensor(LAST))


@pytest.mark.parametrize(
    ("tensors", "model", "message"),
    [
        (Tensors({"a": A}, {}), MODEL, r"missing in the run: b, head: give the config"),
        (Tensors({"m.a": A, "b": B, "head": A}, {}), MODEL, "run: a; unexpected: m.a: give"),
        (
            Tensors({"a": (5, 2), "b": B, "head": A}, {}), MODEL,
            r"shapes: a is \[5, 2\] in the run and \[4, 2\] there",
        ),
        (Tensors({"a": A, "b": B, "head": A}, {}), TIED, "ties head to a, .* to false"),
        (Tensors({"a": A, "b": B}, {"head": "a"}), MODEL, "head and a as one tensor, .* to true"),
        (
            Tensors({"b": B, **{f"x{i:02}": A for i in range(11)}}, {}), MODEL,
            "unexpected: x00, .*, x07 and 3 more",
        ),
    ],
)  # fmt: skip
def test_names_that_are_not(
    tensors: Tensors, model: Architecture, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        require_same(tensors, model, tmp_path)


def write_records(folder: Path, session: str) -> None:
    """Write what two clusters' records say of eight steps, two of them behind the checkpoint."""
    for m in range(2):
        name = ".cluster_1" if m else ""
        start = {
            "session": session, "time": "2026-01-01T00:00:00Z", "ranks": 3, "host": "secret",
            "versions": {"python": "3.11", "torch": "2.9"},
            "config": {"resolved": {"preset": "streaming_diloco"}},
        }  # fmt: skip
        saved = {"path": "x", "tag": "a", "step": 6, "time": "2026-01-01T01:00:00Z"}
        about = {"format": 1, "cluster": m, "starts": [start], "checkpoints": [saved]}
        (folder / f"run{name}.json").write_text(json.dumps(about))
        lines = [
            {
                "kind": "step",
                "step": n,
                "loss": n + m,
                "tokens": 100,
                "seconds": 0.1,
                "bytes_sent": 1000 * n,
            }
            for n in range(1, 9)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"metrics{name}.jsonl").write_text(text)


@pytest.mark.parametrize("session", ["run", "another"])
def test_the_card_has_the_facts_of_the_run_up_to_the_checkpoint(
    run: Simulated, session: str, tmp_path: Path
) -> None:
    save(run, tmp_path / "run" / "checkpoints")
    write_records(tmp_path / "run", session)
    start = hf_folder(tmp_path / "start")
    code, said = export(tmp_path / "run", "--hf", tmp_path / "out", "--config", start)
    assert code == 0, said
    card = (tmp_path / "out" / "README.md").read_text()
    facts = [
        "| preset | streaming_diloco |", "| ranks of a cluster | 3 |", "| tokens | 1,200 |",
        "| training loss, mean of the last ten steps | cluster 0: 3.5000; cluster 1: 4.5000 |",
        "| sent to the other clusters | cluster 0: 6 kB; cluster 1: 6 kB |",
        "| begun | 2026-01-01T00:00:00Z, saved 2026-01-01T01:00:00Z |",
        "| versions | python 3.11, torch 2.9 |",
    ]  # fmt: skip
    assert [fact in card for fact in facts] == [session == "run"] * len(facts), card
    assert "secret" not in card and str(tmp_path) not in card
    assert ("holds another run's" in said) == (session == "another")
