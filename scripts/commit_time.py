"""How long a commit takes: told by each cluster to each other one, or as an entry of the log.

    dsx bench line --mbit 100 --latency-ms 20 -- python scripts/commit_time.py \
        --clusters {clusters} --cluster {cluster} --rendezvous {rendezvous}

In a run ranks tell each other (outer/commit.py), and the log says who is a member alone.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import time
from datetime import timedelta
from typing import Any

import torch

from dsx.comm.address import parse_address
from dsx.comm.links.group import LinkGroup
from dsx.comm.links.link import Link
from dsx.comm.links.switch import LinkOptions
from dsx.comm.membership.actions import Applied, Send
from dsx.comm.membership.entries import Commit, Contributor
from dsx.comm.membership.messages import decode, encode
from dsx.comm.membership.participant import Participant
from dsx.core.membership import Seat

SOON = timedelta(seconds=30)
TICK_SECONDS = 0.1


def meet(cluster: int, rendezvous: str) -> tuple[Link, dict[int, int]]:
    """Return the link of two clusters that have met, and the incarnations of both."""
    host, port = parse_address(rendezvous)
    link = Link(cluster, 0, None, LinkOptions(host="0.0.0.0", port=0 if cluster else port))
    link.expect(1 - cluster, 0, f"{host}:{port}" if cluster else None)
    link.wait_for(1 - cluster, 0, 60)
    peer = link.process_at((1 - cluster, 0))
    assert peer is not None
    return link, {cluster: link.incarnation, 1 - cluster: peer}


def by_ranks(link: Link, count: int) -> list[float]:
    """Tell 64 bits and hear 64 bits, as a transfer's last message does."""
    group, seconds = LinkGroup(link, "commits", Seat.of(link.cluster_id, 2)), []
    own, theirs = (torch.zeros(1, dtype=torch.int64) for _ in range(2))
    for number in range(count):
        began = time.monotonic()
        arriving = group.recv([theirs], 1 - link.cluster_id, number)
        group.send([own], 1 - link.cluster_id, number).wait(SOON)
        arriving.wait(SOON)
        seconds.append(time.monotonic() - began)
    return seconds


def by_the_log(link: Link, incarnations: dict[int, int], count: int) -> list[float]:
    """Report a digest, and wait until the commit is applied here."""
    inbox: queue.Queue[bytes] = queue.Queue()

    def receive(asker: Any, body: bytes, answer: Any) -> None:
        answer(b"")
        inbox.put(body[1:])

    link.serve(receive, b"L")
    me, peer = link.cluster_id, 1 - link.cluster_id
    everyone = tuple(Contributor(id, incarnations[id]) for id in (0, 1))
    log = Participant(everyone[me], (0, 1))
    log.begin(everyone)
    log.up(peer, incarnations[peer])
    ticked, done, seconds, began = time.monotonic(), -1, [], 0.0

    def act() -> None:
        nonlocal done
        while log.actions:
            action = log.actions.popleft()
            if isinstance(action, Send):
                link.ask((peer, 0), b"L" + encode(action.message))
            elif isinstance(action, Applied) and isinstance(action.entry, Commit):
                done = action.entry.number
                seconds.append(time.monotonic() - began)

    until = time.monotonic() + 60
    number = -1
    while len(seconds) < count and time.monotonic() < until:
        if done == number and log.state.epoch > 1:  # once one leads, it begins with a view
            number, began = number + 1, time.monotonic()
            log.done("lane", number, log.state.epoch, "d31f")
            act()
        left = ticked + TICK_SECONDS - time.monotonic()
        try:
            log.receive(peer, incarnations[peer], decode(inbox.get(timeout=max(left, 0.001))))
        except queue.Empty:
            ticked = time.monotonic()
            log.tick()
        act()
    link.ask((peer, 0), b"L")  # nothing: what was asked before has left
    return seconds


def main() -> None:
    """Measure both, and print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", type=int, required=True)
    parser.add_argument("--clusters", type=int, choices=[2], required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--count", type=int, default=100)
    given = parser.parse_args()
    link, incarnations = meet(given.cluster, given.rendezvous)
    by_ranks(link, 5)
    ranks = by_ranks(link, given.count)
    log = by_the_log(link, incarnations, given.count)
    by_ranks(link, 5)  # nobody leaves before the other has its last entry
    if len(log) < given.count:
        raise SystemExit(f"{len(log)} of {given.count} entries came in time")
    print(
        f"cluster {given.cluster}: told by ranks {1000 * statistics.median(ranks):.1f} ms, an "
        f"entry of the log {1000 * statistics.median(log):.1f} ms; medians of {given.count}",
        flush=True,
    )
    time.sleep(0.5)
    link.close()


if __name__ == "__main__":
    main()
