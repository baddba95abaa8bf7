"""The store over links has the verbs of torch's, for members alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from dsx.comm.links.link import Link
from dsx.comm.links.store import LinkStore, Shelf
from tests.comm.links.clusters import two_links

SHORT = timedelta(seconds=0.3)


@pytest.fixture
def links() -> Iterator[list[Link]]:
    with two_links() as (made, _):
        made[0].serve(Shelf().serve)
        yield made


def test_it_is_one_for_both_and_takes_torchs_prefixes(links: list[Link]) -> None:
    near, far = (dist.PrefixStore("a run", LinkStore(link, (0, 0))) for link in links)
    assert not far.check(["x"])
    near.set("x", "1")
    far.multi_set(["y", "z"], ["2", "3"])
    assert near.multi_get(["x", "z"]) == [b"1", b"3"]
    assert LinkStore(links[1], (0, 0)).delete_key("a run/y")
    assert far.get("x") == b"1" and far.check(["x"]) and not far.check(["x", "y"])
    assert [far.add("n", 2), near.add("n", 3), far.add("n", 0)] == [2, 5, 5]
    assert far.compare_set("c", "", "first") == b"first"
    assert near.compare_set("c", "", "second") == b"first"
    assert near.compare_set("c", "first", "second") == b"second"
    far.wait(["x", "c"], SHORT)
    assert LinkStore(links[0], (0, 0)).delete_key("a run/x") and not far.check(["x"])


def test_a_key_is_waited_for_and_given_up(links: list[Link]) -> None:
    store = LinkStore(links[1], (0, 0))
    with pytest.raises(RuntimeError, match=r"late did not come within 0\.3 s"):
        store.wait(["late"], SHORT)
    with pytest.raises(RuntimeError, match="late has not been set"):
        store.get("late")
    threading.Timer(0.3, lambda: LinkStore(links[0], (0, 0)).set("late", "here")).start()
    store.wait(["late"], timedelta(seconds=20))
    assert store.get("late") == b"here"


@pytest.mark.ci
def test_a_request_is_done_once_though_the_line_is_cut() -> None:
    with two_links(over_line=True, grace_seconds=5.0) as (links, line):
        assert line is not None
        links[0].serve(Shelf().serve)
        store = LinkStore(links[1], (0, 0))
        cutting = threading.Event()

        def cut() -> None:
            while not cutting.wait(0.15):
                line.cut()

        thread = threading.Thread(target=cut)
        thread.start()
        try:
            for count in range(1, 300):
                assert store.add("n", 1) == count
                time.sleep(0.002)
        finally:
            cutting.set()
            thread.join()


def test_who_holds_it_may_be_lost(links: list[Link]) -> None:
    store = LinkStore(links[1], (0, 0))
    store.set("x", "1")
    links[0].close()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="did not come back"):
        store.wait(["y"], timedelta(seconds=20))
    assert time.monotonic() - started < 3


def test_what_cannot_be_done_is_said(links: list[Link]) -> None:
    store = LinkStore(links[1], (0, 0))
    store.set("text", "no number")
    with pytest.raises(RuntimeError, match="cannot be done"):
        store.add("text", 1)
    with pytest.raises(RuntimeError, match="set of 4194.* bytes: at most 2097152"):
        store.set("x", "x" * (1 << 22))
    assert store.check(["text"])
