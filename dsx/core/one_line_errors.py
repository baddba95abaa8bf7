"""A mistake of the user ends a command with one line on stderr and exit status 2."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import typer

_P = ParamSpec("_P")
_R = TypeVar("_R")


def one_line_errors(
    command: str, *kinds: type[Exception]
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate the function of `dsx <command>`: its ValueError, OSError and `kinds` end it."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return function(*args, **kwargs)
            except (typer.Exit, BrokenPipeError):  # `| head` has read enough: click ends it
                raise
            except (ValueError, OSError, *kinds) as error:
                typer.echo(f"dsx {command}: {error}", err=True)
                raise typer.Exit(2) from error

        return run

    return decorate
