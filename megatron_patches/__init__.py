"""What Megatron-LM's training loop needs to train across clusters, without a change to its tree.

`apply()` before `pretrain()` is all: it reads the `--dsx-*` flags of the command line, meets the
other clusters, and wraps some functions of `megatron.training`. docs/megatron.md tells
what each module does. `python -m megatron_patches pretrain_gpt.py ...` calls it for an unmodified
script.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_patches.run import Run

__all__ = ["apply"]


def apply(arguments: Sequence[str] | None = None) -> None:
    """Join the clusters' run and wrap `megatron.training`; once, before Megatron initialises.

    `arguments` are the command line's by default. With `--help` among them the flags are only
    shown. ConfigError for flags that are wrong, PeerLost for a cluster that does not come,
    UnknownMegatron for a tree in which something to be wrapped is missing or of another shape.
    """
    from megatron_patches import arguments as flags
    from megatron_patches import (
        checkpoint,
        data,
        model_and_optimizer,
        training_end,
        validation,
    )

    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        flags.show()
        return
    run = Run.join(given)
    for module in (flags, model_and_optimizer, checkpoint, data, validation, training_end):
        module.patch(run)
