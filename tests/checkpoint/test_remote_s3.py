"""Checkpoints at a place of S3's protocol: a server in this process, by s3fs, as with any other."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from dsx.checkpoint.remote import Remote
from tests.checkpoint.test_remote import tag_of as tag_of
from tests.checkpoint.test_remote import (  # collected here, with the fixture below
    test_a_mark_goes_there_alone,
    test_a_tag_comes_back_as_it_was,
    test_what_changes_meanwhile_is_not_complete,
    test_what_ends_half_way_is_not_there_and_is_copied_anew,
    test_what_is_written_again_leaves_what_was_there_complete,
)
from tests.installed import needs

pytestmark = [needs("moto", "s3fs", "flask"), pytest.mark.ci]
SHARED = (
    test_a_mark_goes_there_alone,
    test_a_tag_comes_back_as_it_was,
    test_what_changes_meanwhile_is_not_complete,
    test_what_ends_half_way_is_not_there_and_is_copied_anew,
    test_what_is_written_again_leaves_what_was_there_complete,
)


@pytest.fixture(scope="module")
def address() -> Generator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def remote(address: str, request: Any, monkeypatch: pytest.MonkeyPatch) -> Generator[Remote]:
    given = {"ENDPOINT_URL": address, "ACCESS_KEY_ID": "any", "SECRET_ACCESS_KEY": "any"}
    for name, value in {**given, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    bucket = f"b{abs(hash(request.node.name)) % 10**9}"
    files.mkdir(bucket)
    fsspec.filesystem("s3").clear_instance_cache()
    yield Remote(f"s3://{bucket}/run", "here")
    files.rm(bucket, recursive=True)


def test_a_file_of_many_parts(remote: Remote, tmp_path: Path) -> None:
    """Larger than a part of an upload, and with a folder in it."""
    tag = tag_of(tmp_path)
    (tag / "torch").mkdir()
    (tag / "torch" / "__0_0.distcp").write_bytes(bytes(range(256)) * 50_000)
    remote.copy(tag)
    to = tmp_path / "back"
    remote.fetch(0, "step10", ["torch/__0_0.distcp"], to, lambda num_bytes: None)
    assert (to / "torch" / "__0_0.distcp").read_bytes() == bytes(range(256)) * 50_000
