"""Keys that come, change and go while a run has them in its hands."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from zmq.utils import z85

from dsx.comm.links import members
from dsx.comm.links.key_changes import add_key, make_key, revoke_keys
from dsx.comm.links.key_files import write_whole
from dsx.comm.links.keys import Keys
from dsx.comm.links.members import WatchedFile
from tests.comm.links.folders import own_key, sites
from tests.levels import by_default


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return sites(tmp_path, "site-a", "site-b")


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """What `reload` has warned of."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("dsx.comm.links.keys")
    logger.addHandler(handler)
    yield told
    logger.removeHandler(handler)


def test_a_member_is_added_changes_its_key_and_is_revoked(
    folders: dict[str, Path], tmp_path: Path, warned: list[str]
) -> None:
    a = Keys.load(folders["site-a"], "site-a")
    assert a.reload() == set()
    c = make_key(tmp_path / "c", "site-c")[-1]
    add_key(folders["site-a"], c)
    assert a.member_of(c.curve) is None, "not before it looks"
    assert a.reload() == {"site-c"} and a.member_of(c.curve) == "site-c"
    assert a.names() == ["site-a", "site-b", "site-c"] and a.reload() == set()
    second = own_key(tmp_path / "c", "site-c")
    add_key(folders["site-a"], second)
    assert a.reload() == {"site-c"}
    assert a.curve_keys_of("site-c") == [z85.encode(c.curve), z85.encode(second.curve)]
    revoke_keys(folders["site-a"], "site-c", is_older=True)
    assert a.reload() == {"site-c"} and a.member_of(c.curve) is None
    assert a.member_of(second.curve) == "site-c"
    revoke_keys(folders["site-a"], "site-c")
    assert a.reload() == {"site-c"} and a.member_of(second.curve) is None
    assert a.names() == ["site-a", "site-b"] and a.is_member and warned == []


def test_an_own_key_changes_without_a_stop(folders: dict[str, Path], warned: list[str]) -> None:
    a, b = (Keys.load(folders[name], name) for name in folders)
    first = a.curve_public
    second = own_key(folders["site-a"], "site-a")
    assert a.reload() == {"site-a"} and a.curve_public == first, "the others do not know it yet"
    add_key(folders["site-b"], second)
    assert b.reload() == {"site-a"} and b.verify("site-a", b"x", a.sign(b"x"))
    revoke_keys(folders["site-a"], "site-a", is_older=True)
    assert a.reload() == {"site-a"} and z85.decode(a.curve_public) == second.curve
    assert a.is_member and b.verify("site-a", b"x", a.sign(b"x"))
    revoke_keys(folders["site-b"], "site-a", is_older=True)
    assert b.reload() == {"site-a"} and b.curve_keys_of("site-a") == [a.curve_public]
    assert b.member_of(z85.decode(first)) is None and warned == []


def test_who_is_revoked_itself_is_told(folders: dict[str, Path]) -> None:
    a = Keys.load(folders["site-a"], "site-a")
    shown = repr(a)
    revoke_keys(folders["site-a"], "site-a")
    assert a.reload() == {"site-a"} and not a.is_member and a.names() == ["site-b"]
    assert repr(a) == shown and not (folders["site-a"] / "site-a.secret").exists()


def test_a_revoked_key_stays_out_whoever_brings_its_file_back(folders: dict[str, Path]) -> None:
    """Files may be copied from elsewhere: what counts is `revoked`."""
    a, path = Keys.load(folders["site-a"], "site-a"), folders["site-a"] / "members/site-b.public"
    text = path.read_text()
    revoke_keys(folders["site-a"], "site-b")
    assert a.reload() == {"site-b"}
    write_whole(path, text, 0o644)
    assert a.reload() == set() and a.names() == ["site-a"]
    write_whole(path.with_name("site-c.public"), text.replace("site-b", "site-c"), 0o644)
    assert a.reload() == set() and a.names() == ["site-a"]


def test_what_is_half_written_is_not_taken_and_told_once(
    folders: dict[str, Path], tmp_path: Path, warned: list[str]
) -> None:
    a, folder = Keys.load(folders["site-a"], "site-a"), folders["site-a"] / "members"
    b = a.curve_keys_of("site-b")
    line = make_key(tmp_path / "c", "site-c")[-1].line + "\n"
    for cut in range(0, len(line), 7):  # in place, as `cp` and `scp` write
        (folder / "site-c.public").write_text(line[:cut])
        (folder / "site-b.public").write_text(line[:cut])
        assert a.reload() == set() and a.curve_keys_of("site-b") == b
    assert sorted({m.partition(": ")[0].split("/")[-1] for m in warned}) == [
        "site-b.public does not end with a line's end",
        "site-c.public does not end with a line's end",
    ]
    assert len(warned) == 2 and all("stay in force" in message for message in warned)
    (folder / "site-c.public").write_text(line)
    assert a.reload() == {"site-c"}


def test_a_revocation_stays_whatever_becomes_of_its_file(
    folders: dict[str, Path], warned: list[str]
) -> None:
    folder = folders["site-a"]
    text = (folder / "members/site-b.public").read_text()
    revoke_keys(folder, "site-b")
    write_whole(folder / "members/site-b.public", text, 0o644)
    a = Keys.load(folder, "site-a")
    (folder / "members/revoked").write_text("half a line")
    assert a.reload() == set() and a.names() == ["site-a"] and "revoked does not end" in warned[0]
    (folder / "members").rename(folder / "away")
    assert a.reload() == set() and a.names() == ["site-a"] and len(warned) == 2


@pytest.mark.parametrize("broken", ["members", "site-b.public", "revoked", "odd name.public"])
def test_a_revocation_counts_whatever_else_is_wrong(
    folders: dict[str, Path], tmp_path: Path, broken: str, warned: list[str]
) -> None:
    folder = folders["site-a"]
    c = make_key(tmp_path / "c", "site-c")[-1]
    add_key(folder, c)
    a = Keys.load(folder, "site-a")
    revoke_keys(folder, "site-c")
    if broken == "members":
        (folder / "members").chmod(0o777)
    else:
        with (folder / "members" / broken).open("a") as file:
            file.write("# a remark\n" if broken == "revoked" else "half a line")
    changed = a.reload()
    assert changed == {"site-c"} and a.member_of(c.curve) is None
    assert a.names() == ["site-a", "site-b"] and len(warned) == (broken != "revoked")


def test_a_key_that_two_claim_stays_with_who_had_it(
    folders: dict[str, Path], warned: list[str]
) -> None:
    folder = folders["site-a"] / "members"
    a = Keys.load(folders["site-a"], "site-a")
    key = z85.decode(a.curve_keys_of("site-b")[0])
    line = (folder / "site-b.public").read_text().replace("site-b", "another")  # sorts before it
    write_whole(folder / "another.public", line, 0o644)
    assert a.reload() == set() and a.member_of(key) == "site-b" and len(warned) == 1
    assert a.reload() == set() and len(warned) == 1 and "shares what belongs to site-b" in warned[0]
    revoke_keys(folders["site-a"], "site-b")
    assert a.reload() == {"site-b"} and a.member_of(key) is None


def test_a_secret_that_becomes_readable_is_told_and_kept(
    folders: dict[str, Path], warned: list[str]
) -> None:
    a = Keys.load(folders["site-a"], "site-a")
    (folders["site-a"] / "site-a.secret").chmod(0o644)
    assert a.reload() == set() and a.is_member
    assert len(warned) == 1 and "mode 0644" in warned[0]


def test_a_folder_that_goes_away_shuts_nobody_out(
    folders: dict[str, Path], warned: list[str]
) -> None:
    """As a file server does that is started anew; a file that goes is a member that goes."""
    a, folder = Keys.load(folders["site-a"], "site-a"), folders["site-a"] / "members"
    folder.rename(folder.with_name("away"))
    assert a.reload() == set() and a.names() == ["site-a", "site-b"]
    assert "No such file or directory" in warned[0]
    folder.with_name("away").rename(folder)
    (folder / "site-b.public").unlink()
    assert a.reload() == {"site-b"} and a.names() == ["site-a"]


WRITER = """
import itertools
import sys
from pathlib import Path
from dsx.comm.links.key_changes import add_key, make_key, revoke_keys
folder, elsewhere = Path(sys.argv[1]), Path(sys.argv[2])
for i in itertools.count():
    if i >= int(sys.argv[3]) and (elsewhere / "seen").exists():
        break
    first = make_key(elsewhere / str(i), "site-c")[-1]
    add_key(folder, first)
    add_key(folder, make_key(elsewhere / str(i), "site-c", is_next=True)[-1])
    revoke_keys(folder, "site-c", is_older=True)
    revoke_keys(folder, "site-c")
"""


@pytest.mark.parametrize("rounds", by_default([10, 200], 10))
def test_while_another_process_writes_every_look_is_whole(
    folders: dict[str, Path], tmp_path: Path, warned: list[str], rounds: int
) -> None:
    """And while threads ask: site-b is never out, and what a name has is told alike."""
    a = Keys.load(folders["site-a"], "site-a")
    b = a.curve_keys_of("site-b")
    wrong: list[str] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            for key in a.curve_keys_of("site-c"):
                if a.member_of(z85.decode(key)) not in ("site-c", None):
                    wrong.append("of another")
            if a.curve_keys_of("site-b") != b or a.member_of(z85.decode(b[0])) != "site-b":
                wrong.append("site-b is out")

    asking = threading.Thread(target=ask)
    asking.start()
    seen: set[int] = set()
    changes = 0
    arguments = [str(folders["site-a"]), str(tmp_path / "c"), str(rounds)]
    writer = subprocess.Popen([sys.executable, "-c", WRITER, *arguments])
    try:
        until = time.monotonic() + 120
        while writer.poll() is None and time.monotonic() < until:
            changed = a.reload()
            assert changed <= {"site-c"}
            if changed and not changes:
                (tmp_path / "c/seen").touch()
            changes += bool(changed)
            seen.add(len(a.curve_keys_of("site-c")))
    finally:
        is_over.set()
        asking.join(timeout=30)
        writer.kill()
        assert writer.wait(timeout=30) == 0
    a.reload()
    assert wrong == [] and warned == [] and changes > 0
    assert seen == {0, 1, 2} if rounds > 100 else seen <= {0, 1, 2}
    assert a.names() == ["site-a", "site-b"]
    made = sum(each.is_dir() for each in (tmp_path / "c").iterdir())
    assert made >= rounds
    assert len((folders["site-a"] / "members/revoked").read_text().splitlines()) == 2 * made


def test_a_file_is_read_again_only_when_it_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reads = tmp_path / "file", []
    watched = WatchedFile(path, lambda: reads.append(1))
    assert watched.look() and not path.exists()
    assert len(reads) == 1
    path.write_text("a")
    assert [watched.look(), watched.look()] == [True, True], "young: it may change again unseen"
    monkeypatch.setattr(members, "_YOUNG_SECONDS", -60.0)
    assert [watched.look(), watched.look(), watched.look()] == [True, False, False]
    before = path.stat()
    write_whole(path, "b", 0o644)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [watched.look(), watched.look()] == [True, False]
    path.chmod(0o600)
    assert [watched.look(), watched.look()] == [True, False]
    path.unlink()
    assert [watched.look(), watched.look()] == [True, False]


def test_what_cannot_be_read_is_tried_again(tmp_path: Path) -> None:
    outcomes = iter([ValueError("a file server that is away"), None])

    def read() -> str:
        if (wrong := next(outcomes)) is not None:
            raise wrong
        return "content"

    watched = WatchedFile(tmp_path / "none", read)
    assert watched.look() and watched.problem and watched.value is None
    assert watched.look() and not watched.problem and watched.value == "content"
    assert not watched.look()
