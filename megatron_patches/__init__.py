"""What Megatron-LM's training loop needs to train across clusters, without a change to its tree.

`apply()` before `pretrain()` is all: it reads the `--dsx-*` flags of the command line, meets the
other clusters, and wraps some functions of `megatron.training`. Without such a flag it does
nothing. docs/megatron.md tells what each module does. `python -m megatron_patches pretrain_gpt.py
...` calls it for an unmodified script.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_patches.own_flags import asks_for_help, is_off

__all__ = ["apply"]


def apply(arguments: Sequence[str] | None = None) -> None:
    """Join the clusters' run and wrap `megatron.training`; once, before Megatron initialises.

    `arguments` are the command line's by default. With `--help` among them the flags are only
    shown; without a flag of dsx nothing is wrapped, and a line says so. What dsx does not serve is
    refused before the clusters wait for each other: ValueError names the flag. ConfigError for
    flags that are wrong, PeerLost for a cluster that does not come, UnknownMegatron for a tree in
    which something to be wrapped is missing or of another shape.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if asks_for_help(given):
        from megatron_patches import arguments as flags

        flags.show()
    elif not is_off(given):
        _join_and_wrap(given)
    elif os.environ.get("RANK", "0") == "0":
        print("megatron_patches: no --dsx-* flag is given: plain Megatron, nothing is patched")


def _join_and_wrap(given: Sequence[str]) -> None:
    from megatron_patches.refusals import refuse_at_once

    refuse_at_once(given)
    from megatron_patches import arguments as flags
    from megatron_patches import (
        checkpoint,
        data,
        losses,
        model_and_optimizer,
        synchronous,
        training_end,
        validation,
    )
    from megatron_patches.run import Run

    run = Run.join(given)
    of_loop = data, losses, validation, training_end
    for module in (flags, model_and_optimizer, checkpoint, synchronous, *of_loop):
        module.patch(run)
