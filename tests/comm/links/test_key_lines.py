"""A key has one spelling: what is written is read back, and nothing else is read."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsx.comm.links.key_lines import PublicKey, Revoked, read_key, read_revoked

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}", fullmatch=True)
BYTES = st.binary(min_size=32, max_size=32)
KEYS = st.builds(PublicKey, NAMES, BYTES, BYTES, st.dates(min_value=date(1000, 1, 1)))
KEY = PublicKey("site-a", bytes(range(32)), bytes(range(32, 64)), date(2026, 11, 23))
CURVE, SIGN = (base64.b64encode(part).decode() for part in (KEY.curve, KEY.sign))


@given(KEYS)
def test_a_key_is_read_as_it_was_written(key: PublicKey) -> None:
    again = read_key(key.line)
    assert again == key and again.made == key.made and again.line == key.line
    assert re.fullmatch(r"([a-z2-7]{4}-){3}[a-z2-7]{4}", key.fingerprint)


@given(KEYS, st.dates(min_value=date(1000, 1, 1)))
def test_a_revoked_key_is_read_as_it_was_written(key: PublicKey, day: date) -> None:
    again = read_revoked(Revoked(key, day).line)
    assert (again.key, again.on) == (key, day)


@given(KEYS, st.data())
def test_a_line_with_one_other_letter_is_another_key_or_none(
    key: PublicKey, data: st.DataObject
) -> None:
    line, made = key.line, key.line.index(" made:")
    at = data.draw(st.integers(0, made - 1))
    other = data.draw(st.characters(min_codepoint=33, max_codepoint=126).filter(line[at].__ne__))
    try:
        changed = read_key(line[:at] + other + line[at + 1 :])
    except ValueError:
        return
    assert changed != key and changed.fingerprint != key.fingerprint


@given(st.text(max_size=300))
def test_what_is_no_line_is_refused_in_words(text: str) -> None:
    for read in (read_key, read_revoked):
        with pytest.raises(ValueError, match="does not begin with dsx-|is no date|fields behind"):
            read(text)


def test_a_fingerprint_is_of_the_name_too_and_not_of_the_day() -> None:
    same = PublicKey("site-a", KEY.curve, KEY.sign, date(2020, 1, 1))
    other = PublicKey("site-b", KEY.curve, KEY.sign, KEY.made)
    assert KEY.fingerprint == same.fingerprint and same == KEY
    assert KEY.fingerprint != other.fingerprint


@pytest.mark.parametrize(("part", "is_shared"), [("curve", True), ("sign", True), ("name", False)])
def test_a_part_in_common_is_enough(part: str, is_shared: bool) -> None:
    """Whoever has half of a revoked key, or of another member's, is not let in by the other."""
    new = PublicKey("site-b", bytes(32), bytes(32), KEY.made)
    assert replace(new, **{part: getattr(KEY, part)}).shares_with(KEY) == is_shared


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (f"dsx-key-2 site-a curve:{CURVE} sign:{SIGN} made:2026-11-23", "begin with dsx-key-1"),
        (f"dsx-key-1 site-a curve:{CURVE} sign:{SIGN}", "3 fields .* not 4"),
        (f"dsx-key-1 site-a curve:{CURVE} sign:{SIGN} made:2026-11-23 x", "5 fields .* not 4"),
        (f"dsx-key-1 site.a curve:{CURVE} sign:{SIGN} made:2026-11-23", "'site.a' cannot be a mem"),
        (f"dsx-key-1 -a curve:{CURVE} sign:{SIGN} made:2026-11-23", "'-a' cannot be a member's"),
        (f"dsx-key-1 {'a' * 33} curve:{CURVE} sign:{SIGN} made:2026-11-23", "at most 32"),
        (f"dsx-key-1 site-a sign:{SIGN} curve:{CURVE} made:2026-11-23", "curve: is not where"),
        (f"dsx-key-1 site-a curve:{CURVE[:-4]} sign:{SIGN} made:2026-11-23", "curve: is not 32"),
        (f"dsx-key-1 site-a curve:{CURVE[:-2]}9= sign:{SIGN} made:2026-11-23", "curve: is not 32"),
        (f"dsx-key-1 site-a curve:{CURVE} sign:{SIGN[1:]} made:2026-11-23", "sign: is not 32"),
        (f"dsx-key-1 site-a curve:{CURVE} sign:{SIGN} 2026-11-23", "made: is not where"),
        (f"dsx-key-1 site-a curve:{CURVE} sign:{SIGN} made:20261123", "'20261123' is no date"),
        (f"dsx-key-1 site-a curve:{CURVE} sign:{SIGN} made:2026-11-31", "no date; its form"),
    ],
)
def test_refusals(line: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        read_key(line)
    assert CURVE not in str(caught.value)


def test_a_revoked_line_needs_its_day() -> None:
    with pytest.raises(ValueError, match="'site-a' is no date"):
        read_revoked(f"dsx-revoked-1 site-a curve:{CURVE} sign:{SIGN} made:2026-11-23")
