"""The table of docs/deepspeed.md is that of the code; `DSX_WRITE_DOCS=1` writes it."""

from __future__ import annotations

from typing import Any

import pytest

from dsx.engines.deepspeed.refusals import REFUSED, Refusal, refuse_document
from dsx.engines.deepspeed.served import SERVED, Served, table
from tests.docs.pages import hold_served


def test_the_table_is_that_of_the_code() -> None:
    hold_served("docs/deepspeed.md", "setting", table())


def test_a_setting_has_one_row() -> None:
    names = [name for name, *_ in table()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("one", SERVED, ids=lambda one: one.name)
def test_what_it_calls_served_is_not_refused(one: Served) -> None:
    refuse_document(one.document, has_mpu=False)


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.key)
def test_what_it_calls_refused_is(refusal: Refusal) -> None:
    document: Any = refusal.example
    for name in reversed(refusal.key.split(".")):
        document = {name: document}
    with pytest.raises(ValueError, match=f"does not serve {refusal.key}.* of DeepSpeed: .*[a-z]"):
        refuse_document(document, has_mpu=True)
    refuse_document({}, has_mpu=False)
