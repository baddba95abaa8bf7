"""What a cluster lacks comes from a remote place, whole or not at all, and within a deadline."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from dsx.checkpoint.checksums import MANIFEST, sealed
from dsx.checkpoint.remote import Remote
from dsx.engines.fetching import Fetching, _name
from dsx.engines.resume_point import choose
from tests.checkpoint.test_tags import write
from tests.installed import needs

pytestmark = needs("fsspec")


class Stalls(MemoryFileSystem):
    """Files named `content` of one tag send nothing, and no error, until they are let go."""

    protocol = "stalls"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    tag = "step20"
    goes_on = threading.Event()

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        if mode == "rb" and path.endswith(f"{Stalls.tag}/content"):
            assert Stalls.goes_on.wait(60)
        return super()._open(path, mode, *args, **options)


@pytest.fixture
def remote() -> Generator[Remote]:
    fsspec.register_implementation("stalls", Stalls, clobber=True)
    Stalls.store, Stalls.pseudo_dirs = {}, [""]
    Stalls.goes_on = threading.Event()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Remote("stalls://run", "here")
    dist.destroy_process_group()
    Stalls.goes_on.set()


def of_one_rank(deadline_seconds: float) -> Any:
    return SimpleNamespace(
        rank=0, world_size=1, cluster_id=0, deadline_seconds=deadline_seconds
    )  # fmt: skip


def chosen(base: Path, remote: Remote, wanted: str | None = None) -> tuple[int, str]:
    return choose(lambda told: [told], of_one_rank(0.2), base, wanted, remote=remote)


def copied(remote: Remote, near: Path, *steps: int) -> None:
    for step in steps:
        write(near, 0, step, num_clusters=1)
        remote.copy(near / "cluster_0" / f"step{step}")


def test_one_that_stalls_is_passed_over_and_told(
    remote: Remote, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dsx")
    copied(remote, tmp_path / "near", 10, 20)
    assert chosen(tmp_path / "far", remote) == (0, "step10")
    why = "nothing came for 0.2 s from stalls://run/cluster_0/step20 (checkpoints.remote"
    assert why in caplog.text and "none that is newer (step20: cluster 0: nothing" in caplog.text
    with pytest.raises(ValueError, match="nothing came for 0.2 s"):
        chosen(tmp_path / "far", remote, "step20")
    late = [thread for thread in threading.enumerate() if thread.name == "dsx-fetch"]
    assert len(late) == 2
    Stalls.goes_on.set()
    for thread in late:
        thread.join(20)
    names = {path.name for path in (tmp_path / "far").rglob(MANIFEST)}
    assert names == {MANIFEST} and not (tmp_path / "far" / "cluster_0" / "step20").exists()


def test_one_of_dsx_02_is_passed_over_and_never_named(remote: Remote, tmp_path: Path) -> None:
    copied(remote, tmp_path / "near", 10)
    told = {**remote.tags(0)["step10"], "step": 99}
    folder = f"{remote._root}/cluster_0/old"
    remote._files.pipe_file(f"{folder}/{MANIFEST}", json.dumps(sealed(told)).encode())
    remote._files.pipe_file(f"{folder}/dsx_rank_0.safetensors", b"its outer state")
    assert chosen(tmp_path / "far", remote) == (0, "step10")
    assert [path.name for path in (tmp_path / "far" / "cluster_0").iterdir()] == ["step10"]
    with pytest.raises(ValueError, match="does not say which files it has"):
        chosen(tmp_path / "far", remote, "old")


@pytest.mark.parametrize("name", ["..", "../cluster_1", "a/b", ""])
def test_nothing_beside_its_directory_is_touched(name: str, remote: Remote, tmp_path: Path) -> None:
    for cluster in range(2):
        write(tmp_path, cluster, 10)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="is no checkpoint's name"):
        Fetching(remote, of_one_rank(1.0), tmp_path).begin(0, name)
    unfinished = tmp_path / "cluster_0" / "come.unfinished"
    unfinished.mkdir()
    with pytest.raises(ValueError, match="does not lie in"):
        _name(unfinished, tmp_path / "cluster_0" / name)
    unfinished.rmdir()
    assert sorted(tmp_path.rglob("*")) == before
