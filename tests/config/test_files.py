"""What is no configuration at all is refused by name: files of other kinds, JSON with mistakes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsx.config.files import ConfigError, require_folder
from dsx.config.plain import told
from dsx.config.schema import load_config

GOOD = '{"dsx": {"preset": "diloco", "clusters": {"num_clusters": 2}%s}}'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "it is empty; write"),
        (" \n", "it is empty; write"),
        ("// why\n" + GOOD % "", "line 1 column 1: JSON has no comments; remove them"),
        (GOOD % ",\n# why\n", "line 2 column 1: JSON has no comments; remove them"),
        (GOOD % ",", r"a comma before \}; remove it"),
        (GOOD % ', "link": {"streams": 4,}', r"a comma before \}; remove it"),
        ("{'dsx': {}}", "JSON has double quotes only"),
        ('{"dsx": True}', "write true"),
        ('{"dsx": {', "the file ends in the middle; close what is open"),
        (GOOD % ', "preset": "eager"', "the key 'preset' stands twice in one object; keep one"),
        (GOOD % f', "schedule": {{"interval": {"9" * 6000}}}', "a number of 6000 digits"),
        ("[" * 100_000, "hundreds of objects or lists in each other"),
        ("null", "must hold a JSON object, not None; write"),
        ("[]", r"must hold a JSON object, not \[\]; write"),
        (b"\xef\xbb\xbf" + (GOOD % "").encode(), "is UTF-8 with a byte-order mark, .*; save it as"),
        ((GOOD % "").encode("utf-16"), "is UTF-16, which is not read; save it as plain UTF-8"),
        ((GOOD % "").encode("utf-32"), "is UTF-32, which is not read; save it as plain UTF-8"),
        ((GOOD % "").encode("utf-16-le"), "it holds bytes of value 0; save it"),
        (bytes(range(1, 256)), "can't decode byte 0x80.*; save it as plain UTF-8"),
        (b" " * (16 * 2**20 + 1), "has more than 16 MiB; give another"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_json_is_named_with_the_mistake(
    content: str | bytes, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message and len(message) < 400


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(GOOD % "")
    for source, said in (
        (tmp_path, f"which is a folder; give a file, such as {tmp_path / 'ds.json'}"),
        (tmp_path / "ds.json" / "x", "that can be opened: Not a directory; give another file"),
        ("a\0b", "that can be opened: embedded null byte; give another file"),
        ("x" * 5000, r"\(5000 characters\)' that can be opened: File name too long"),
        ("", "no config file at ''"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config(source)


def test_what_a_program_gives_counts_as_what_it_means() -> None:
    given = {
        "preset": "dilocox", "clusters": {"num_clusters": np.int64(3)},
        "metrics": {"dir": Path("runs/a"), "trace": np.bool_(True), "trace_steps": (1, 5)},
        "outer_optimizer": {"lr": np.float32(0.5)},
    }  # fmt: skip
    config = load_config({"dsx": given})
    assert (config.clusters.num_clusters, config.metrics.dir) == (3, "runs/a")
    assert config.axes["outer_optimizer"]["lr"] == 0.5 and config.metrics.trace is True


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.bfloat16, "=torch.bfloat16 is of the type torch.dtype, and must be"),
        (torch.tensor(3), r"=tensor\(3\) is of the type torch.Tensor, and must be"),
        (b"5", "=b'5' is of the type bytes, and must be"),
        ({5}, r"=\{5\} is of the type set, and must be"),
        ("\ud800", ".* must be a text of whole characters"),
    ],
)
def test_what_no_json_has_is_refused_by_its_key(value: Any, said: str) -> None:
    block = {"preset": "diloco", "clusters": {"num_clusters": 2}, "schedule": {"interval": value}}
    with pytest.raises(ConfigError, match=f"^dsx.schedule.interval{said}"):
        load_config({"dsx": block})


def test_a_block_that_holds_itself_is_refused() -> None:
    block: dict[str, Any] = {"preset": "diloco", "clusters": {"num_clusters": 2}}
    block["schedule"] = {"a": block}
    with pytest.raises(ConfigError, match=r"^dsx.schedule.a.* in each other \(or itself\)"):
        load_config({"dsx": block})


@pytest.mark.parametrize("key", ["deadline_seconds", "join_deadline_seconds"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -1, 0, 1e300])
def test_a_deadline_is_a_time_that_passes(key: str, value: float) -> None:
    clusters = {"num_clusters": 2, key: value}
    with pytest.raises(ConfigError, match=rf"{key}=.* must be a finite .*; leave it out for \d+"):
        load_config({"dsx": {"preset": "diloco", "clusters": clusters}})


@pytest.mark.parametrize("value", ["", "h:1", "tcp://h", "tcp://h:99999", "tcp://[::1", "env:/"])
def test_an_address_is_refused_when_it_is_read(value: str) -> None:
    clusters = {"num_clusters": 2, "rendezvous": value}
    with pytest.raises(ConfigError, match=r"^dsx.clusters.rendezvous='.* must be"):
        load_config({"dsx": {"preset": "diloco", "clusters": clusters}})


def test_a_run_needs_a_place_that_can_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    require_folder("dsx.metrics.dir", str(tmp_path))
    require_folder("dsx.metrics.dir", str(tmp_path / "a" / "b"))
    for name, said in (
        ("file", "file is a file"),
        ("file/b", "file is a file"),
        ("x" * 999, "long"),
    ):
        with pytest.raises(ConfigError, match=rf"^dsx.metrics.dir=.*{said}; give another"):
            require_folder("dsx.metrics.dir", str(tmp_path / name))


def test_values_that_no_json_has_are_told_by_name() -> None:
    """Of the rest of a DeepSpeed configuration, which clusters compare and run.json keeps."""
    given = {
        "dtype": torch.bfloat16, "path": Path("a/b"), "count": np.int64(3),
        "share": np.float64(0.5), "call": len, "made": object(), 5: {"x": (1, None)},
        "names": {"b", "a"},
    }  # fmt: skip
    json.dumps(told(given))
    assert told(given) == {
        "dtype": "torch.bfloat16", "path": "a/b", "count": 3, "share": 0.5,
        "call": "<built-in function len>", "made": "object", "5": {"x": [1, None]},
        "names": ["a", "b"],
    }  # fmt: skip
