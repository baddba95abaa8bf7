"""Shared data is split and own data is not: decided in all clusters alike, over a store here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dsx.comm.rendezvous import Rendezvous
from dsx.comm.topology import RankInfo
from dsx.data.identity import Build
from dsx.training.data_sources import Source, describe, share_data

HERE, THERE = Source("here", "1"), Source("there", "2")


def decide(wanted: str, *clusters: Sequence[Source]) -> set[bool | str]:
    """Return what the clusters decide, or the message."""
    store = dist.HashStore()

    def share(cluster: int) -> bool | str:
        info = RankInfo(cluster, len(clusters), 0, 1)
        try:
            rendezvous = Rendezvous(store, info, "session", 20.0)
            return share_data(rendezvous, wanted, clusters[cluster])
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(clusters)) as pool:
        return set(pool.map(share, range(len(clusters))))


def test_the_same_data_is_split_whatever_its_path() -> None:
    assert decide("auto", [HERE, THERE], [Source("elsewhere", "1"), THERE]) == {True}
    assert decide("auto", [Source("s3://a", None)], [Source("s3://a", None)]) == {True}
    assert decide("auto", [], []) == {True}  # the script's own


def test_other_data_is_read_whole() -> None:
    assert decide("auto", [HERE], [THERE]) == {False}
    assert decide("auto", [HERE], [THERE], [Source("third", "3")]) == {False}


@pytest.mark.parametrize(
    ("clusters", "said"),
    [
        (([HERE, THERE], [THERE]), "clusters 0 and 1 both have there, but not all of their"),
        (([HERE, THERE], [THERE, HERE]), "not all of their training data is the same"),
        (([Source("here", "1", weight="0.3")], [HERE]), "both have here, but not all"),
        (([Source("s3://a", None)], [Source("s3://b", None)]), "content of s3://a cannot be read"),
    ],
)
def test_what_cannot_be_told_is_refused(clusters: Sequence[list[Source]], said: str) -> None:
    (message,) = decide("auto", *clusters)
    assert said in str(message)
    assert "clusters.data='split' for data that all clusters share" in str(message)
    assert decide("split", *clusters) == {True}
    assert decide("own", *clusters) == {False}


def test_a_wrong_word_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert decide("split", [HERE], [THERE]) == {True}
        assert "each skips 1 of 2 parts of its own" in caplog.text
        caplog.clear()
        assert decide("own", [HERE], [HERE]) == {False}
        assert "clusters 0 and 1 both have here: they read the same samples" in caplog.text
        caplog.clear()
        decide("split", [HERE], [HERE])
        decide("own", [HERE], [THERE])
    assert not caplog.text


def built(name: str, content: str, documents: range, tokenizer: str = "byte") -> Source:
    sketch = tuple(f"{number:016x}" for number in documents)
    return Source(name, content, build=Build(name, content, tokenizer, sketch))


def test_two_builds_of_the_same_documents_are_refused_unless_they_are_declared() -> None:
    ours, near = built("a", "1", range(100)), built("b", "2", range(10, 110))
    for wanted in ("auto", "split"):
        (message,) = decide(wanted, [HERE, ours], [HERE, near])
        assert "cluster 0's a is 1, and cluster 1's b is 2, and about 90 % of" in str(message)
        assert "or say clusters.data='own'" in str(message)
    assert decide("own", [ours], [near]) == {False}


def test_builds_without_common_documents_are_each_cluster_s_own() -> None:
    ours, other = built("a", "1", range(100)), built("b", "2", range(98, 198))
    assert decide("auto", [ours], [other]) == {False}  # two in common, by chance
    (message,) = decide("split", [ours], [other])
    assert "the training data differs: by the content_digest of dataset.json" in str(message)
    assert decide("auto", [ours], [built("elsewhere", "1", range(100))]) == {True}


def test_another_tokenizer_is_refused_whosever_the_data_is() -> None:
    ours, theirs = built("a", "1", range(9)), built("b", "2", range(50, 60), "gpt2 0123")
    for wanted in ("auto", "split", "own"):
        (message,) = decide(wanted, [ours], [theirs])
        assert "tokenizer 'byte', that of cluster 1 (b) 'gpt2 0123'" in str(message)


def test_a_line_names_data_and_tokens() -> None:
    big, small = Source("big", "1", 1_000_000), Source("small", "2", 1000)
    assert describe([big, small]) == "big + small (1,001,000 tokens)"
    assert describe([big, HERE, small, THERE]) == "big + here + small + ..."
