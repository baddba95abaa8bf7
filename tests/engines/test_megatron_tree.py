"""`python -m megatron_patches --check TREE`: a tree is read, and what is missing is named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megatron_patches.__main__ import main
from megatron_patches.tree import WRAPPED, check_tree, report

PATCHES = Path(__file__).parents[2] / "megatron_patches"


def make_tree(at: Path, *without: str, **replaced: str) -> Path:
    """A tree with all that is wrapped, but for some names, or with other sources of some."""
    text: dict[str, list[str]] = {}
    for one in WRAPPED:
        if one.name in without:
            continue
        taken = ", ".join(one.parameters)
        source = f"def {one.name}({taken}): ..."
        if one.name[0] == "M":
            source = f"class {one.name}:\n    def __init__(self, {taken}): ..."
        elif one.name[0] == "_":
            source = f"{one.name} = 0"
        text.setdefault(one.modules[0], []).append(replaced.get(one.name, source))
    for module, sources in text.items():
        file = at.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(sources) + "\n")
    return at


def test_a_tree_with_all_of_it_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = (
        "try:\n    from .saving import save as save_checkpoint\nexcept ImportError:\n    pass"
    )
    tree = make_tree(tmp_path, save_checkpoint=elsewhere)
    saving = tree / "megatron" / "training" / "saving.py"
    saving.write_text("def save(iteration, model, *, optimizer): ...\n")
    with pytest.raises(SystemExit) as ended:
        main(["--check", str(tree)])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and said.endswith("served\n")
    assert "megatron.training.saving; checkpoint.py: so that the outer state is saved" in said


def test_what_is_missing_or_of_another_shape_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = make_tree(
        tmp_path,
        "train",
        "MegatronPretrainingSampler",
        save_checkpoint="def save_checkpoint(x): ...",
    )
    with pytest.raises(SystemExit) as ended:
        main(["--check", str(tree)])
    said = capsys.readouterr().out
    assert ended.value.code == 1
    assert "megatron.training.training has no train, which is there from core_v0.8.0 to" in said
    assert "takes (x) and not iteration, model, optimizer" in said
    last = said.splitlines()[-1]
    assert last.startswith(
        "not served: save_checkpoint, MegatronPretrainingSampler, train; checked"
    )
    wrong = {one.wanted.name for one in check_tree(tree) if one.wrong}
    assert wrong == {"train", "MegatronPretrainingSampler", "save_checkpoint"}
    assert "not served" in report(check_tree(tree))


def test_what_is_no_tree_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, said in (
        (["--check", str(tmp_path)], "give the folder of a Megatron-LM tree"),
        (["--check"], "--check takes one folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(given)
        assert ended.value.code == 2 and said in capsys.readouterr().err


def test_all_that_patches_look_up_is_in_the_table() -> None:
    """Names of `probe.function`, and the parameters that are asked for there by name."""
    listed = {one.name: {*one.parameters} for one in WRAPPED}
    looked_up: dict[str, set[str]] = {}
    for file in PATCHES.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "probe.function":
                _, name, *rest = node.args
                if isinstance(name, ast.Constant) and name.value != "__init__":
                    asked = (
                        {*ast.literal_eval(rest[0])}
                        if rest and isinstance(rest[0], ast.List)
                        else set()
                    )
                    looked_up.setdefault(name.value, set()).update(asked)
    assert len(looked_up) > 10
    for name, asked in looked_up.items():
        assert name in listed and asked <= listed[name], name
