"""What becomes of checkpoints: how many stay, who writes them when, where copies go."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from dsx.config.files import ConfigError

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
_OF_REMOTE = ("remote_rate_mbit", "remote_end_seconds")
REMOTE = "dsx.checkpoints.remote"
_BETWEEN = re.compile(r"::(?=[a-z][a-z0-9+.-]*(?:://|::|$))", re.I)  # no IPv6 address, no password
_PART = re.compile(r"([a-z][a-z0-9+.-]*)(?:://(.*))?", re.I | re.S)
_USER_AND_PASSWORD = re.compile(r"[^/]*:.*@", re.S)
_OF_THIS_MACHINE = ("file", "local", "memory")  # paths of which hold what they like
_OF_TOKENS = ("github",)  # where the name before an "@" may be one


class CheckpointsConfig(BaseModel):
    """What becomes of checkpoints that are saved."""

    model_config = _STRICT

    keep: int | None = Field(default=None, ge=1)
    """How many good checkpoints that all clusters hold are kept; older ones in the directory of a
    save are deleted, but for those of a finished model. null: all. DeepSpeed's, those of
    `TorchCheckpoints`, and with Megatron the outer state beside its own."""

    beside_training: bool = False
    """Whether the outer state of a save is written by a thread while training goes on, from copies
    of what changes meanwhile (`dsx memory --json` says how much): by DeepSpeed's
    `engine.save_checkpoint`, beside Megatron's own, by the Trainer, Lightning and Accelerate, and
    by `TorchCheckpoints.save`, which so writes model and optimizers, too, as Lightning does of one
    file. All else is written at once: by `handle.save`, by an order, as a run ends."""

    remote: Annotated[str, Field(min_length=1)] | None = None
    """Where checkpoints of DeepSpeed's `engine.save_checkpoint`, of Megatron, `TorchCheckpoints`,
    the Trainer, Lightning and Accelerate are copied to beside training, and fetched from where a
    cluster lacks one: a URL that fsspec knows, such as "s3://bucket/run"; each cluster may have
    another. Needs the extra `remote`, and s3fs for s3, gcsfs for gs."""

    remote_rate_mbit: float | None = Field(default=None, gt=0, le=1e7)
    """The most that a cluster copies there, in Mbit/s; null: what the line takes. It may be the
    line of the links, whose `link.rate_mbit` does not count it."""

    remote_end_seconds: float = Field(default=600.0, ge=0, le=3e7)
    """How long the end of a run waits for its last checkpoint to be copied, in seconds; not where
    it is told to end by a signal."""

    @property
    def is_later(self) -> bool:
        """Whether something is done with a checkpoint once its save has returned; alike in all."""
        return self.beside_training or self.remote is not None

    def common(self) -> dict[str, Any]:
        """Return what has to be the same in all clusters: which copy, not where to."""
        own = self.model_dump(exclude={"remote", *_OF_REMOTE})
        return {**own, "copies to a remote place": self.remote is not None}


def check_checkpoints(checkpoints: CheckpointsConfig) -> None:
    """Raise ConfigError for a remote place that cannot be, and for keys that have no effect."""
    if checkpoints.remote is not None:
        check_url(checkpoints.remote, REMOTE)
        return
    for name in _OF_REMOTE:
        value = getattr(checkpoints, name)
        if value != type(checkpoints).model_fields[name].default:
            raise ConfigError(
                f"dsx.checkpoints.{name}={value!r} has no effect without checkpoints.remote: set "
                "that, or leave it out"
            )


def refuse_of_script(checkpoints: CheckpointsConfig) -> None:
    """Raise ConfigError for what is done to tags, where a script in plain PyTorch saves itself."""
    given = {"keep": checkpoints.keep, "remote": checkpoints.remote}
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"dsx.checkpoints.{name}={value!r} has no effect here: the script writes its own "
                "checkpoints; save with dsx.TorchCheckpoints(handle), made right behind "
                "dsx.attach, or leave it out"
            )


def check_url(url: str, setting: str) -> None:
    """Raise ConfigError for what is no URL, or may hold a secret, which records would show.

    A chain of URLs ("simplecache::s3://bucket/run") is looked at part by part. No message shows
    what was given.
    """
    parts = [_PART.fullmatch(part) for part in _BETWEEN.split(url)]
    if "://" not in url or None in parts:
        raise ConfigError(
            f"{setting} must be a URL that fsspec knows; use one such as s3://bucket/run or "
            "file:///mnt/share/run"
        )
    for part in parts:
        assert part is not None
        scheme, rest = part[1].lower(), part[2] or ""
        if scheme not in _OF_THIS_MACHINE and _holds_secret(scheme, rest):
            raise ConfigError(
                f"{setting} has a password in it, or what may be one (of {scheme}://: '@' behind "
                "a name and ':', '?' or '#'), which the run's records would show: leave it out, "
                "and give it as that service's library takes it (an environment variable, a file)"
            )


def _holds_secret(scheme: str, rest: str) -> bool:
    is_token = scheme in _OF_TOKENS and "@" in rest
    return is_token or "?" in rest or "#" in rest or _USER_AND_PASSWORD.match(rest) is not None
