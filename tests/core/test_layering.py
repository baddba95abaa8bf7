"""House rules that a machine can check: who may import whom, and how long a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "dsx"
FILES = sorted(PACKAGE.rglob("*.py"))

# Each module belongs to a layer and may import from lower ones and its own.
LAYERS = [
    ["types", "units", "choices", "documents", "record_file", "trace.lanes"],
    [
        "outer_optimizer",
        "comm.swap",
        "comm.reduce",
        "comm.stripes",
        "wire",
        "compress",
        "wire",
        "delay",
        "schedule",
        "control",
        "fragment",
        "staleness",
        "stability",
        "per_tensor",
        "notes",
        "guard",
        "line",
        "redistribution",
        "gpt_shapes",
        "inner_memory",
        "model_files",
        "trace.recorder",
    ],
    ["method", "comm.base"],
    ["backends.base", "presets", "state"],
    ["transfer", "agreement", "comm.topology"],
    ["departure", "judge", "memory", "round_starts", "routes"],
    ["outer_loop"],
    [
        "comm",
        "backends",
        "backends.torch",
        "backends.deepspeed",
        "tags",
        "saved_state",
        "recut",
        "reshard",
        "checkpoint",
        "export",
        "export_model",
        "metrics",
        "report",
        "data",
        "sync_records",
        "stop",
        "last_comparison",
    ],
    ["config", "flags", "simulate", "memory_plan"],
    ["trace.start", "start_record"],
    ["handle", "backends.deepspeed_checkpoint", "backends.megatron_checkpoint"],
    ["attachment"],
    [
        "",
        "cli",
        "bench",
        "plan",
        "link",
        "trace",
        "export_command",
        "memory_command",
        "megatron",
    ],
]
MAY_IMPORT_ENGINES = ("comm", "backends", "attachment", "cli", "bench.e2e_worker")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__")


def layer_of(module: str) -> int:
    matches = [
        (len(name), index)
        for index, names in enumerate(LAYERS)
        for name in names
        if module == name or (name and module.startswith(f"{name}."))
    ]
    assert matches, f"{module} is in no layer: add it to LAYERS"
    return max(matches)[1]


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
def test_imports_point_downwards(path: Path) -> None:
    own = layer_of(module_name(path))
    for name in imports(path):
        if name.startswith("dsx."):
            assert layer_of(name.removeprefix("dsx.")) <= own, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_only_adapters_know_engines_and_process_groups(path: Path) -> None:
    module = module_name(path)
    if module.startswith(MAY_IMPORT_ENGINES):
        return
    engines = {n for n in imports(path) if n.split(".")[0] in ("deepspeed", "megatron")}
    if module.startswith("data"):  # the builder writes through megatron-core
        engines = {n for n in engines if not n.startswith("megatron.core.datasets")}
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


def test_importing_dsx_or_its_command_imports_no_torch() -> None:
    code = "import sys, dsx, dsx.cli, dsx.plan.predict; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


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
