#!/usr/bin/env python3
"""Run parts of the tests with other releases of Megatron-LM, DeepSpeed and torch; print a table.

What is run by each column is in `PARTS`. A release that fails is a row with the first reason; then
the exit status is 1. Started by scripts/matrix.sh.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.util import find_spec
from pathlib import Path

from older_packages import NotInstalled, dependencies, make_environment

ROOT = Path(__file__).parents[1]
COLUMNS = ("check", "trained", "resumed", "refusals")
HEAD = ("release", "of", "torch", *COLUMNS, "why not")
_ENGINES, _SCRIPT = "tests/engines", "tests/launch/test_megatron_lm.py"
_TREES_IMPORT = {"six": "six", "regex": "regex", "yaml": "pyyaml", "triton": "triton"}
_MOST = 160  # characters of a reason
_LOST = re.compile(r"gloo|Connection|PeerLost|PeerGone", re.IGNORECASE)  # what others say of it
_SECONDS = 7200  # of the tests of one release


@dataclass(frozen=True)
class Part:
    """The tests of a column, by file, folder or name; `quick` is a choice of them."""

    tests: tuple[str, ...]
    quick: tuple[str, ...]


_RELEASES = f"{_ENGINES}/test_deepspeed_releases.py"
_RANKS, _FILES = f"{_ENGINES}/test_torch_ranks.py", f"{_ENGINES}/test_torch_checkpoints"
_MARKED = {"megatron": "slow"}  # of the tests; else:
_FAST = "not slow and not gpu"
_TRAINS = f"{_SCRIPT}::test_an_unmodified_script_trains_and_resumes"
_REFUSED = f"{_SCRIPT}::test_what_is_refused_is_named"
PARTS: Mapping[str, Mapping[str, Part]] = {
    "megatron": {
        "trained": Part((f"{_TRAINS}[sharded]",), (f"{_TRAINS}[sharded]",)),
        "resumed": Part(
            (f"{_TRAINS}[pipeline]", f"{_TRAINS}[experts]"), (f"{_TRAINS}[pipeline]",)
        ),
        "refusals": Part(
            (_REFUSED, f"{_SCRIPT}::test_clusters_of_other_arguments_are_refused",
             f"{_SCRIPT}::test_a_missing_outer_state_is_an_error"),
            (f"{_REFUSED}[skip-train]", f"{_REFUSED}[same-save]"),
        ),
    },
    "deepspeed": {
        "trained": Part(
            (f"{_RELEASES}::test_a_release_trains_as_the_reference",
             *(f"{_ENGINES}/test_deepspeed_{name}.py" for name in (
                 "pipeline", "compression", "traffic", "data", "memory"))),
            (f"{_RELEASES}::test_a_release_trains_as_the_reference",),
        ),
        "resumed": Part(
            (f"{_RELEASES}::test_a_release_goes_on_bit_for_bit",
             *(f"{_ENGINES}/test_deepspeed_{name}.py" for name in (
                 "checkpoint", "resume", "dealt_data", "optimizers", "stop"))),
            (f"{_RELEASES}::test_a_release_goes_on_bit_for_bit",),
        ),
        "refusals": Part(
            (f"{_RELEASES}::test_a_release_is_refused_by_name",
             f"{_ENGINES}/test_deepspeed_refusals.py"),
            (f"{_RELEASES}::test_a_release_is_refused_by_name",
             f"{_ENGINES}/test_deepspeed_refusals.py::"
             "test_a_setting_is_refused_before_anything_is_built",
             f"{_ENGINES}/test_deepspeed_refusals.py::"
             "test_an_mpu_of_other_kinds_is_refused_and_training_data_that_it_cannot_deal"),
        ),
    },
    "torch": {
        "trained": Part(
            ("tests/method", "tests/compress", f"{_ENGINES}/test_torch.py",
             f"{_RANKS}::test_copies_under_ddp", f"{_RANKS}::test_shards_of_fsdp2",
             f"{_ENGINES}/test_deepspeed.py", f"{_ENGINES}/test_megatron.py"),
            (f"{_ENGINES}/test_torch.py", f"{_RANKS}::test_copies_under_ddp",
             f"{_RANKS}::test_shards_of_fsdp2",
             f"{_RELEASES}::test_a_release_trains_as_the_reference"),
        ),
        "resumed": Part(
            ("tests/checkpoint", f"{_RANKS}::test_replicas_of_shards",
             f"{_RANKS}::test_shards_go_on_as_copies_and_read_what_is_written",
             f"{_FILES}.py", f"{_FILES}_reads.py", f"{_FILES}_killed.py",
             f"{_RELEASES}::test_a_release_goes_on_bit_for_bit",
             f"{_ENGINES}/test_megatron_checkpoint.py", f"{_ENGINES}/test_megatron_dist.py"),
            (f"{_FILES}.py", f"{_RANKS}::test_shards_go_on_as_copies_and_read_what_is_written",
             f"{_RELEASES}::test_a_release_goes_on_bit_for_bit"),
        ),
        "refusals": Part(
            (f"{_ENGINES}/test_settings.py", f"{_FILES}_refusals.py"),
            (f"{_ENGINES}/test_settings.py", f"{_FILES}_refusals.py"),
        ),
    },
}  # fmt: skip


@dataclass
class Row:
    """A release, the day that it is of where a tree says it, and what was seen of it."""

    release: str
    of: str = ""
    torch: str = ""
    cells: dict[str, str] = field(default_factory=dict)
    why: list[str] = field(default_factory=list)

    def as_markdown(self) -> str:
        """Return its line of the table."""
        seen = [self.cells.get(column, "-") for column in COLUMNS]
        reason = self.why[0].replace("|", "\\|") if self.why else ""
        words = [self.release, self.of or "-", self.torch or "-", *seen, reason]
        return f"| {' | '.join(words)} |"


def main() -> int:
    """Go through what is asked for; return 1 where a release has failed."""
    asked = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="matrix-") as temporary:
        folder = asked.environments or Path(temporary)
        rows: list[Row] = []
        for row in _rows(asked, folder):
            rows.append(row)
            print(row.as_markdown(), file=sys.stderr, flush=True)
    print(f"{date.today()}, {'a part of the tests' if asked.quick else 'all parts'}\n")
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}")
    for row in rows:
        print(row.as_markdown())
    return int(any(row.why for row in rows))


def parse_arguments() -> argparse.Namespace:
    """Return what the command line says; it ends with a message where that is nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--trees", type=Path, metavar="DIR", help="Megatron-LM trees, a folder each")
    add("--deepspeed", default="", metavar="VERSION,VERSION", help="releases to install")
    add("--torch", default="", metavar="VERSION,VERSION", help="CPU builds to install")
    add("--environments", type=Path, metavar="DIR", help="keep what is installed there")
    add("--quick", action="store_true", help="a choice of the tests")
    add("--cuda-builds", action="store_true", help="of torch, too, which take some 6 GB each")
    asked = parser.parse_args()
    if not (asked.trees or asked.deepspeed or asked.torch):
        parser.error("give --trees DIR, --deepspeed VERSIONS or --torch VERSIONS")
    if asked.trees and not trees_in(asked.trees):
        parser.error(f"--trees {asked.trees} holds no folder with megatron/core in it")
    return asked


def _rows(asked: argparse.Namespace, folder: Path) -> Iterator[Row]:
    for tree in trees_in(asked.trees) if asked.trees else []:
        yield of_tree(tree, folder, asked.quick)
    for name in ("deepspeed", "torch"):
        for version in filter(None, getattr(asked, name).split(",")):
            yield of_package(name, version.strip(), folder, asked.quick, asked.cuda_builds)


def trees_in(folder: Path) -> list[Path]:
    """Return the Megatron-LM trees in a folder, or the folder itself if it is one."""
    found = [one for one in (folder, *sorted(folder.glob("*"))) if (one / "megatron/core").is_dir()]
    return found[:1] if found[:1] == [folder] else found


def of_tree(tree: Path, folder: Path, is_quick: bool) -> Row:
    """Return the row of a Megatron-LM tree; what its scripts import is installed where it is not.

    That is into an environment of its own, one for all trees.
    """
    row = Row(f"Megatron-LM {tree.absolute().name}: {release_of(tree)}", day_of(tree))
    missing = [package for module, package in _TREES_IMPORT.items() if find_spec(module) is None]
    try:
        made = make_environment(folder / "megatron-lm", missing) if missing else sys.executable
    except NotInstalled as failure:
        row.why.append(_short(str(failure)))
        return row
    python = str(made)
    row.torch = _torch_of(python)
    checked = _run([sys.executable, "-m", "megatron_patches", "--check", str(tree)])
    last = (checked.stdout.strip() or checked.stderr.strip()).splitlines()[-1]
    row.cells["check"] = last if checked.returncode == 0 else "no"
    if checked.returncode:
        wrong = [line for line in checked.stdout.splitlines() if not line.startswith("ok ")]
        row.why.append(_short(wrong[0] if wrong else last))
    given = ["--forked-ranks", f"--megatron-lm={tree.absolute()}"]
    _fill(row, "megatron", python, is_quick, given)
    return row


def of_package(name: str, version: str, folder: Path, is_quick: bool, takes_cuda: bool) -> Row:
    """Return the row of a release of a package, installed into an environment of its own.

    A build of torch's for CUDA, which runs on a CPU, too, is installed if `takes_cuda`.
    """
    row = Row(f"{name} {version}")
    wanted = f"{name}=={version}"
    try:
        if name == "torch" and not takes_cuda and _is_for_cuda(dependencies(wanted)):
            raise NotInstalled(
                f"of {wanted} the index of packages has a CUDA build only: --cuda-builds takes it"
            )
        python = str(make_environment(folder / f"{name}-{version}", [wanted]))
    except NotInstalled as failure:
        row.why.append(_short(str(failure)))
        return row
    row.torch = _torch_of(python)
    checked = _run([python, "-c", f"import {name}; print({name}.__version__)"])
    if checked.returncode:
        row.cells["check"] = "no"
        row.why.append(_short(checked.stderr.strip().splitlines()[-1]))
        return row
    row.cells["check"] = f"imports as {checked.stdout.splitlines()[-1]}"
    _fill(row, name, python, is_quick, [])
    return row


def _is_for_cuda(wanted: Sequence[str]) -> bool:
    return any(one.startswith(("nvidia-", "cuda-")) for one in wanted)


def _fill(row: Row, kind: str, python: str, is_quick: bool, given: Sequence[str]) -> None:
    """Run the tests of all columns at once, and write into the row what they have come to."""
    chosen = {c: part.quick if is_quick else part.tests for c, part in PARTS[kind].items()}
    every = [test for tests in chosen.values() for test in tests]
    cases, trouble = _tested(python, ["-m", _MARKED.get(kind, _FAST), *every, *given])
    for column, tests in chosen.items():
        own = [case for case in cases if any(_is_among(case, test) for test in tests)]
        row.cells[column], reasons = _counted(own)
        row.why += reasons
    row.why += [_short(trouble)] if trouble else []


def _tested(
    python: str, arguments: Sequence[str], seconds: float = _SECONDS
) -> tuple[list[ElementTree.Element], str]:
    """Run tests; return what is told of each, and why no one has run, where that is so."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
        try:
            done = _run([*command, f"--junitxml={report}", *arguments], seconds)
        except subprocess.TimeoutExpired:
            return [], f"the tests have not ended within {seconds} s"
        if not report.exists():
            return [], done.stderr or done.stdout
        cases = [*ElementTree.parse(report).iter("testcase")]
    ran = [case for case in cases if _of(case, "skipped") is None]
    return cases, "" if ran else f"no test has run: {done.stdout}"


def _is_among(case: ElementTree.Element, test: str) -> bool:
    """Whether it is of a file or a folder, or the test of that name, with any parameters."""
    file = case.get("classname", "").replace(".", "/") + ".py"
    names = f"{file}::{case.get('name')}", f"{file}::{case.get('name', '').partition('[')[0]}"
    return test in (file, *names) or file.startswith(f"{test}/")


def _counted(cases: Sequence[ElementTree.Element]) -> tuple[str, list[str]]:
    """Return how many tests passed, in words, and why others did not."""
    failed = [case for case in cases if _of(case, "failure", "error") is not None]
    skipped = [case for case in cases if _of(case, "skipped") is not None]
    ran = len(cases) - len(skipped)
    words = f"{ran - len(failed)} of {ran}" + (f", {len(skipped)} skipped" if skipped else "")
    return words, [_reason(case) for case in failed]


def _of(case: ElementTree.Element, *names: str) -> ElementTree.Element | None:
    return next((child for child in case if child.tag in names), None)


def _reason(case: ElementTree.Element) -> str:
    """Return a failed test's name, and the last error told of it that is not of a lost peer."""
    failure = _of(case, "failure", "error")
    assert failure is not None
    text = f"{failure.get('message', '')}\n{failure.text or ''}"
    errors = re.findall(r"^(?:E +|\[rank\d+\]: +)?((?:[\w.]+Error|Exception)\b: .+)$", text, re.M)
    own = [error for error in errors if not _LOST.search(error)]
    return _short(f"{case.get('name')}: {(own or errors or [failure.get('message', '')])[-1]}")


def release_of(tree: Path) -> str:
    """Return the version that a tree's megatron.core says."""
    text = (tree / "megatron/core/package_info.py").read_text()
    found = {
        name: value.strip("'\"")
        for name, value in re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = (\S+)$", text, re.M)
    }
    return f"core {found['MAJOR']}.{found['MINOR']}.{found['PATCH']}{found.get('PRE_RELEASE', '')}"


def day_of(folder: Path) -> str:
    """Return the day of a folder's commit, or of its newest Python file where git knows none."""
    asked = ["git", "-C", str(folder), "log", "-1", "--format=%cs"]
    if (folder / ".git").exists():
        return _run(asked).stdout.strip()
    newest = max(file.stat().st_mtime for file in folder.glob("**/*.py"))
    return str(date.fromtimestamp(newest))


def _torch_of(python: str) -> str:
    return _run([python, "-c", "import torch; print(torch.__version__)"]).stdout.strip()


def _short(text: str) -> str:
    """Return a reason on one line."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST else f"{line[: _MOST - 3]}..."


def _run(command: Sequence[str], seconds: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a command in the project's folder; TimeoutExpired where it does not end."""
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if Path(command[0]).parent.name == "bin":
        own["PATH"] = os.pathsep.join([str(Path(command[0]).parent), os.environ["PATH"]])
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, check=False,
        timeout=seconds,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
