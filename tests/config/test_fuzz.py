"""Whatever stands in a block is taken or refused: in one line with key, value, allowed and fix."""

from __future__ import annotations

import contextlib
import json
import warnings
from typing import Any

import pytest
from hypothesis import given, settings

from dsx.config.files import shown
from dsx.config.plain import plain_block
from dsx.config.schema import ConfigError, load_config
from dsx.method.method import Method

from .fuzz import FIX, Document, blocks, follow, mutations

Mutation = tuple[Document, tuple[Any, ...]]


def quick(examples: int) -> settings:
    return settings(derandomize=True, deadline=None, database=None, max_examples=examples)


def refusal(document: Document) -> str | None:
    """Return why a document is refused; None if it is taken, and then it has to be whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = load_config(document)
        except ConfigError as error:
            return str(error)
        assert isinstance(config.method, Method)
        again = load_config({"dsx": json.loads(json.dumps(config.block()))})
    assert again.method == config.method and again.block() == config.block()
    return None


def require_readable(message: str) -> None:
    assert message.startswith(("dsx.", "dsx ", "a key of dsx")), message
    assert "\n" not in message and len(message) < 900, message
    assert FIX.search(message), f"no fix: {message}"


def check_fitting(document: Document) -> None:
    message = refusal(document)
    if message is not None:
        require_readable(message)


def check_mutation(mutation: Mutation) -> None:
    """What is wrong in one place is named with its value; what is then advised is taken."""
    document, place = mutation
    message = refusal(document)
    if message is None:
        return
    require_readable(message)
    if all(isinstance(part, str) and part.isidentifier() for part in place):
        assert place[-1] in message
    if message.startswith(f"dsx.{'.'.join(map(str, place))}=") and len(place) == 2:
        value = document["dsx"][place[0]][place[1]]
        with contextlib.suppress(ConfigError):
            value = plain_block(value)
        shows = {shown(value)[:20]} | ({shown(float(value))} if type(value) is int else set())
        assert any(one in message for one in shows)
    better = follow(document, message)
    if better is not None:
        then = refusal(better)
        assert then is None or then.split(" ")[0] != message.split(" ")[0], then


@given(blocks())
@quick(120)
def test_what_fits_the_schema_is_taken_or_refused_with_a_reason(document: Document) -> None:
    check_fitting(document)


@given(mutations())
@quick(250)
def test_what_is_wrong_is_named_and_the_advice_helps(mutation: Mutation) -> None:
    check_mutation(mutation)


@pytest.mark.ci
@given(blocks())
@quick(2000)
def test_thousands_of_blocks(document: Document) -> None:
    check_fitting(document)


@pytest.mark.ci
@given(mutations())
@quick(4000)
def test_thousands_of_mistakes(mutation: Mutation) -> None:
    check_mutation(mutation)
