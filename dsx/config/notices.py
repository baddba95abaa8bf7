"""`metrics.notices`: who is told what happens in a run. Addresses are secrets, and never shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from dsx.config.files import ConfigError
from dsx.telemetry.notices.hooks import require_web_address, shown_address
from dsx.telemetry.notices.notice import KINDS, Form, Kind

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IN_WORD = re.compile(r"https?://[^\s\"'<>]+")
_Text = Annotated[str, Field(min_length=1)]
_TARGETS = ("url", "url_env", "url_file", "command")


class NoticeConfig(BaseModel):
    """One place that is told, and of what."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    url: Annotated[SecretStr, Field(min_length=1)] | None = None
    """The address that a notice is posted to. It is a secret, and neither logged nor recorded; one
    of these four keys says where notices go."""

    url_env: _Text | None = None
    """The name of a variable in the environment of rank 0 of each cluster that holds the address,
    to keep it out of the configuration."""

    url_file: _Text | None = None
    """A file whose only line is the address, on the host of rank 0 of each cluster."""

    command: Annotated[tuple[_Text, ...], Field(min_length=1)] | None = None
    """A command and its arguments, run without a shell on the host of rank 0: it has the notice as
    JSON on its standard input, `NOTICE_KIND` and `NOTICE_TEXT` in its environment, and 10 s."""

    form: Form = "json"
    """What is posted: all of it as a JSON object, or the text in the form of Slack's incoming
    webhooks, which Mattermost and others take, too."""

    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] = tuple(KINDS)
    """Of what this place is told."""

    per_hour: int = Field(default=20, ge=1, le=1000)
    """How many notices go there in an hour at most; the next one says how many were held back. How
    a run ends is told in any case."""


def check_notices(notices: Sequence[NoticeConfig]) -> None:
    """Raise ConfigError for a place that is none, or a key that would have no effect."""
    for index, notice in enumerate(notices):
        where = f"dsx.metrics.notices[{index}]"
        given = [key for key in _TARGETS if getattr(notice, key) is not None]
        if len(given) != 1:
            told = f"has {' and '.join(given)}" if given else "has none of them"
            raise ConfigError(
                f"{where} must have one of {', '.join(_TARGETS)}, which says where notices go, and "
                f'{told}; write, for example, {{"url_env": "SLACK_HOOK"}}'
            )
        if notice.url is not None:
            try:
                require_web_address(notice.url.get_secret_value())
            except ValueError as error:
                raise ConfigError(f"{where}.url {error}") from None
        if notice.command is not None and "form" in notice.model_fields_set:
            raise ConfigError(
                f"{where}.form={notice.form!r} has no effect on a command, which has JSON on its "
                "standard input; leave it out"
            )
        if notice.url_env is not None and not _VARIABLE.fullmatch(notice.url_env):
            raise ConfigError(
                f"{where}.url_env is no name of a variable (it is not shown here, as it may be the "
                'address itself); write a name such as "SLACK_HOOK", and the address in it'
            )
        if notice.url_file is not None and ("://" in notice.url_file or "\0" in notice.url_file):
            raise ConfigError(
                f"{where}.url_file is no path of a file (it is not shown here, as it may be the "
                'address itself); write a path such as "/run/secrets/hook", and the address there'
            )


def without_addresses(value: Any, notices: Sequence[NoticeConfig]) -> Any:
    """Return plain values with the addresses of notices cut short wherever they stand in a text."""
    urls = [one.url.get_secret_value() for one in notices if one.url is not None]
    words = [word for one in notices for word in one.command or ()]
    urls += [url for word in words for url in _IN_WORD.findall(word)]
    if not urls:
        return value
    if isinstance(value, str):
        for url in urls:
            value = value.replace(url, shown_address(url))
        return value
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value).items()
        return {key: without_addresses(one, notices) for key, one in entries}
    if isinstance(value, list | tuple):
        return [without_addresses(one, notices) for one in cast("list[Any]", value)]
    return value
