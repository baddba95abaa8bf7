"""The table of docs/megatron.md is that of the code; `DSX_WRITE_DOCS=1` writes it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dsx.engines.megatron.refusals import refuse_arguments
from dsx.engines.megatron.served import SERVED, table
from tests.docs.pages import hold_served

LAYOUT = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}  # of any experts


def test_the_table_is_that_of_the_code() -> None:
    hold_served("docs/megatron.md", "flag", table())


def test_a_flag_has_one_row() -> None:
    flags = [flag for flag, *_ in table()]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("name", SERVED)
def test_what_it_calls_served_is_not_refused(name: str) -> None:
    layout = {} if name.endswith(("fsdp", "fsdp2")) else LAYOUT
    refuse_arguments(SimpleNamespace(**{**layout, name: 2}))


@pytest.mark.parametrize(
    "flag", [flag for flag, is_served, _ in table() if is_served in ("refused", "1")]
)
def test_what_it_calls_refused_is(flag: str) -> None:
    name = flag.removeprefix("--").replace("-", "_")
    with pytest.raises(ValueError, match=f"does not serve {flag}"):
        refuse_arguments(SimpleNamespace(**{name: 2}))
    refuse_arguments(SimpleNamespace(**{name: None}))
