"""The `dsx` command itself: what it imports, its help, its version, and old spellings."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import dsx
from dsx.cli import app
from dsx.core.one_line_errors import one_line_errors

NAMES = [
    "bench", "config", "data", "doctor", "export", "memory", "net-test", "plan", "quickstart",
    "rendezvous", "report", "simulate", "support", "trace",
]  # fmt: skip


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dsx", *arguments],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_every_command_is_in_the_help_with_one_line() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    rows = [line.strip("│| \n").split() for line in shown.stdout.splitlines()]
    for name in NAMES:
        (row,) = [words for words in rows if words and words[0] == name]
        assert row[-1].endswith("."), f"{name}: more than one line"


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


@pytest.mark.parametrize("path", [*commands(typer.main.get_command(app))], ids=" ".join)
def test_help_is_whole_on_80_columns(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\u2026" not in shown.stdout, "something is cut off"
    assert not re.search(r"\{[a-z]", lines[1]), "a name of the source, no word"


def test_the_help_loads_nothing_that_takes_long() -> None:
    loaded = "import sys, dsx.cli; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_python_m_dsx_shows_the_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"dsx {dsx.__version__}\n")


def test_completion_in_a_shell() -> None:
    done = run(_DSX_COMPLETE="complete_bash", COMP_WORDS="dsx re", COMP_CWORD="1")
    assert done.stdout.split() == ["rendezvous", "relay", "report"], done.stderr
    assert "--install-completion" in run("--help").stdout


def test_a_mistake_ends_with_one_line_and_status_2() -> None:
    tried = typer.Typer()

    @tried.command()
    @one_line_errors("tried", KeyError, RuntimeError)
    def command(kind: str) -> None:
        if kind == "exit":
            raise typer.Exit(7)
        kinds = {"value": ValueError, "file": PermissionError, "key": KeyError, "other": TypeError}
        raise kinds[kind](kind)

    for kind, said in (
        ("value", "dsx tried: value\n"),
        ("file", "dsx tried: file\n"),
        ("key", "dsx tried: 'key'\n"),
    ):
        done = CliRunner().invoke(tried, [kind])
        assert (done.exit_code, done.stderr) == (2, said)
    assert CliRunner().invoke(tried, ["exit"]).exit_code == 7
    assert isinstance(CliRunner().invoke(tried, ["other"]).exception, TypeError)


def test_who_has_read_enough_of_a_command_ends_it_without_a_word() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "dsx", "config", "schema"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_where_nobody_can_listen_the_rendezvous_ends_as_any_mistake_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "192.0.2.1", "no.such.host.invalid", "a..b"):
            done = CliRunner().invoke(app, ["rendezvous", "--host", host, "--port", str(port)])
            assert done.exit_code == 2 and done.stderr.count("\n") == 1
            assert done.stderr.startswith(f"dsx rendezvous: cannot listen on {host}:{port}: ")
    assert CliRunner().invoke(app, ["rendezvous", "--port", "65536"]).exit_code == 2


def test_an_old_spelling_works_and_names_the_new_one() -> None:
    with pytest.warns(FutureWarning, match="dsx bench link is now dsx bench line"):
        done = CliRunner().invoke(app, ["bench", "link", "--clusters", "9"])
    assert done.exit_code == 2 and done.stderr.startswith("dsx bench line: clusters=9")
    with pytest.warns(FutureWarning, match="dsx bench launch is now dsx bench overhead"):
        done = CliRunner().invoke(app, ["bench", "launch", "--numel", "none"])
    assert done.exit_code == 2 and done.stderr.startswith("dsx bench overhead: --numel=none")
    listed = CliRunner().invoke(app, ["bench", "--help"]).stdout
    assert " link " not in listed and " launch " not in listed
