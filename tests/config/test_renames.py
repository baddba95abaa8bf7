"""Old spellings of the configuration are read, with one warning; in files of dsx without."""

from __future__ import annotations

import warnings

import pytest

from dsx.config.renames import stored_axes
from dsx.config.schema import ConfigError, load_config, resolve_method
from dsx.core.renamed import RenamedWarning, warn_renamed
from tests.flags import read_flags


@pytest.fixture(autouse=True)
def nothing_told_yet() -> None:
    warn_renamed.cache_clear()


def test_delays_have_the_fields_names() -> None:
    with pytest.warns(RenamedWarning, match=r"dsx.delay.type='replace' is now 'blocking'"):
        old = resolve_method("diloco", {"delay": {"type": "replace"}})
    assert old == resolve_method("diloco", {})
    with pytest.warns(RenamedWarning, match=r"dsx.delay.type='blend' is now 'streaming'"):
        old = resolve_method("cocodc", {"delay": {"type": "blend", "steps": 3}})
    assert old == resolve_method("cocodc", {"delay": {"type": "streaming", "steps": 3}})
    assert old[1]["delay"] == {"type": "streaming", "steps": 3, "alpha": 0.5}


def test_one_warning_per_spelling_and_process() -> None:
    block = {"preset": "diloco", "clusters": {"num_clusters": 2}, "delay": {"type": "replace"}}
    with pytest.warns(RenamedWarning) as told:
        load_config({"dsx": block})
        load_config({"dsx": block})
    assert len(told) == 1


def test_flags_are_the_same() -> None:
    two = ["--dsx-preset", "streaming_diloco", "--dsx-num-clusters", "2"]
    with pytest.warns(RenamedWarning, match="'streaming'"):
        old = read_flags([*two, "--dsx-delay-type", "blend", "--dsx-delay-alpha", "0.25"])
    assert old.method == read_flags([*two, "--dsx-delay-alpha", "0.25"]).method


def test_what_a_run_left_behind_is_read_without_a_word() -> None:
    left = {"delay": {"type": "blend", "steps": 2}, "fragments": {"by": "model"}, "link": {"a": 1}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stored_axes(left) == {**left, "delay": {"type": "streaming", "steps": 2}}
        assert stored_axes({"delay": {"type": ["x"]}}) == {"delay": {"type": ["x"]}}


def test_other_axes_have_no_such_names() -> None:
    with pytest.raises(ConfigError, match=r"dsx.schedule.type='replace' is not known"):
        resolve_method("diloco", {"schedule": {"type": "replace"}})
