"""What a file is planned for: by its own folder, in a block, in flags, and by who plans with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsx.cli import app
from dsx.config.files import ConfigError
from dsx.config.flags import block_of_flags
from dsx.config.planned import PlanConfig, planned_for
from dsx.config.schema import load_config
from dsx.examples.gpt import GPT, GPTConfig
from dsx.plan.model_files import read_model

CONFIGS = Path(__file__).parents[2] / "configs"
FLAGS = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 256 "
OF_DSX = "--dsx-preset diloco --dsx-num-clusters 2"


def document(plan: Any) -> dict[str, Any]:
    return {"dsx": {"preset": "diloco", "clusters": {"num_clusters": 2}, "plan": plan}}


def write(folder: Path, plan: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "sizes.flags").write_text(FLAGS)
    (folder / "run.json").write_text(json.dumps(document(plan)))
    return folder / "run.json"


def asked(command: str, source: Path, *words: str) -> tuple[int, str]:
    options = {"plan": ["--clusters", "2", "--gbps", "1", "--step-seconds", "1", "--deepspeed"]}
    given = [command, *options.get(command, []), str(source), *words]
    done = CliRunner().invoke(app, given, env={"COLUMNS": "200"})
    return done.exit_code, done.stdout + done.stderr


def test_the_models_file_lies_beside_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "own", {"model": "sizes.flags", "ranks_per_cluster": 4})
    config = load_config(source)
    assert config.plan.model == str(tmp_path / "own" / "sizes.flags")
    assert planned_for(json.loads(source.read_text()), source) == config.plan
    assert load_config({"dsx": config.block()}).plan == config.plan  # from anywhere
    monkeypatch.chdir(tmp_path)
    of_flags = load_config(block_of_flags(["--dsx-config", "own/run.json"])).plan
    assert (of_flags.model, of_flags.ranks_per_cluster) == ("own/sizes.flags", 4)
    away = load_config(document({"model": "/sizes.flags"})).plan
    assert away == PlanConfig(model="/sizes.flags")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"modell": "x"}, "dsx.plan.modell is not a known key; did you mean 'model'"),
        ({"ranks_per_cluster": 0}, "dsx.plan.ranks_per_cluster=0 must be"),
        ({"ranks_per_cluster": "80"}, "dsx.plan.ranks_per_cluster='80' must be"),
        ({"model": ""}, "dsx.plan.model='' must "),
        ({"model": 5}, "dsx.plan.model=5 must be"),
        ([80], r"dsx.plan must be an object, not \[80\]"),
    ],
)
def test_what_cannot_be_is_refused_by_a_run_and_by_a_plan(
    plan: Any, words: str, tmp_path: Path
) -> None:
    source = write(tmp_path, plan)
    with pytest.raises(ConfigError, match=words):
        load_config(source)
    with pytest.raises(ConfigError, match=words):
        planned_for(document(plan), source)


@pytest.mark.parametrize("command", ["memory", "plan"])
def test_who_plans_reads_it_where_no_option_says_otherwise(command: str, tmp_path: Path) -> None:
    source = write(tmp_path, {"model": "sizes.flags", "ranks_per_cluster": 4})
    assert "2 clusters of 4 ranks" in asked(command, source)[1]
    assert "2 clusters of 8 ranks" in asked(command, source, "--ranks-per-cluster", "8")[1]
    larger = tmp_path / "larger.flags"
    larger.write_text(FLAGS.replace("--num-layers 4", "--num-layers 64"))
    alike = asked(command, source, "--model", str(tmp_path / "sizes.flags"))
    assert asked(command, source) == alike != asked(command, source, "--model", str(larger))


def test_what_is_not_told_is_named_with_both_ways_to_tell_it(tmp_path: Path) -> None:
    code, said = asked("memory", write(tmp_path, {}))
    assert code == 2 and "add --model FILE, with" in said and '"plan": {"model": FILE, ' in said
    assert f"of a Megatron run give the file of its flags, with --dsx-config {tmp_path}" in said
    code, said = asked("memory", CONFIGS / "minimal.json")
    assert code == 2 and "add --model FILE, with" in said and "Megatron run" not in said
    code, said = asked("memory", write(tmp_path, {"model": "sizes.flags"}))
    assert code == 2 and "add --ranks-per-cluster N, or" in said
    code, said = asked("memory", write(tmp_path, {"model": "gone.flags"}))
    assert code == 2 and f"dsx.plan.model: there is no file {tmp_path}/gone.flags" in said


def test_flags_tell_the_ranks_that_they_are_planned_for(tmp_path: Path) -> None:
    source = tmp_path / "run.flags"
    source.write_text(f"{FLAGS} {OF_DSX} --dsx-plan-ranks-per-cluster 4")
    assert "2 clusters of 4 ranks" in asked("memory", source)[1]
    assert "2 clusters of 2 ranks" in asked("memory", source, "--ranks", "2")[1]
    write(tmp_path, {"model": "run.flags", "ranks_per_cluster": 8})
    source.write_text(f"{FLAGS} --dsx-config {tmp_path / 'run.json'}")  # a block for both engines
    assert "2 clusters of 8 ranks" in asked("memory", source)[1]
    source.write_text(f"{FLAGS} {OF_DSX} --dsx-plan-model x.flags")
    code, said = asked("memory", source)
    assert code == 2 and "dsx.plan.model='x.flags' is of a DeepSpeed JSON" in said


def test_a_doctor_reads_it_too_and_a_site_may_lack_the_models_file(tmp_path: Path) -> None:
    source = write(tmp_path, {"model": "sizes.flags", "ranks_per_cluster": 4})
    assert "with --model FILE and --ranks N" not in asked("doctor", source)[1]
    (tmp_path / "sizes.flags").unlink()
    code, said = asked("doctor", source)
    assert "--model" in said and f"no file {tmp_path}/sizes.flags" in " ".join(said.split())
    assert asked("doctor", write(tmp_path, {"ranks_per_cluster": 4}))[1].count("no file") == 0


def test_a_name_that_no_file_can_have_is_a_file_that_is_not_there(tmp_path: Path) -> None:
    source = write(tmp_path, {"model": "x" * 300, "ranks_per_cluster": 4})
    assert load_config(source).plan.model_file() is None
    for command in ("memory", "plan", "dry-run"):
        code, said = asked(command, source)
        assert code == 2 and "dsx.plan.model: there is no file" in said and len(said) < 400
    assert "there is no file" in asked("doctor", source)[1]


@pytest.mark.parametrize("name", ["qwen_107b_zero3.json", "qwen_107b_pipeline.json"])
def test_the_107_b_of_deepspeed_are_planned_as_they_are(name: str) -> None:
    code, said = asked("memory", CONFIGS / name, "--limit", "80")
    assert code == 0 and "107.2 B parameters; 2 clusters of 80 ranks" in said


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("quickstart.json", "pipeline 1, data 2"),
        ("quickstart_dilocox.json", "pipeline 1, data 2"),
        ("quickstart_pipeline.json", "pipeline 2 by parameters, data 1"),
        ("two_launchers.json", "pipeline 1, data 2"),
    ],
)
def test_the_quickstarts_files_name_the_model_that_they_train(name: str, cut: str) -> None:
    model = GPT(GPTConfig(sequence_length=128))
    files = read_model(CONFIGS / name, None, None)
    assert files.model.numel == model.num_parameters() and files.cluster.ranks == 2
    code, said = asked("memory", CONFIGS / name)
    assert code == 0 and f"3.3 M parameters; 2 clusters of 2 ranks (tensor 1, {cut})" in said
