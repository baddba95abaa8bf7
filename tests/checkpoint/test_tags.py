"""Which checkpoint clusters resume from, and what a killed process leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsx.checkpoint.choice import newest_good
from dsx.checkpoint.tags import (
    Manifest,
    begin_tag,
    cluster_directory,
    common_tag,
    complete_tag,
    complete_tags,
    note_left,
    tags_within_reach,
)


def write(
    base: Path,
    cluster: int,
    step: int,
    session: str = "a",
    num_clusters: int = 2,
    is_finished: bool = False,
    trouble: str = "",
    is_doubtful: bool = False,
    members: tuple[int, ...] = (),
    is_preempted: bool = False,
    tag: str | None = None,
) -> None:
    directory, tag = cluster_directory(base, cluster), tag or f"step{step}"
    unfinished = begin_tag(directory, tag)
    (directory / unfinished).mkdir(parents=True)
    (directory / unfinished / "content").write_text(f"{cluster} {step} {session}")
    mark = Manifest(
        5, step, session, num_clusters, 1, is_finished, trouble, is_preempted,
        is_doubtful=is_doubtful, members=members,
    )  # fmt: skip
    complete_tag(directory, tag, mark)


def chosen(base: Path, wanted: str | None, num_clusters: int = 2) -> list[tuple[int, str]]:
    found = [tags_within_reach(base, m) for m in range(num_clusters)]
    if wanted is not None:
        return common_tag(found, base, wanted)
    return [*newest_good(found, base, lambda one: [], tells=True).sources]


def test_clusters_resume_from_the_newest_tag_that_all_hold(tmp_path: Path) -> None:
    for cluster, steps in enumerate([(10, 20, 30), (10, 20)]):
        for step in steps:
            write(tmp_path, cluster, step)
    unfinished = begin_tag(tmp_path / "cluster_1", "step30")  # died before it was complete
    (tmp_path / "cluster_1" / unfinished).mkdir()
    assert chosen(tmp_path, None) == [(0, "step20"), (1, "step20")]
    assert chosen(tmp_path, "step10") == [(0, "step10"), (1, "step10")]
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint 'step30' .*cluster 1: \["):
        chosen(tmp_path, "step30")
    with pytest.raises(FileNotFoundError, match=r"cluster 0: none"):
        chosen(tmp_path / "elsewhere", None)


def test_a_tag_of_another_run_is_not_common(tmp_path: Path) -> None:
    for cluster in range(2):
        write(tmp_path, cluster, 10)
        write(tmp_path, cluster, 20, session="b" if cluster else "a")
    assert chosen(tmp_path, None) == [(0, "step10"), (1, "step10")]


def test_a_tag_written_again_keeps_what_the_others_still_hold(tmp_path: Path) -> None:
    write(tmp_path, 0, 10)
    write(tmp_path, 1, 10)
    write(tmp_path, 1, 10, session="b")  # cluster 0 was killed before it got there
    assert chosen(tmp_path, None) == [(0, "step10"), (1, "step10.replaced")]
    write(tmp_path, 0, 10, session="b")
    assert chosen(tmp_path, None) == [(0, "step10"), (1, "step10")]
    write(tmp_path, 0, 10, session="c")
    assert chosen(tmp_path, "step10") == [(0, "step10.replaced"), (1, "step10")]


def test_a_step_saved_before_and_after_finish_is_taken_from_one_side_of_it(tmp_path: Path) -> None:
    for cluster in range(2):
        write(tmp_path, cluster, 10)
    write(tmp_path, 0, 10, is_finished=True)  # cluster 1 was killed before it got there
    assert chosen(tmp_path, None) == [(0, "step10.replaced"), (1, "step10")]
    write(tmp_path, 1, 10, is_finished=True)
    assert chosen(tmp_path, None) == [(0, "step10"), (1, "step10")]
    write(tmp_path, 0, 10)
    assert chosen(tmp_path, "step10") == [(0, "step10.replaced"), (1, "step10")]


def test_new_clusters_take_cluster_0s_tag(tmp_path: Path) -> None:
    for cluster in range(2):
        write(tmp_path, cluster, 10)
    write(tmp_path, 2, 10, session="old")  # left over from another run
    assert chosen(tmp_path, None, 4) == [(0, "step10"), (1, "step10"), (0, "step10"), (0, "step10")]
    assert chosen(tmp_path, None, 1) == [(0, "step10")]
    found = [tags_within_reach(tmp_path, m) for m in range(3)]
    found[2][1].clear()  # no file system is shared with cluster 0
    with pytest.raises(FileNotFoundError, match=r"cluster 2 is new .*for .*cluster_0/step10"):
        newest_good(found, tmp_path, lambda one: [], tells=True)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_cluster_that_was_lost_takes_the_tag_of_the_first_that_was_not(
    lost: int, tmp_path: Path
) -> None:
    left = tuple(m for m in range(3) if m != lost)
    for cluster in range(3):
        write(tmp_path, cluster, 10, num_clusters=3)
    for cluster in left:
        write(tmp_path, cluster, 20, num_clusters=3, members=left)
    expected = [(m if m in left else left[0], "step20") for m in range(3)]
    for wanted in (None, "step20"):
        assert chosen(tmp_path, wanted, 3) == expected
    assert chosen(tmp_path, "step10", 3) == [(m, "step10") for m in range(3)]
    found = [tags_within_reach(tmp_path, m) for m in range(3)]
    found[lost][1].clear()  # no file system is shared with the others
    assert newest_good(found, tmp_path, lambda one: [], tells=True).tag == "step10"
    with pytest.raises(FileNotFoundError, match=f"cluster {lost} had left that run and takes"):
        common_tag(found, tmp_path, "step20")
    write(tmp_path, left[1], 30, num_clusters=3, members=left)  # the other one has not saved
    assert chosen(tmp_path, None, 3) == expected


def test_what_is_saved_in_leaving_goes_with_nothing_that_the_others_have(tmp_path: Path) -> None:
    """Also where what those who trained on have saved is damaged."""
    for cluster in range(3):
        write(tmp_path, cluster, 10, num_clusters=3)
    write(tmp_path, 0, 15, num_clusters=3, is_preempted=True)
    write(tmp_path, 1, 40, num_clusters=3, members=(1, 2), is_preempted=True)
    before_it_is_known = chosen(tmp_path, "step15", 2)
    assert before_it_is_known == [(0, "step15"), (1, "step40")]  # as if all had been told
    note_left(tmp_path / "cluster_0" / "step15")
    manifest = complete_tags(tmp_path / "cluster_0")["step15"]
    assert manifest["has_left"] and manifest["step"] == 15
    assert chosen(tmp_path, None, 3) == [(m, "step10") for m in range(3)]
    write(tmp_path, 2, 41, num_clusters=3, members=(1, 2), is_preempted=True)
    assert chosen(tmp_path, None, 3) == [(1, "step40"), (1, "step40"), (2, "step41")]


def test_what_is_unfinished_is_not_complete(tmp_path: Path) -> None:
    write(tmp_path, 0, 10)
    directory = tmp_path / "cluster_0"
    (directory / "step10").rename(directory / begin_tag(directory, "step10"))
    assert complete_tags(directory) == {}
