"""docs/compatibility.md says today's numbers, and every release has left what tests need of it."""

from __future__ import annotations

import re

import dsx
from dsx.checkpoint.files import FORMAT
from dsx.comm.versions import PROTOCOL
from tests.docs.pages import ROOT

FIXTURES = ROOT / "tests" / "fixtures"


def test_the_page_has_the_numbers_of_today() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert f"| today's tree | {PROTOCOL} | format {FORMAT} |" in page


def test_every_release_from_0_2_0_on_has_its_fixtures() -> None:
    """But the one that is being made: its fixtures are made by its commit, and come behind it."""
    text = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", text, re.M)
    assert "0.2.0" in released
    for version in released:
        if version not in ("0.1.0", dsx.__version__) or version == "0.2.0":
            assert (FIXTURES / f"checkpoint_{version}" / "made.json").is_file(), version
            assert (FIXTURES / f"hello_{version}.json").is_file(), version
