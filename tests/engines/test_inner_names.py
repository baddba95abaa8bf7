"""An engine's private names are in one file of its adapter, and are missed by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsx.engines.inner_names import InnerName, KnownReleases
from megatron_patches import probe
from tests.distributed import run_distributed
from tests.installed import needs

ROOT = Path(__file__).parents[2]
RELEASES = KnownReleases("Engine", "1.2.0", "1.9.8", "install engine>=1.4,<2")
TORCHS = {"_cdata"}  # of a storage: the same one or another


def private_names(file: Path) -> Iterator[str]:
    """Yield the names with an underscore that a file reads of what is not its own."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and a.value)


@pytest.mark.parametrize(
    ("folder", "only"),
    [
        ("dsx/engines/deepspeed", "private.py"),
        ("dsx/engines/megatron", "masters.py"),
        ("megatron_patches", "probe.py"),
    ],
)
def test_private_names_are_in_one_file(folder: str, only: str) -> None:
    found = {
        (file.name, name)
        for file in (ROOT / folder).glob("*.py")
        for name in private_names(file)
        if str(name).startswith("_") and not str(name).startswith("__") and name not in TORCHS
    }
    assert {file for file, _ in found} <= {only}, found


@pytest.mark.parametrize(
    ("version", "since", "said"),
    [
        ("1.3.9", "1.4.0", "it is there since 1.4.0; install engine>=1.4,<2"),
        ("1.4.1+cpu", "1.4.0", "it was there from 1.4.0 to 1.9.8, and is gone since; install"),
        ("1.10.0", "", "it was there from 1.2.0 to 1.9.8, and is gone since; install"),
    ],
)
def test_what_a_release_lacks_is_named_and_since_when(version: str, since: str, said: str) -> None:
    there = InnerName("json.decoder:JSONDecoder", "decode", "texts are read")
    gone = InnerName("json.decoder:JSONDecoder", "_decode_more", "texts are read", since)
    with pytest.raises(RuntimeError) as raised:
        RELEASES.require([there, gone], version)
    told = str(raised.value)
    assert told.startswith(f"Engine {version} has no decoder.JSONDecoder._decode_more, by which ")
    assert said in told
    RELEASES.require([there], version)


@pytest.mark.parametrize("owner", ["json.no_such_module", "json.decoder:NoSuchClass"])
def test_an_owner_that_is_gone_counts_as_a_name_that_is(owner: str) -> None:
    with pytest.raises(RuntimeError, match="has no .*decode, by which"):
        RELEASES.require([InnerName(owner, "decode", "texts are read")], "1.9.9")


@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_what_is_told_to_install_is_what_the_extra_has(engine: str) -> None:
    text = (ROOT / "dsx/engines" / engine / "private.py").read_text()
    (advice,) = re.findall(r'"install (\S+)"', text)
    assert f'{engine} = ["{advice}"]' in (ROOT / "pyproject.toml").read_text()


def require_of_deepspeed() -> None:
    from dsx.engines.deepspeed.private import require_names

    require_names()


def require_of_megatron() -> None:
    from dsx.engines.megatron.private import require_names

    require_names()


@needs("deepspeed")
def test_what_is_installed_of_deepspeed_has_all_names() -> None:
    run_distributed(require_of_deepspeed, 1)


@needs("megatron")
def test_what_is_installed_of_megatron_has_all_names() -> None:
    run_distributed(require_of_megatron, 1, engine="megatron")


def test_what_a_tree_lacks_is_told_with_the_releases_that_have_it() -> None:
    with pytest.raises(probe.UnknownMegatron, match="has no no_such, which is there from core_v0"):
        probe.function(ast, "no_such")
    said = probe.since("checkpoint_and_decide_exit")
    assert said == "which is there from core_v0.11.0 to main of August 2026"
    with pytest.raises(probe.UnknownMegatron, match="ast has no _TRAIN_START_TIME, which is"):
        probe.start_of_training(ast)
