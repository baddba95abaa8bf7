"""Clusters of different versions: what may differ is told, what may not is refused by both."""

from __future__ import annotations

import copy
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dsx
from dsx.comm.meet import meet
from dsx.comm.topology import RankInfo
from dsx.comm.versions import PROTOCOL, about_me, refusal, tell_differences

HELLOS = sorted((Path(__file__).parents[1] / "fixtures").glob("hello_*.json"))


def hello(may_differ: tuple[str, ...] = (), protocol: int = PROTOCOL, **versions: str) -> Any:
    told = about_me(may_differ)
    usual = {"python": "3.11.7", "dsx": "0.3.1", "torch": "2.6.0+cu124"}
    return {**told, "protocol": protocol, "versions": {**usual, **versions}}


def both(one: Any, other: Any) -> list[str | None]:
    """Return what cluster 0 says of cluster 1, and the reverse."""
    return [refusal(0, one, 1, other), refusal(1, other, 0, one)]


def meet_with(theirs: Any) -> Any:
    """Let cluster 0 meet a cluster 1 that says `theirs`; return the session, or the error."""
    store = dist.HashStore()
    joined = dist.PrefixStore("dsx/join", store)
    words = json.dumps({"nonce": "theirs", "num_clusters": 2, "world_size": 1, **theirs})
    joined.set("here/1", words)

    def answer() -> None:
        nonce = json.loads(joined.get("here/0"))["nonce"]  # waits for it
        joined.set(f"answer/{nonce}/1", words)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        return meet(store, RankInfo(0, 2, 0, 1), 5)
    except ValueError as error:
        return error
    finally:
        thread.join(5)


def test_a_hello_names_what_is_in_use() -> None:
    told = about_me(("versions.torch", "optimizer.lr"))
    assert told["protocol"] == PROTOCOL and told["may_differ"] == ["versions.torch"]
    assert told["versions"]["dsx"] == dsx.__version__
    assert {"python", "torch"} <= set(told["versions"])


def test_another_protocol_is_refused_with_what_to_upgrade() -> None:
    for said in both(hello(protocol=5, dsx="0.4.0"), hello(protocol=4, dsx="0.3.1")):
        assert said == (
            "cluster 0 runs dsx 0.4.0 (protocol 5), cluster 1 dsx 0.3.1 (protocol 4): they send "
            "each other different messages; install dsx 0.4.0 in cluster 1"
        )


@pytest.mark.parametrize("path", HELLOS, ids=lambda path: path.stem)
def test_the_hello_of_every_release_is_answered(path: Path) -> None:
    """Recorded with the release's own code (tests/fixtures/record_hello.py)."""
    theirs = json.loads(path.read_text())
    met = meet_with({k: v for k, v in theirs.items() if k != "nonce"})
    if theirs["protocol"] == PROTOCOL:
        assert isinstance(met, str)
        return
    release = path.stem.removeprefix("hello_").rpartition(".")[0]
    assert isinstance(met, ValueError)
    assert f"cluster 0 runs dsx {dsx.__version__} (protocol {PROTOCOL})" in str(met)
    assert release in str(met) and f"(protocol {theirs['protocol']})" in str(met)
    assert str(met).endswith(f"install dsx {dsx.__version__} in cluster 1")


def test_a_hello_without_a_number_is_of_protocol_1() -> None:
    assert "cluster 1 dsx 0.1 (protocol 1)" in str(meet_with({}))


@pytest.mark.parametrize(
    ("name", "one", "other", "is_refused"),
    [
        ("torch", "2.6.0+cu124", "2.6.1+cpu", False),
        ("torch", "2.6.0", "2.7.0", True),
        ("torch", "2.6.0", "3.6.0", True),
        ("torch", "2.13.0a0+git5f5e1c9", "2.13.0", False),
        ("dsx", "0.3.0", "0.3.4", False),
        ("dsx", "0.3.0", "0.4.0", True),
        ("dsx", "0.3.0", "unknown", True),
        ("python", "3.10.1", "3.13.0", False),
        ("deepspeed", "0.18.1", "0.19.0", False),
        ("megatron.core", "0.16.0", "0.18.2", False),
    ],
)
def test_what_may_differ_and_what_may_not(
    name: str, one: str, other: str, is_refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pair = hello(**{name: one}), hello(**{name: other})
    if is_refused:
        for said in both(*pair):
            assert said is not None and f"{name} {one}" in said and f"{name} {other}" in said
            assert f"name 'versions.{name}' in clusters.may_differ of both" in said
        meant = hello((f"versions.{name}",), **{name: other})
        assert None not in both(pair[0], meant), "one of them alone does not decide it"
        for names in ((f"versions.{name}",), ("versions",)):
            agreed = hello(names, **{name: one}), hello(names, **{name: other})
            assert both(*agreed) == [None, None]
    else:
        assert both(*pair) == [None, None]
    with caplog.at_level(logging.WARNING):
        tell_differences(dict(enumerate(pair)))
    (told,) = caplog.messages
    assert told.endswith(f"which may differ: {name} {one} (cluster 0), {other} (cluster 1)")


def test_equal_versions_are_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    tell_differences({0: hello(), 1: hello(), 2: copy.deepcopy(hello())})
    assert caplog.messages == []
