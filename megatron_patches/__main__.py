"""Run an unmodified script across clusters: `python -m megatron_patches pretrain_gpt.py`.

    torchrun --nproc-per-node 8 ... -m megatron_patches pretrain_gpt.py \\
        --dsx-preset dilocox --dsx-num-clusters 2 --dsx-cluster-id 0 \\
        --dsx-rendezvous host:port  <Megatron's own flags>

The script is run as it is, in its own folder's import path, after megatron_patches has been
applied. `{cluster_id}` in any argument becomes this cluster's number, e.g. in
`--save checkpoints/{cluster_id}`.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from dsx.comm.world import current_world

_USAGE = "usage: python -m megatron_patches SCRIPT [--dsx-... VALUE] [Megatron's flags]"


def main(arguments: Sequence[str] | None = None) -> None:
    """Apply the patches and run the script; exits with a message for flags that are wrong."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(f"{_USAGE}\n\n{__doc__}")
        sys.exit(0 if given else 2)
    script, *rest = given
    if not os.path.isfile(script):
        sys.exit(f"megatron_patches: no script at {script}\n{_USAGE}")
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    sys.argv = [script, *rest]
    try:
        _apply()
    except (ValueError, RuntimeError) as error:  # of flags, of clusters, of the tree
        sys.exit(f"megatron_patches: {error}")
    world = current_world()
    if world is not None:
        sys.argv = [text.replace("{cluster_id}", str(world.cluster_id)) for text in sys.argv]
    runpy.run_path(script, run_name="__main__")


def _apply() -> None:
    import megatron_patches

    megatron_patches.apply()


if __name__ == "__main__":
    main()
