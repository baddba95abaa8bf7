"""Places that are told: an address under a wrong key, or in a command, is not shown or recorded."""

from __future__ import annotations

from typing import Any

import pytest

from dsx.config.files import ConfigError
from dsx.config.notices import NoticeConfig, check_notices, without_addresses

ADDRESS = "https://hooks.example.org/services/SECRET"


@pytest.mark.parametrize(
    "wrong", [{"url_env": ADDRESS}, {"url_env": "A B"}, {"url_file": ADDRESS}, {"url_file": "a\0"}]
)
def test_what_may_be_an_address_under_another_key_is_refused_and_not_shown(wrong: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"notices\[0\]\.url_(env|file) is no .*not shown"
    ) as told:
        check_notices([NoticeConfig(**wrong)])
    assert "SECRET" not in str(told.value) and "A B" not in str(told.value)


def test_addresses_are_cut_short_wherever_they_are_recorded() -> None:
    places = [
        NoticeConfig(url=ADDRESS),  # type: ignore[arg-type]
        NoticeConfig(command=("curl", "--url=https://chat.example.org/KEY?a=b", "-d", "@-")),
    ]
    check_notices(places)
    facts = {"command": ["train.py", "--url=https://chat.example.org/KEY?a=b"], "given": [ADDRESS]}
    assert without_addresses(facts, places) == {
        "command": ["train.py", "--url=https://chat.example.org/..."],
        "given": ["https://hooks.example.org/..."],
    }
