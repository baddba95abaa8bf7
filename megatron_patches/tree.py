"""Whether a Megatron-LM tree has what the patches wrap: read, not imported, so in a second.

    python -m megatron_patches --check TREE

`WRAPPED` lists every function that a patch looks up (probe.py), with the parameters it relies on.
A name counts as there where a module defines it, or imports it from one of the tree that does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_patches.probe import CHECKED, since

_LOOP = ("megatron.training.training",)
SAMPLER_MODULES = ("megatron.training.datasets.data_samplers", "megatron.legacy.data.data_samplers")
TAKEN_BY_SAMPLERS = ("consumed_samples", "data_parallel_rank", "data_parallel_size")
ITERATORS = ("train_data_iterator", "valid_data_iterator")
TAKEN_TO_PRINT = ("prefix", "data_iterator", "write_to_tensorboard")


class Wrapped(NamedTuple):
    """A name of Megatron-LM's, in the first of `modules` that there is; `so_that` a patch needs it.

    A class stands for its `__init__`; without `parameters` any will do.
    """

    modules: tuple[str, ...]
    name: str
    parameters: tuple[str, ...]
    patch: str
    so_that: str


WRAPPED = (
    Wrapped(("megatron.training.arguments",), "parse_args",
            ("extra_args_provider", "ignore_unknown_args"), "arguments.py",
            "flags of dsx are Megatron's, too"),
    Wrapped(_LOOP, "setup_model_and_optimizer", ("model_type",), "model_and_optimizer.py",
            "outer training is attached"),
    Wrapped(_LOOP, "save_checkpoint", ("iteration", "model", "optimizer"), "checkpoint.py",
            "the outer state is saved"),
    Wrapped(SAMPLER_MODULES, "MegatronPretrainingSampler", TAKEN_BY_SAMPLERS, "data.py",
            "clusters read different samples"),
    Wrapped(SAMPLER_MODULES, "MegatronPretrainingRandomSampler", TAKEN_BY_SAMPLERS, "data.py",
            "clusters read different samples"),
    Wrapped(_LOOP, "get_train_valid_test_num_samples", (), "data.py",
            "there are samples for all clusters"),
    Wrapped(_LOOP, "build_train_valid_test_datasets", (), "data.py",
            "data of a cluster's own is read whole"),
    Wrapped(_LOOP, "build_pretraining_data_loader", ("dataset",), "data.py",
            "all validate on the same samples"),
    Wrapped(("megatron.training.checkpointing",), "check_checkpoint_args", ("checkpoint_args",),
            "synchronous.py", "a run begins from plain Megatron's checkpoint"),
    Wrapped(_LOOP, "train", ITERATORS, "training_end.py", "the last transfers are applied"),
    Wrapped(_LOOP, "checkpoint_and_decide_exit", ("iteration",), "training_end.py",
            "all clusters stop at one step"),
    Wrapped(_LOOP, "get_signal_handler", (), "training_end.py", "signals stop all clusters"),
    Wrapped(_LOOP, "_TRAIN_START_TIME", (), "training_end.py", "time limits stop all clusters"),
    Wrapped(_LOOP, "evaluate_and_print_results", TAKEN_TO_PRINT, "validation.py",
            "the average is validated"),
    Wrapped(_LOOP, "train_step", (), "losses.py", "the bounds of divergence see the loss"),
    Wrapped(_LOOP, "num_floating_point_operations", ("args",), "joining.py",
            "a cluster that comes back counts as the others"),
    Wrapped(("megatron.core.optimizer.optimizer",), "ChainedOptimizer", (), "fully_sharded.py",
            "FSDP2's checkpoints are loaded"),
    Wrapped(_LOOP, "cyclic_iter", (), "joining.py", "a cluster that comes back reads on"),
)  # fmt: skip


class Found(NamedTuple):
    """What has come of looking for a name: where it is, or what is `wrong` with it."""

    wanted: Wrapped
    where: str
    wrong: str


def check_tree(tree: Path) -> list[Found]:
    """Look for all that is wrapped; ValueError for what is no tree of Megatron-LM's."""
    if not (tree / "megatron" / "training" / "training.py").is_file():
        raise ValueError(
            f"{tree} has no megatron/training/training.py: give the folder of a Megatron-LM tree, "
            "which megatron-core alone is not"
        )
    return [_look(tree, wanted) for wanted in WRAPPED]


def report(found: Sequence[Found]) -> str:
    """Return a line per name, and what they come to."""
    width = max(len(one.wanted.name) for one in found)
    lines = [
        f"{'ok' if not one.wrong else 'NO':3}{one.wanted.name:{width}}  "
        f"{one.wrong or one.where}; {one.wanted.patch}: so that {one.wanted.so_that}"
        for one in found
    ]
    wrong = [one.wanted.name for one in found if one.wrong]
    end = f"not served: {', '.join(wrong)}; checked: {CHECKED}" if wrong else "served"
    return "\n".join([*lines, end])


def _look(tree: Path, wanted: Wrapped) -> Found:
    there = [name for name in wanted.modules if _file_of(tree, name)]
    if not there:
        return Found(wanted, "", f"no module {' or '.join(wanted.modules)}")
    where, node = _find(tree, there[0], wanted.name, set())
    if node is None:
        return Found(wanted, "", f"{there[0]} has no {wanted.name}, {since(wanted.name)}")
    missing = [name for name in wanted.parameters if name not in _parameters(node)]
    wrong = f"{where} takes ({', '.join(_parameters(node))}) and not {', '.join(missing)}"
    return Found(wanted, where, wrong if missing else "")


def _file_of(tree: Path, module: str) -> Path | None:
    path = tree.joinpath(*module.split("."))
    places = path.with_suffix(".py"), path / "__init__.py"
    return next((place for place in places if place.is_file()), None)


def _find(tree: Path, module: str, name: str, seen: set[str]) -> tuple[str, ast.AST | None]:
    """Return where a name of a module is defined, following its imports within the tree."""
    file = _file_of(tree, module)
    if file is None or module in seen:
        return module, None
    found: tuple[str, ast.AST | None] = module, None
    for node in _statements(ast.parse(file.read_text()).body):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            found = module, node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                found = module, node
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    source = _source(module, file, node)
                    found = _find(tree, source, alias.name, {*seen, module})
    return found


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements, those under conditions and in attempts as well."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _statements(node.body)
            yield from _statements(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _source(module: str, file: Path, node: ast.ImportFrom) -> str:
    """Return the module that an import names, which may be relative."""
    if not node.level:
        return node.module or ""
    is_package = file.name == "__init__.py"
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _parameters(node: ast.AST) -> list[str]:
    """Return the names that a function, or a class's `__init__`, takes."""
    if isinstance(node, ast.ClassDef):
        made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        return _parameters(made[0]) if made else []
    if not isinstance(node, ast.FunctionDef):
        return []
    given = node.args
    return [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
