"""House rules that a machine checks; who may import whom: pyproject.toml (import-linter)."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.garbage import not_collecting

PACKAGE = Path(__file__).parents[2] / "dsx"
FILES = sorted(PACKAGE.rglob("*.py"))

MAY_IMPORT_ENGINES = ("comm", "engines", "cli", "examples")
WORKERS = (  # a rank each
    "bench.e2e.worker", "bench.torchft.worker", "bench.examples.inside",
    "bench.wall_clock.worker", "bench.wall_clock.inner", "bench.chaos.engines",
    "bench.chaos.against.worker",
    "bench.megatron_chunk", "bench.megatron_context", "bench.megatron_on_cpu",
    "bench.engines.torch", "bench.engines.deepspeed", "bench.engines.megatron",
    "bench.engines.worker",
    "bench.gpu.engines", "bench.gpu.megatron", "bench.gpu.worker",
    "bench.dry_run.deepspeed", "bench.dry_run.megatron", "bench.dry_run.stand_in",
)  # fmt: skip


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__")


Looked = ast.Import | ast.ImportFrom | ast.FunctionDef


@functools.cache
def nodes() -> dict[Path, list[Looked]]:
    """The imports and functions of each file, wherever in it they stand."""
    with not_collecting():
        return {
            path: [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, Looked)]
            for path in FILES
        }


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in nodes()[path]:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_only_adapters_know_engines_and_process_groups() -> None:
    found: dict[str, list[str]] = {}
    for path in FILES:
        module = module_name(path)
        if not module.startswith((*MAY_IMPORT_ENGINES, *WORKERS)):
            of_engines = [n for n in imports(path) if n.split(".")[0] in ("deepspeed", "megatron")]
            groups = [n for n in imports(path) if n.startswith("torch.distributed")]
            found[module] = of_engines + groups
    assert len(found) > 400 and not {module: names for module, names in found.items() if names}


def test_files_stay_within_350_lines_and_functions_within_60() -> None:
    lines = {module_name(path): len(path.read_text().splitlines()) for path in FILES}
    assert not {module: n for module, n in lines.items() if n > 350}
    too_long = [
        (module_name(path), node.name)
        for path in FILES
        for node in nodes()[path]
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert not too_long


def test_importing_dsx_imports_no_engine_and_the_world_is_there() -> None:
    """Without an import of its own: `dsx.comm` comes with torch, when it is asked for."""
    code = (
        "import sys, dsx; print([m for m in ('deepspeed', 'megatron') if m in sys.modules])\n"
        "print(dsx.comm.world.current_world())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["[]", "None"]


MODEL = "--megatron configs/qwen_107b.flags --clusters 2 --gbps 1 --gpu a800"
IMPORT_NO_TORCH = (
    "--help",
    f"plan {MODEL} --top 1",
    "memory configs/qwen_107b.flags --limit 40",
    "doctor configs/quickstart.json",
)


def test_dsx_and_its_commands_that_plan_import_no_torch() -> None:
    code = (
        "import sys, dsx, dsx.plan.predict; from dsx.cli import app\n"
        f"for arguments in {[line.split() for line in IMPORT_NO_TORCH]!r}:\n"
        "    sys.argv[1:] = arguments\n"
        "    try: app()\n"
        "    except SystemExit as ended: print(ended.code, arguments, 'torch' in sys.modules)"
    )
    run = [sys.executable, "-c", code]
    out = subprocess.run(
        run, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    for line in IMPORT_NO_TORCH:
        assert f"0 {line.split()!r} False" in out.stdout.splitlines()


def test_every_public_name_is_there() -> None:
    import dsx

    modules = {module_name(path).split(".")[0] for path in FILES}
    for name in dsx.__all__:
        assert getattr(dsx, name).__name__ == name
        assert name not in modules, f"dsx.{name} would be the module once that is imported"
    assert set(dsx.__all__) <= set(dir(dsx))
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        getattr(dsx, "initialise")  # noqa: B009 - what a typing error does
