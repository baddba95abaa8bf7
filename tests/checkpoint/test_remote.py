"""Checkpoints at a remote place: complete there or not there, as they are on the disk."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from dsx.checkpoint.checksums import DAMAGED, MANIFEST, find_damage, sealed
from dsx.checkpoint.diverged import mark_diverged
from dsx.checkpoint.remote import Changed, Remote, names_in
from dsx.checkpoint.tags import complete_tags
from dsx.config.checkpoints import check_url
from tests.checkpoint.test_tags import write
from tests.installed import needs

pytestmark = needs("fsspec")


@pytest.fixture(params=["memory", "file"])
def remote(request: Any, tmp_path: Path) -> Generator[Remote]:
    url = "memory://bucket/run" if request.param == "memory" else f"file://{tmp_path}/far/run"
    yield Remote(url, "here")
    if request.param == "memory":
        with suppress(FileNotFoundError):
            fsspec.filesystem("memory").rm("/bucket", recursive=True)


def tag_of(base: Path, cluster: int = 0, step: int = 10, **told: Any) -> Path:
    write(base, cluster, step, **told)
    return base / f"cluster_{cluster}" / f"step{step}"


def fetched(remote: Remote, cluster: int, tag: str, to: Path) -> Path:
    manifest = remote.manifest(cluster, tag)
    remote.fetch(cluster, tag, list(names_in(manifest, tag)), to, lambda num_bytes: None)
    (to / MANIFEST).write_bytes(manifest)
    return to


def test_a_tag_comes_back_as_it_was(remote: Remote, tmp_path: Path) -> None:
    tag, counted = tag_of(tmp_path), list[int]()
    (tag.parent / "other").mkdir()
    assert remote.tags(0) == {} and remote.clusters() == set()
    copied = remote.copy(tag, counted.append)
    assert copied == sum(path.stat().st_size for path in tag.iterdir())
    assert sum(counted) == (tag / "content").stat().st_size
    assert remote.tags(0) == complete_tags(tag.parent) and remote.clusters() == {0}
    back = fetched(remote, 0, "step10", tmp_path / "back")
    assert (back / "content").read_text() == (tag / "content").read_text()
    assert find_damage(back) is None
    assert remote.copy(tag, counted.append) == 0 and len(counted) == 1  # it is there
    remote.remove(0, "step10")
    assert remote.tags(0) == {}
    with pytest.raises(FileNotFoundError, match="step10 is not complete"):
        remote.manifest(0, "step10")


def test_what_ends_half_way_is_not_there_and_is_copied_anew(remote: Remote, tmp_path: Path) -> None:
    tag = tag_of(tmp_path)
    (tag / "a.bin").write_bytes(b"a" * 3_000_000)
    told: list[int] = []

    def fails(num_bytes: int) -> None:
        told.append(num_bytes)
        if len(told) == 3:
            raise ConnectionError("the line is cut")

    with pytest.raises(ConnectionError):
        remote.copy(tag, fails)
    assert remote.tags(0) == {}
    remote.copy(tag)
    assert list(remote.tags(0)) == ["step10"]


def test_what_is_written_again_leaves_what_was_there_complete(
    remote: Remote, tmp_path: Path
) -> None:
    remote.copy(tag_of(tmp_path, session="a"))
    tag = tag_of(tmp_path, session="b")

    def stop(num_bytes: int) -> None:
        raise ConnectionError("killed")

    with pytest.raises(ConnectionError):
        remote.copy(tag, stop)
    assert {name: told["session"] for name, told in remote.tags(0).items()} == {
        "step10.replaced": "a"
    }
    remote.copy(tag)
    assert {name: told["session"] for name, told in remote.tags(0).items()} == {
        "step10": "b", "step10.replaced": "a",
    }  # fmt: skip
    back = fetched(remote, 0, "step10.replaced", tmp_path / "back")
    assert (back / "content").read_text() == "0 10 a" and find_damage(back) is None


def test_a_mark_goes_there_alone(remote: Remote, tmp_path: Path) -> None:
    tag = tag_of(tmp_path)
    assert not remote.renew(tag)
    remote.copy(tag)
    assert mark_diverged(tag.parent, 5, "a") == ["step10"]
    assert remote.renew(tag)
    assert remote.tags(0)["step10"]["trouble"] == "diverged since step 5"


@pytest.mark.parametrize("what", ["gone", "marked", "deleted before"])
def test_what_changes_meanwhile_is_not_complete(what: str, remote: Remote, tmp_path: Path) -> None:
    tag = tag_of(tmp_path)

    def change(num_bytes: int) -> None:
        if what == "marked":
            mark_diverged(tag.parent, 5, "a")
        else:
            tag.rename(tag.parent / "step10.removed")

    if what == "deleted before":
        change(0)
    with pytest.raises(Changed):
        remote.copy(tag, change)
    assert remote.tags(0) == {}


def test_nothing_outside_of_the_folder_is_written(tmp_path: Path) -> None:
    for name in ("../x", "/etc/x", "a/../../x", "a\\..\\x"):
        manifest = json.dumps(sealed({"step": 1, "checksums": {name: "0"}}))
        with pytest.raises(ValueError, match="no file of a checkpoint's folder"):
            names_in(manifest.encode(), "there")
    with pytest.raises(ValueError, match="its checksum is another"):
        names_in(b'{"checksums": {"a": "0"}}', "there")


def test_a_damaged_manifest_is_named(remote: Remote, tmp_path: Path) -> None:
    tag = tag_of(tmp_path)
    remote.copy(tag)
    remote._files.pipe_file(f"{remote._root}/cluster_0/step10/{MANIFEST}", b"{")
    assert DAMAGED in remote.tags(0)["step10"]


@pytest.mark.parametrize("name", ["..", "a\\..\\b"])
def test_a_name_that_is_none_is_passed_over_and_told_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An object store's keys may hold what a directory's entries cannot."""
    files = fsspec.filesystem("memory")
    for folder in (name, "step10"):
        path = f"/names/cluster_0/{folder}/{MANIFEST}"
        files.store[path] = MemoryFile(files, path, json.dumps(sealed({"step": 10})).encode())
    try:
        remote = Remote("memory://names", "here")
        assert list(remote.tags(0)) == list(remote.tags(0)) == ["step10"]
    finally:
        for path in [one for one in files.store if one.startswith("/names/")]:
            del files.store[path]
    assert caplog.text.count("is passed over: that is no checkpoint's name") == 1


def test_what_names_no_files_is_not_taken_for_a_whole_one() -> None:
    """As dsx 0.2 saved it."""
    for told in ({"step": 1}, {"step": 1, "checksums": {}, "sizes": {}}):
        with pytest.raises(ValueError, match="does not say which files it has.*by hand"):
            names_in(json.dumps(sealed(told)).encode(), "there")


class Away(MemoryFileSystem):
    """Connects as it is opened, as sftp does; nobody is there at first."""

    protocol = "away"
    cachable = False
    is_there = False

    def __init__(self, *args: Any, **options: Any) -> None:
        if not Away.is_there:
            raise ConnectionRefusedError(111, "Connection refused")
        super().__init__(*args, **options)


def test_a_place_that_is_away_as_a_run_starts_is_tried_again(tmp_path: Path) -> None:
    fsspec.register_implementation("away", Away, clobber=True)
    Away.is_there = False
    remote = Remote("away://run", "here")
    for use in (remote.clusters, lambda: remote.copy(tag_of(tmp_path))):
        with pytest.raises(ConnectionRefusedError):
            use()
    Away.is_there = True
    assert remote.tags(0) == {}


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("bucket/run", "must be a URL that fsspec knows"),
        ("ftp:/me:secret@host/run", "must be a URL that fsspec knows"),
        ("no-such-thing://x", "no-such-thing"),
        ("ftp://me:secret@host/run", "has a password in it"),
        ("ftp://me:se/cret@host/secret", "has a password in it"),
        ("ftp://me:se[cret@host/secret", "has a password in it"),
        ("ftp://me:se::cret@host/secret", "has a password in it"),
        ("simplecache::ftp://me:secret@host/run", "has a password in it"),
        ("file:///x::sftp://me:secret@host/run", "has a password in it"),
        ("az://run?sig=secret", "has a password in it"),
        ("az://run#secret", "has a password in it"),
        ("GitHub://secret@me/run", "has a password in it"),
    ],
)
def test_a_place_that_cannot_be_is_refused(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        Remote(url, "dsx.checkpoints.remote")
    assert "dsx.checkpoints.remote" in str(raised.value) and "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "file:///mnt/a:b@c", "sftp://me@host:22/run", "sftp://me@[::1]:22/run",
        "simplecache::s3://bucket/run", "abfss://run@account.dfs.core.windows.net/a",
    ],
)  # fmt: skip
def test_a_user_or_a_chain_is_no_password(url: str) -> None:
    check_url(url, "here")
