"""Runs that copy their checkpoints to a server of S3's protocol, and go on from there alone.

The server is a process of its own, and each run's ranks reach it over HTTP by s3fs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import fsspec
import pytest

from tests.distributed import free_port
from tests.installed import needs
from tests.run.saving_clients import (
    ATTACHED,
    KINDS,
    common_steps,
    kill_in_a_save,
    models,
    require_whole,
    train,
    write_configs,
)

pytestmark = [needs("moto", "s3fs", "flask"), pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    port = free_port()
    given = {
        "ENDPOINT_URL": f"http://127.0.0.1:{port}", "ACCESS_KEY_ID": "any",
        "SECRET_ACCESS_KEY": "any", "DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        make_bucket("runs")
        yield "s3://runs/one"
    finally:
        server.kill()
        server.wait(30)
        fsspec.filesystem("s3").clear_instance_cache()


def make_bucket(name: str) -> None:
    until = time.monotonic() + 60
    while True:
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        try:
            files.mkdir(name)
            return
        except Exception:  # noqa: BLE001 - the server does not listen yet
            assert time.monotonic() < until
            time.sleep(0.5)


@pytest.mark.parametrize(
    "name", ["attached", pytest.param("accelerate", marks=needs(*KINDS["accelerate"].needs))]
)
def test_killed_in_a_save_and_gone_on_with_an_empty_disk(
    name: str, bucket: str, tmp_path: Path
) -> None:
    kind = ATTACHED if name == "attached" else KINDS[name]
    write_configs(kind, tmp_path, bucket)
    train(kind, tmp_path)
    whole = models(kind, tmp_path)
    assert whole[0] == whole[1] and kind.last in common_steps(bucket)
    fsspec.filesystem("s3").rm(bucket, recursive=True)
    shutil.rmtree(tmp_path / "runs")
    step = kill_in_a_save(kind, tmp_path, bucket)
    assert 0 < step < kind.last
    require_whole(tmp_path)
    shutil.rmtree(tmp_path / "runs")  # a new machine
    output = train(kind, tmp_path, *(part.format(step=step) for part in kind.resume))
    assert f"{bucket}/cluster_0/" in output and "is fetched" in output
    assert models(kind, tmp_path) == whole
    require_whole(tmp_path)
