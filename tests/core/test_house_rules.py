"""House rules that a machine checks; who may import whom: pyproject.toml (import-linter)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "dsx"
FILES = sorted(PACKAGE.rglob("*.py"))

MAY_IMPORT_ENGINES = ("comm", "engines", "cli", "examples")
WORKERS = (  # a rank each
    "bench.e2e.worker", "bench.torchft.worker", "bench.examples.inside",
    "bench.wall_clock.worker", "bench.wall_clock.inner", "bench.chaos.engines",
    "bench.chaos.against.worker",
    "bench.megatron_on_cpu",
    "bench.dry_run.deepspeed", "bench.dry_run.megatron", "bench.dry_run.stand_in",
)  # fmt: skip


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__")


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_only_adapters_know_engines_and_process_groups(path: Path) -> None:
    module = module_name(path)
    if module.startswith((*MAY_IMPORT_ENGINES, *WORKERS)):
        return
    engines = {n for n in imports(path) if n.split(".")[0] in ("deepspeed", "megatron")}
    assert not engines
    assert not any(n.startswith("torch.distributed") for n in imports(path))


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_stay_within_350_lines_and_functions_within_60(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 350
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name


def test_importing_dsx_imports_no_engine() -> None:
    code = "import sys, dsx; print([m for m in ('deepspeed', 'megatron') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


MODEL = "--megatron configs/qwen_107b.flags --clusters 2 --gbps 1 --gpu a800"


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        f"plan {MODEL} --top 1",
        "memory configs/qwen_107b.flags --limit 40",
        "doctor configs/quickstart.json",
    ],
    ids=["help", "plan", "memory", "doctor"],
)
def test_dsx_and_its_commands_that_plan_import_no_torch(arguments: str) -> None:
    code = (
        "import sys, dsx, dsx.plan.predict; from dsx.cli import app\n"
        f"sys.argv[1:] = {arguments.split()!r}\n"
        "try: app()\nfinally: print('torch imported:', 'torch' in sys.modules)"
    )
    run = [sys.executable, "-c", code]
    out = subprocess.run(
        run, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert out.stdout.splitlines()[-1] == "torch imported: False"


def test_the_world_is_there_without_an_import_of_its_own() -> None:
    code = "import dsx; print(dsx.comm.world.current_world())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "None"


def test_every_public_name_is_there() -> None:
    import dsx

    modules = {module_name(path).split(".")[0] for path in FILES}
    for name in dsx.__all__:
        assert getattr(dsx, name).__name__ == name
        assert name not in modules, f"dsx.{name} would be the module once that is imported"
    assert set(dsx.__all__) <= set(dir(dsx))
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        getattr(dsx, "initialise")  # noqa: B009 - what a typing error does
