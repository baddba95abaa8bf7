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
from dsx.telemetry.measured_rates import MeasuredRates
from dsx.telemetry.served_files import ByteBudget, ServedFiles

if TYPE_CHECKING:
    from dsx.comm.links.settings import LinkSettings
    from dsx.training.handle import Handle
    from dsx.training.saving import Saving


def tell_standing(
    handle: Handle,
    world: World,
    saving: Saving,
    link: LinkSettings | None,
    measured: MeasuredRates | None = None,
) -> None:
    """Let the cluster's first rank say how training stands, and hand out its records.

    Of several engines, the last one's. `measured` is what its line gave, where somebody knows.
    """
    if world.desk is None:
        return
    _serve_records(handle, world, link, None if measured is None else measured.line)

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


def _serve_records(
    handle: Handle, world: World, link: LinkSettings | None, measured: float | None
) -> None:
    """Let the cluster's first rank hand out its records to members who watch (`dsx watch`)."""
    if world.desk is None or link is None:
        return
    line = world.link

    def line_rate() -> float | None:
        rate = None if line is None else line.bytes_per_second
        limit = None if rate is None else rate * world.world_size
        return min((one for one in (limit, measured) if one is not None), default=None)

    members = [(name, link.address_of(m)) for m, name in enumerate(link.names)]
    files = ServedFiles(world.cluster_id, lambda: handle.run_dir, members, ByteBudget(line_rate))
    world.desk.verbs["records"] = files.answer
