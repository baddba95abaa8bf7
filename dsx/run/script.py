"""`python -m dsx.run`, from a rank's command line to the end of its script.

The world is made before the script runs where its "dsx" block shows in the launch, since most
frameworks initialise torch.distributed as soon as they can; otherwise when the script gives its
DeepSpeed config to one of the functions that are replaced here. At the script's end what it has
trained is finished, and a script that has trained nothing across clusters is an error.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from dsx.comm.world import current_world
from dsx.config.files import ConfigError
from dsx.core.transport import PeerLost
from dsx.run.arguments import USAGE, CommandLine, split, with_cluster_id
from dsx.run.block import RunBlock
from dsx.run.environment import adopt_scheduler
from dsx.run.frameworks import follow_frameworks
from dsx.run.imports import after_import
from dsx.run.plain_torch import attach_plain_torch
from dsx.run.route import watch_first_step
from dsx.run.samplers import replace_sampler
from dsx.run.session import RouteNotTaken, Session


def main(given: Sequence[str]) -> int:
    """Run a script across clusters; return the status to exit with: 2 for a mistake in the launch.

    What the script raises, it raises here.
    """
    if list(given) in (["--help"], ["-h"]):
        print(USAGE)
        return 0
    try:
        line = split(given)
        adopt_scheduler(os.environ)
        session = Session(RunBlock(line.flags, os.environ, line.arguments))
        world = session.join()
        arguments = with_cluster_id(line.arguments, world.cluster_id if world else None)
    except (ValueError, RuntimeError, PeerLost) as error:
        return _refuse(error)
    replace_sampler(session)
    watch_first_step(session)
    attach_plain_torch(session)
    after_import(follow_frameworks(session))
    try:
        status = _run(line, arguments)
        if status:
            return status
        session.require_engine("the script has ended")
    except (RouteNotTaken, ConfigError) as error:
        return _refuse(error)
    session.finish()
    return 0


def _run(line: CommandLine, arguments: Sequence[str]) -> int:
    """Run the script as Python does; return the status that it exits with."""
    sys.argv = [line.script, *arguments]
    try:
        if line.is_module:
            runpy.run_module(line.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(line.script))
            runpy.run_path(line.script, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or ended.code == 0:
            return 0
        if not isinstance(ended.code, int):
            raise
        return ended.code
    return 0


def _refuse(error: Exception) -> int:
    world = current_world()
    where = f" cluster {world.cluster_id}, rank {world.rank}:" if world else ""
    print(f"dsx.run:{where} {error}", file=sys.stderr, flush=True)
    return 2
