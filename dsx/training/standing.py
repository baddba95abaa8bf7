"""How a cluster's training stands, for members' tools that ask while it goes on (`dsx ctl`).

Asked from another thread than training's: all that is read is a number, or copied at once.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from dsx.comm.versions import own_versions
from dsx.comm.world import World
from dsx.outer.transfer import Transfer

if TYPE_CHECKING:
    from dsx.training.handle import Handle
    from dsx.training.saving import Saving


def tell_standing(handle: Handle, world: World, saving: Saving) -> None:
    """Let the cluster's first rank say how training stands; of several engines, the last one's."""
    if world.desk is None:
        return

    def facts() -> dict[str, Any]:
        loop = handle.loop
        history, in_flight = loop.history, [*loop.in_flight]
        run = handle.run_dir
        return {
            "state": handle.preemption.state if not handle.is_finished else "finished",
            "cluster": world.cluster_id,
            "session": world.session,
            "step": history.step,
            "round": min(history.rounds, default=0),
            "under_way": [
                {"fragment": t.fragment, "launched": t.launched, "is_here": t.pending.has_arrived}
                for t in in_flight
                if isinstance(t, Transfer)
            ],
            "saved": saving.last_complete,
            "run": None if run is None else str(run.absolute()),
            "versions": own_versions(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }

    world.desk.facts.append(facts)
