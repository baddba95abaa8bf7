"""The reference has every public name, and no other."""

from __future__ import annotations

import re

import dsx
import dsx.data
import dsx.method
from tests.docs.pages import read

OF_MEGATRON = {f"dsx.engines.megatron.checkpoint.{verb}_outer_state" for verb in ("save", "load")}


def test_the_reference_is_of_the_public_names() -> None:
    documented = re.findall(r"^::: (\S+)$", read("docs/reference.md"), re.M)
    public = {f"dsx.{name}" for name in dsx.__all__}
    public |= {f"dsx.data.{name}" for name in dsx.data.__all__}
    public |= {f"dsx.method.{name}" for name in dsx.method.__all__ if name not in dsx.__all__}
    assert len(documented) == len(set(documented))
    assert set(documented) == public | OF_MEGATRON


def test_public_names_say_what_they_are() -> None:
    for package in (dsx, dsx.data, dsx.method):
        for name in package.__all__:
            assert (getattr(package, name).__doc__ or "").strip(), f"{package.__name__}.{name}"
