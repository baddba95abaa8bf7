"""Examples in README and docs run as printed: a page's blocks in order, in one folder."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dsx.cli import app
from dsx.config.schema import load_config
from tests.distributed import the_default_port
from tests.docs import commands
from tests.docs.pages import ROOT, Block, blocks, pages, prose, read
from tests.forked_commands import start_command

LEVELS = {"default": 0, "ci": 1, "slow": 2}
EXAMPLES = [block for page in pages() for block in blocks(page)]
OF_DEEPSPEED = {
    "optimizer",
    "checkpoint",
    "scheduler",
}  # keys of pieces of JSON that are DeepSpeed's own
NO_TESTBED = 77  # exit code of commands that need root, `ip` and `tc`
MINUTES = {"default": 4, "ci": 5, "slow": 20}
PLAIN = re.compile(r"\w+ [^$|&;<>*?{}()`\n]+")  # a command that asks nothing of a shell


def source_of(block: Block) -> list[str]:
    """Return what of a block runs: its commands, or the program as one."""
    if block.language == "sh":
        return block.commands
    is_program = block.language == "python" and block.title is None
    return [block.text] if is_program else []


def pages_at(level: str) -> list[str]:
    """Return the pages that have something to run at this level."""
    return sorted(
        {b.page for b in EXAMPLES for command in source_of(b) if commands.level(command) == level}
    )


class Reader:
    """Somebody who works through pages, in a folder that looks like a checkout."""

    def __init__(self, folder: Path, level: str) -> None:
        self.folder, self.level = folder, level
        self._seen: set[str] = set()
        for name in ["configs", "scripts", "megatron_patches", "docs", "README.md", "dsx"]:
            (folder / name).symlink_to(ROOT / name)
        for name in ["pyproject.toml", "LICENSE"]:
            (folder / name).symlink_to(ROOT / name)
        self._lend_environment()
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "COLUMNS": "140",
            "HF_HUB_OFFLINE": "1",
            "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        }

    def _lend_environment(self) -> None:
        """Let scripts/setup.sh find a `.venv` that is ready: the one the tests run in."""
        venv = self.folder / ".venv"
        venv.mkdir()
        for entry in Path(sys.prefix).iterdir():
            if entry.name not in ("ready", "built_for"):
                (venv / entry.name).symlink_to(entry)
        setup = (ROOT / "scripts" / "setup.sh").read_text().splitlines()
        told = next(line for line in setup if line.startswith("stamp="))
        words = ["bash", "-c", f'{told}; echo "$stamp"']
        stamp = subprocess.run(words, cwd=ROOT, capture_output=True, check=True).stdout
        (venv / "ready").write_bytes(stamp)
        (venv / "built_for").write_text("any\n")

    def read(self, page: str) -> None:
        """Run a page's blocks up to this level, once; before it the page that it follows."""
        if page in self._seen:
            return
        if page in commands.AFTER:
            self.read(commands.AFTER[page])
        printed = ""
        for block in blocks(page):
            if block.language == "text":
                if printed:
                    assert_printed(block, printed)
                printed = ""
            elif block.language == "python" and block.title:
                (self.folder / block.title).write_text(block.text)
            elif block.title == "three terminals":
                self._run_together(block)
            else:
                printed = self._run(block) or printed
        self._seen.add(page)

    def _run(self, block: Block) -> str:
        """Run a block's commands; return what the last one printed if it is always the same."""
        printed = ""
        for command in source_of(block):
            level = commands.level(command)
            if level is None or LEVELS[level] > LEVELS[self.level]:
                continue
            if self.level == "ci":
                command = commands.shortened(command)
            words = ["bash", "-c", command]
            if block.language == "python":
                words = [sys.executable, "-W", "error", "-c", command]
            is_launch = command.startswith(commands.LAUNCHES)
            with the_default_port() if is_launch else nullcontext():
                done = (
                    self._run_here(command)
                    or self._fork(command, 60 * MINUTES[level])
                    or subprocess.run(
                        words, cwd=self.folder, env=self.environment, capture_output=True,
                        text=True, timeout=60 * MINUTES[level],
                    )
                )  # fmt: skip
            said = f"{block.page}:{block.line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            if done.returncode == NO_TESTBED and commands.listed(command, commands.NEEDS_ROOT):
                pytest.skip(done.stderr)
            assert done.returncode == 0, said
            is_exact = block.language == "python" or commands.listed(command, commands.EXACT)
            printed = done.stdout if is_exact else ""
        return printed

    def _run_here(self, command: str) -> subprocess.CompletedProcess[str] | None:
        """Run what asks nothing of a shell in this process, by default: an interpreter less."""
        if self.level != "default" or not (command.startswith("dsx ") and PLAIN.fullmatch(command)):
            return None
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            words = shlex.split(command)
            done = CliRunner().invoke(app, words[1:], env=self.environment)
        finally:
            os.chdir(before)
        return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)

    def _fork(self, command: str, seconds: float) -> subprocess.CompletedProcess[str] | None:
        """Fork a launch that asks nothing of a shell, as its ranks: see forked_commands.py."""
        is_of_dsx_run = "dsx.run" in command  # which looks at what a script imports, and when
        if not PLAIN.fullmatch(command) or not command.startswith(commands.RANKS) or is_of_dsx_run:
            return None
        words, log = shlex.split(command), self.folder / "launch.log"
        log.write_bytes(b"")
        launcher = start_command(words, log, self.environment, folder=self.folder)
        try:
            status = launcher.wait(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(words, status, log.read_text(), "")

    def _run_together(self, block: Block) -> None:
        """Each command has a terminal of its own; the first one goes on until Ctrl-C."""
        if any(LEVELS[commands.level(c) or "slow"] > LEVELS[self.level] for c in block.commands):
            return
        running = [
            subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=self.folder,
                             env=self.environment)
            for command in block.commands
        ]  # fmt: skip
        try:
            assert [p.wait(timeout=60 * MINUTES["slow"]) for p in running[1:]] == [0, 0]
            running[0].send_signal(signal.SIGINT)
            assert running[0].wait(timeout=30) == 0
        finally:
            for process in running:
                process.kill()


def assert_printed(block: Block, printed: str) -> None:
    """Hold what a page says against what was printed; a line that ends in dots is cut there.

    `DSX_WRITE_DOCS=1` writes what differs.
    """
    try:
        require_printed(block, printed)
    except AssertionError:
        if not os.environ.get("DSX_WRITE_DOCS"):
            raise
        write_printed(block, printed)


def require_printed(block: Block, printed: str) -> None:
    """Raise AssertionError where a page says something else than was printed."""
    expected = [line.rstrip() for line in block.text.splitlines() if line.strip()]
    lines = [line.rstrip() for line in printed.splitlines() if line.strip()]
    where = f"{block.page}:{block.line} prints something else"
    assert len(lines) == len(expected), f"{where}\n{printed}"
    for line, wanted in zip(lines, expected, strict=True):
        if wanted.endswith(" ..."):
            line, wanted = line[: len(wanted) - 4], wanted[:-4]
        if "loss " in wanted:  # of a training: its digits differ from one processor to the next
            decimals = re.compile(r"\d+\.\d+")
            assert decimals.sub("", line) == decimals.sub("", wanted), f"{where}\n{printed}"
            pairs = zip(decimals.findall(line), decimals.findall(wanted), strict=True)
            assert all(abs(float(a) - float(b)) < 0.02 for a, b in pairs), f"{where}\n{printed}"
        else:
            assert line == wanted, f"{where}\n{printed}"


def write_printed(block: Block, printed: str) -> None:
    """Write what was printed into the page; lines that were cut at dots are cut there again."""
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    cuts = [line[:-4] for line in block.text.splitlines() if line.endswith(" ...")]
    for index, line in enumerate(lines):
        cut = next((cut for cut in cuts if line.startswith(cut)), None)
        lines[index] = line if cut is None else f"{cut} ..."
    title = f' title="{block.title}"' if block.title else ""
    head = f"```{block.language}{title}\n"
    new = head + "".join(f"{line}\n" for line in lines) + "```\n"
    text = read(block.page).replace(f"{head}{block.text}```\n", new, 1)  # those before are done
    (ROOT / block.page).write_text(text)


@pytest.fixture(scope="module")
def ci_reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(tmp_path_factory.mktemp("checkout"), "ci")


@pytest.fixture(scope="module")
def slow_reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(tmp_path_factory.mktemp("checkout"), "slow")


@pytest.mark.parametrize("page", pages_at("default"))
def test_examples(page: str, tmp_path: Path) -> None:
    Reader(tmp_path, "default").read(page)


@pytest.mark.ci
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", sorted({*pages_at("default"), *pages_at("ci")}))
def test_longer_examples(page: str, ci_reader: Reader) -> None:
    """In one folder: what a page has built, the next one finds. All by a shell."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("megatron.core")
    require_packages(page)
    ci_reader.read(page)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", pages_at("slow"))
def test_whole_trainings(page: str, slow_reader: Reader) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("megatron.core")
    require_packages(page)
    slow_reader.read(page)


@pytest.mark.parametrize("page", pages())
def test_every_block_is_of_a_kind_that_is_checked(page: str) -> None:
    assert {block.language for block in blocks(page)} <= {"sh", "python", "json", "text", "toml"}
    assert read(page).count("```") == 2 * len(blocks(page))
    text = re.sub(r"^::: .*\n(?:    .*\n)+", "", prose(page), flags=re.M)  # options of mkdocstrings
    assert not re.findall(r"^    .*", text, re.M), "an indented block would not be run"


@pytest.mark.parametrize(
    "names",
    [
        commands.CI, commands.SHORTER, commands.SLOW, commands.NOT_HERE, commands.EXACT,
        commands.NEEDS_ROOT,
    ],
)  # fmt: skip
def test_the_lists_name_nothing_that_is_gone(names: Any) -> None:
    there = [command for block in EXAMPLES for command in source_of(block)]
    assert [name for name in names if not any(c.startswith(name) for c in there)] == []


def test_dsx_commands_have_the_options_they_are_given() -> None:
    """Also those that are too long to run here."""
    root = typer.main.get_command(app)
    found = 0
    for block in EXAMPLES:
        for line in block.commands if block.language == "sh" else []:
            for part in re.split(r" -- ", re.sub(r"^\w+=\S+ ", "", line)):
                words = shlex.split(re.sub(r"\{clusters?\}", "1", part))
                if words[0] != "dsx":
                    continue
                command, arguments = root, words[1:]
                while hasattr(command, "commands"):
                    command, arguments = command.commands[arguments[0]], arguments[1:]
                command.make_context(words[-1], arguments)  # raises what the shell would show
                found += 1
    assert found > 20


def require_packages(page: str) -> None:
    """Skip a page whose commands need what is not installed."""
    for package in commands.PACKAGES.get(page, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{page} needs {package}")


def find(value: Any, key: str) -> Any:
    """Return what a document holds under a key, at any depth."""
    if isinstance(value, dict):
        below = [find(v, key) for v in value.values()]
        return value[key] if key in value else next((b for b in below if b is not None), None)
    return None


@pytest.mark.parametrize(
    "block",
    [b for b in EXAMPLES if b.language == "json"],
    ids=lambda b: f"{b.page}:{b.line}",
)
def test_pieces_of_json_are_valid(block: Block, tmp_path: Path) -> None:
    """A piece is a key and its value; with a file in the title it stands in that file."""
    piece = json.loads("{" + block.text + "}")
    ((key, value),) = piece.items()
    if block.title:
        assert find(json.loads(read(block.title)), key) == value
    if key == "dsx":
        load_config(piece)
    elif key not in OF_DEEPSPEED:
        load_config({"dsx": {"preset": "diloco", "clusters": {"num_clusters": 2}, **piece}})


def test_reasons_name_tests_that_are_there() -> None:
    named = [path for why in commands.NOT_HERE.values() for path in re.findall(r"tests/\S+", why)]
    assert named and [path for path in named if not (ROOT / path).exists()] == []
