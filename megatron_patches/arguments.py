"""The flags in Megatron's own `--help` and in the dump of arguments it prints at the start.

Wraps `parse_args` where it is defined and where it has been imported by name. Every `--dsx-*`
argument then shows what is in force, the preset's values included.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any

from dsx.config.flags import add_flags, show_resolved
from megatron_patches import probe
from megatron_patches.run import Run

_USERS = ("megatron.training.arguments", "megatron.training.initialize")


def patch(run: Run) -> None:
    """Let Megatron's parser know the flags."""
    _wrap(lambda namespace: show_resolved(namespace, run.config))


def show() -> None:
    """The same for `--help`, which needs no clusters."""
    _wrap(lambda namespace: None)


def _wrap(after: Callable[[argparse.Namespace], None]) -> None:
    original = probe.function(probe.module(_USERS[0]), "parse_args", ["extra_args_provider"])
    signature = inspect.signature(original)

    def parse_args(*args: Any, **kwargs: Any) -> argparse.Namespace:
        call = signature.bind(*args, **kwargs)
        provider = call.arguments.get("extra_args_provider")

        def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            add_flags(parser)
            return parser if provider is None else provider(parser)

        call.arguments["extra_args_provider"] = provide
        namespace = original(*call.args, **call.kwargs)
        after(namespace)
        return namespace

    for name in _USERS:
        user = probe.module(name)
        if getattr(user, "parse_args", None) is original:
            user.parse_args = parse_args
