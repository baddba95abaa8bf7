"""Run an unmodified script across clusters: `python -m megatron_patches pretrain_gpt.py`.

    torchrun --nproc-per-node 8 ... -m megatron_patches pretrain_gpt.py \\
        --dsx-preset dilocox --dsx-num-clusters 2 --dsx-cluster-id 0 \\
        --dsx-rendezvous host:port  <Megatron's own flags>

The script is run as it is, in its own folder's import path, after megatron_patches has been
applied. `{cluster_id}` in any argument becomes this cluster's number, e.g. in
`--save checkpoints/{cluster_id}`. Without any flag of dsx it is run as ever: plain Megatron.

    python -m megatron_patches --check TREE

says in a second whether a Megatron-LM tree has all that is wrapped, and what is missing.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_patches.own_flags import USAGE, asks_for_help, listed


def main(arguments: Sequence[str] | None = None) -> None:
    """Apply the patches and run the script; exits with a message for flags that are wrong."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(f"{listed()}\n{__doc__}")
        sys.exit(0 if given else 2)
    if given[0] == "--check":
        sys.exit(_check(given[1:]))
    script, *rest = given
    if not os.path.isfile(script):
        _refuse(f"no script at {script}; give one that is there\nusage: {USAGE}")
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    sys.argv = [script, *rest]
    if asks_for_help(rest):
        _show_help(script)
        return
    try:
        _apply()
    except (ValueError, OSError) as error:  # of flags and files
        _refuse(str(error))
    except RuntimeError as error:  # of clusters, of the tree
        sys.exit(f"megatron_patches: {error}")
    _fill_in_cluster()
    runpy.run_path(script, run_name="__main__")


def _check(arguments: Sequence[str]) -> int:
    """Print what of a tree is served; return 1 where something is missing."""
    from megatron_patches.tree import check_tree, report

    if len(arguments) != 1:
        _refuse("--check takes one folder, of a Megatron-LM tree: --check TREE")
    try:
        found = check_tree(Path(arguments[0]))
    except (ValueError, OSError, SyntaxError) as error:
        _refuse(str(error))
    print(report(found))
    return int(any(one.wrong for one in found))


def _refuse(message: str) -> NoReturn:
    """End as a command does whose arguments are wrong."""
    print(f"megatron_patches: {message}", file=sys.stderr)
    sys.exit(2)


def _apply() -> None:
    import megatron_patches

    megatron_patches.apply()


def _fill_in_cluster() -> None:
    """Put this cluster's number where an argument stands for it, if there are clusters."""
    joined = sys.modules.get("dsx.comm.world")
    world = joined and joined.current_world()
    if world:
        sys.argv = [text.replace("{cluster_id}", str(world.cluster_id)) for text in sys.argv]


def _show_help(script: str) -> None:
    """Show Megatron's help with the flags of dsx in it; or these, where Megatron's fails."""
    try:
        _apply()
        runpy.run_path(script, run_name="__main__")
    except Exception as error:  # noqa: BLE001 - a tree's own help may end in anything
        said = (str(error).splitlines() or [""])[0]
        print(listed())
        sys.stdout.flush()
        print(
            f"megatron_patches: these are the flags of dsx alone, as the help of {script} itself "
            f"ends with {type(error).__name__}: {said}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
