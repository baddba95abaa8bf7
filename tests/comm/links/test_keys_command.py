"""`dsx keys`: what it prints, what it writes, and one line for every mistake."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dsx.comm.links import key_files
from dsx.comm.links.key_changes import make_key, revoke_keys
from dsx.comm.links.key_files import read_public, read_secret
from dsx.comm.links.key_lines import read_key
from dsx.comm.links.keys import Keys
from dsx.comm.links.keys_command import app

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")


def dsx(*words: str, status: int = 0, stdin: str | None = None) -> Result:
    done = RUNNER.invoke(app, list(words), input=stdin)
    assert done.exit_code == status, done.output
    return done


def refused(*words: str, stdin: str | None = None) -> str:
    """Return the one line that a mistake of the user ends with."""
    done = dsx(*words, status=2, stdin=stdin)
    (line,) = done.stderr.splitlines()
    assert done.stdout == ""
    return line


def test_new_makes_what_a_member_holds_and_prints_its_line_alone() -> None:
    before = os.umask(0)  # modes are not the umask's
    try:
        done = dsx("new", "site-a")
    finally:
        os.umask(before)
    key = read_key(done.stdout)
    assert done.stdout == key.line + "\n" == Path("keys/members/site-a.public").read_text()
    assert key.fingerprint in done.stderr and "keys/site-a.secret" in done.stderr
    modes = {p: stat.S_IMODE(Path("keys", p).stat().st_mode) for p in os.listdir("keys")}
    assert modes == {"site-a.secret": 0o600, "members": 0o755, ".gitignore": 0o644}
    assert stat.S_IMODE(Path("keys").stat().st_mode) == 0o700
    (secret,) = read_secret(Path("keys"), "site-a")
    assert secret.public == key and Keys.load("keys", "site-a").names() == ["site-a"]
    words = Path("keys/site-a.secret").read_text().split()
    assert [w for w in words[6:] if w.partition(":")[2] in done.output] == []


def test_secrets_are_none_of_gits() -> None:
    dsx("new", "site-a")
    subprocess.run(["git", "init", "--quiet", "."], check=True)
    subprocess.run(["git", "add", "keys"], check=True)
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == ["keys/.gitignore", "keys/members/site-a.public"]


def test_new_overwrites_nothing() -> None:
    dsx("new", "site-a")
    before = Path("keys/site-a.secret").read_bytes()
    assert "keys/site-a.secret is there, and is not overwritten; `dsx" in refused("new", "site-a")
    dsx("new", "site-a", "--next")
    assert "site-a has 2 keys, the most there can be: " in refused("new", "site-a", "--next")
    assert Path("keys/site-a.secret").read_bytes().startswith(before)
    dsx("new", "site-b", "--dir", "b")
    dsx("add", "b/members/site-b.public")
    for words in (["new", "site-b"], ["new", "site-b", "--next"]):
        assert "site-b" in refused(*words) and not Path("keys/site-b.secret").exists()


@pytest.mark.parametrize("name", ["", "-", ".", "a/b", "../a", "a b", "a" * 33, "caf\xe9", "a\n"])
def test_what_cannot_be_a_name(name: str) -> None:
    for words in (["new", "--", name], ["revoke", "--", name]):
        assert "cannot be a member's name: letters, digits" in refused(*words)
    assert not Path("keys").exists()


def test_a_line_is_taken_in_every_form() -> None:
    for name in "bcde":
        dsx("new", name, "--dir", name)
    line = {name: Path(name, f"members/{name}.public").read_text() for name in "bcde"}
    dsx("new", "a")
    assert "b  " in dsx("add", line["b"].strip()).stdout
    dsx("add", *line["c"].split())
    dsx("add", "d/members/d.public")
    dsx("add", "-", stdin=f"\n# from a mail\n{line['e']}")
    assert Keys.load("keys", "a").names() == list("abcde")
    for name in "bcde":
        assert Path("keys/members", f"{name}.public").read_text() == line[name]
    assert "is a member's key already" in dsx("add", "-", stdin=line["e"]).stdout


def test_add_refuses() -> None:
    for name in ("site-a", "site-b"):
        dsx("new", name, "--dir", name)
    line = Path("site-b/members/site-b.public").read_text().strip()
    dsx("new", "site-a")
    dsx("add", line)
    as_other = line.replace("site-b", "site-c")
    assert "of site-c is a key of site-b" in refused("add", as_other)
    own = Path("site-a/members/site-a.public").read_text().strip()
    assert "could speak as site-a; `dsx keys new site-a --next`" in refused("add", own)
    for i in range(2):
        dsx("new", "site-b", "--dir", f"more{i}")
    dsx("add", "more0/members/site-b.public")
    assert "site-b has 2 keys" in refused("add", "more1/members/site-b.public")
    dsx("revoke", "site-b")
    for spelling in (line, as_other):
        told = refused("add", spelling)
        assert "of site-b was revoked here on 2" in told and "never comes back" in told
    assert "neither a file nor a line" in refused("add", "nothing")
    assert "takes one public line" in refused("add", "nothing", "more")
    assert "stdin:2: it does not begin with dsx-key-1" in refused("add", "-", stdin="#\nx\n")
    assert "stdin holds no line" in refused("add", "-", stdin="")
    assert "3 fields" in refused("add", *line.split()[:4])
    assert Keys.load("keys", "site-a").names() == ["site-a"]


def test_half_of_a_file_of_lines_is_not_taken_on_its_own() -> None:
    """All of a file's lines are read before the first is added."""
    dsx("new", "site-a")
    dsx("new", "site-b", "--dir", "b")
    line = Path("b/members/site-b.public").read_text()
    assert "stdin:2" in refused("add", "-", stdin=f"{line}{line[:-20]}\n")
    assert Keys.load("keys", "site-a").names() == ["site-a"]


def test_list_shows_all_that_is_there() -> None:
    assert "keys is not there: `dsx keys new NAME`" in refused("list")
    dsx("new", "site-a")
    for name in ("site-b", "site-c"):
        dsx("new", name, "--dir", name)
        dsx("add", f"{name}/members/{name}.public")
    dsx("new", "site-a", "--next")
    dsx("revoke", "site-c")
    done = dsx("list")
    rows = [[w.strip() for w in r.split("\u2502")[1:-1]] for r in done.stdout.splitlines()]
    rows = [row for row in rows if row]
    first, second = (key.fingerprint for key in read_public(Path("keys/members/site-a.public")))
    assert [row[0] for row in rows] == ["site-a", "site-a", "site-b", "site-c"]
    assert [row[1] for row in rows[:2]] == [first, second]
    assert [row[3][:7] for row in rows] == ["secret ", "secret ", "", "revoked"]
    assert rows[0][3] == "secret here" and rows[1][3] == "secret here, the next one"
    assert all(row[2].endswith("today") for row in rows) and done.stderr == ""


def test_list_says_what_is_wrong() -> None:
    dsx("new", "site-a")
    dsx("new", "site-b", "--dir", "b")
    dsx("add", "b/members/site-b.public")
    Path("keys/site-a.secret").chmod(0o644)
    Path("keys/members/site-d.public").write_text("dsx-key-1 site-d\n")
    done = dsx("list", status=1)
    assert "site-a" in done.stdout and "site-b" in done.stdout
    assert ["site-d.public:1" in done.stderr, "mode 0644" in done.stderr] == [True, True]
    Path("keys/members/site-d.public").unlink()
    Path("keys/site-a.secret").chmod(0o640)
    assert "secret here, which its group can read" in dsx("list").stdout


def test_revoke() -> None:
    assert "keys is not there" in refused("revoke", "site-a") and not Path("keys").exists()
    dsx("new", "site-a")
    dsx("new", "site-a", "--next")
    first, second = read_public(Path("keys/members/site-a.public")) or ()
    assert "site-x has no key in keys; members: site-a" in refused("revoke", "site-x")
    for key in ("zzzz", first.fingerprint[:3], f"{first.fingerprint}a"):
        assert f"--key {key} is none of site-a's keys: " in refused(
            "revoke", "site-a", "--key", key
        )
    both = ["--older", "--key", first.fingerprint]
    assert "--older is for a member with 2 keys" in refused("revoke", "site-a", *both)
    done = dsx("revoke", "site-a", "--key", second.fingerprint.replace("-", "").upper()[:9])
    assert f"{second.fingerprint}  revoked" in done.stdout
    assert f"dsx keys revoke site-a --key {second.fingerprint}" in done.stdout
    assert Keys.load("keys", "site-a").fingerprint == first.fingerprint
    assert "--older is for a member with 2 keys" in refused("revoke", "site-a", "--older")
    assert "it is no member any more" in dsx("revoke", "site-a").stdout
    assert sorted(os.listdir("keys/members")) == [".lock", "revoked"]
    assert not Path("keys/site-a.secret").exists()
    dsx("new", "site-a")
    assert Keys.load("keys", "site-a").is_member


def test_revoke_keeps_what_people_have_written_beside_keys() -> None:
    dsx("new", "site-a")
    path = Path("keys/members/site-a.public")
    path.write_text(f"# Anna, room 4\n{path.read_text()}")
    dsx("new", "site-a", "--next")
    dsx("revoke", "site-a", "--older")
    note, line = path.read_text().splitlines()
    assert note == "# Anna, room 4" and read_key(line) == read_public(path)[0]


def test_revoke_says_what_it_could_not_erase() -> None:
    dsx("new", "site-a")
    Path("keys/site-a.secret").chmod(0o644)
    done = dsx("revoke", "site-a", status=1)
    assert "revoked" in done.stdout and "was not erased: keys/site-a.secret has mode" in done.stderr
    assert Path("keys/site-a.secret").exists()


def test_what_a_crash_leaves_is_mended() -> None:
    """Between the two files: the secret has a key that members/ does not have."""
    dsx("new", "site-a")
    path = Path("keys/members/site-a.public")
    text = path.read_text()
    dsx("new", "site-a", "--next")
    path.write_text(text)
    assert Keys.load("keys", "site-a").fingerprint == read_key(text).fingerprint
    made = read_key(dsx("new", "site-a", "--next").stdout)
    assert [s.public for s in read_secret(Path("keys"), "site-a")] == [read_key(text), made]


def test_commands_at_one_time_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"site-{i}" for i in range(12)]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: make_key(Path("keys"), name), names))
        assert Keys.load("keys", "site-0").names() == sorted(names)
        list(pool.map(lambda name: revoke_keys(Path("keys"), name), names))
    out = [line.split()[2] for line in Path("keys/members/revoked").read_text().splitlines()]
    assert sorted(out) == sorted(names), "each adds its line to the one file"
    monkeypatch.setattr(key_files, "_LOCK_SECONDS", 0.2)
    with open("keys/members/.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another dsx keys has been at work in keys" in refused("new", "late")


def test_a_mistake_ends_the_real_command_with_one_line() -> None:
    command = [sys.executable, "-m", "dsx", "keys", "add", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dsx keys add: 'nothing' is neither a file nor a line")
    assert len(done.stderr.splitlines()) == 1
