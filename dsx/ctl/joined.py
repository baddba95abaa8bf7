"""A run that is watched from elsewhere: each cluster's records, over its link, by a member's key.

A thread for each address calls there, again and again, and copies what that cluster hands out. Who
answers tells the others' addresses, which are called, too; a cluster that cannot be called from
here is asked through one that can, as it is by `dsx ctl`. Who does not answer is told once.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsx.comm.address import link_address
from dsx.comm.links.desk import ASKED, visitor_rank
from dsx.comm.links.key_call import KeyCall, NoAnswer
from dsx.comm.links.keys import Keys
from dsx.ctl.mirror import Ask, ClusterMirror
from dsx.telemetry.top.show import plain

_POLL_SECONDS = 1.0
_CALL_SECONDS = 5.0
_REASON_SECONDS = 5.0  # in which it is found out why one does not answer
_AGAIN_SECONDS = 2.0  # until one is called again who does not answer
_ANSWER_SECONDS = 8.0  # whoever passes a question on waits 3 s for the other
_MOST_WAIT_SECONDS = 60.0  # for a turn, where there are many who ask
_MOST_MEMBERS = 1024
logger = logging.getLogger(__name__)
_NOT_YET = "it hands out no records yet: it does not train by now, or its dsx is an earlier one"
Tell = Callable[[str, str], object]


class NobodyAnswers(Exception):
    """None of the addresses leads to a cluster; the text says why, and what to do."""


class _Refused(Exception):
    """A cluster that is reached hands nothing out (yet); the text says why."""


class Joined:
    """Clusters that are followed into `folder`, until `close`.

    `tell` hears of each cluster that does not answer, and why; of no reason once it does.
    """

    def __init__(
        self,
        keys: Callable[[], Keys],
        addresses: Sequence[str],
        folder: Path,
        tell: Tell,
        seconds: float = _CALL_SECONDS,
    ) -> None:
        """`seconds` are those of one call, at most: until somebody answers it."""
        self._keys, self._folder, self._tell_all = keys, folder, tell
        self._seconds = min(seconds, _CALL_SECONDS)
        self._lock = threading.RLock()
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []
        self._called: dict[str, str] = {}  # addresses, and why nobody answers there
        self._standing: dict[int, str] = {}  # by cluster, the address where it answers now
        self._members: list[tuple[str, str | None]] = []
        self._mirrors: dict[int, ClusterMirror] = {}
        self._told: dict[str, str] = {}
        self._news = threading.Condition(self._lock)
        self._refusals: set[str] = set()  # addresses where calling again is in vain
        self._has_met = False
        for address in addresses:
            self._call(address)

    def wait(self, seconds: float) -> None:
        """Return once a cluster has answered; NobodyAnswers if none does."""
        until = time.monotonic() + seconds
        with self._news:
            while not self._has_met and time.monotonic() < until + (
                _REASON_SECONDS if "" in self._called.values() else 0.0
            ):
                if self._called.keys() <= self._refusals:
                    break
                self._news.wait(0.1)
            if not self._has_met:
                whys = [why or f"{place}: no answer" for place, why in self._called.items()]
                raise NobodyAnswers("; ".join(dict.fromkeys(whys)))

    def close(self) -> None:
        """End all calls."""
        self._ends.set()
        for thread in [*self._threads]:
            thread.join(_CALL_SECONDS)

    def _call(self, address: str) -> None:
        """Call at an address from now on, if that is not done."""
        with self._lock:
            if address in self._called or len(self._called) >= _MOST_MEMBERS:
                return
            self._called[address] = ""
            thread = threading.Thread(
                target=self._follow, args=(address,), name="dsx-watch-join", daemon=True
            )
            self._threads.append(thread)
        thread.start()

    def _follow(self, address: str) -> None:
        """Follow whoever is at an address, until the end."""
        rank = visitor_rank()
        while not self._ends.is_set():
            call, why, is_refusal = None, "", False
            try:
                call = KeyCall(self._keys(), address, rank, self._seconds, self._ends.is_set)
                if not self._takes(call, address):
                    return
                self._tell(address, "")
                self._copy(call)
            except NoAnswer as error:
                why = "; ".join(filter(None, (str(error), error.fix)))
                is_refusal = error.is_refusal
            except (ValueError, OSError) as error:
                why = str(error)
            except Exception as error:  # whatever it is, it is told, and the cluster called again
                logger.exception("following %s", address)
                why = f"{type(error).__name__}: {error}"
            finally:
                if call is not None:
                    call.close()
            with self._news:
                self._standing = {m: at for m, at in self._standing.items() if at != address}
                self._called[address] = why
                self._refusals -= {address}
                self._refusals |= {address} if is_refusal else set()
                self._news.notify_all()
            if self._members and not self._ends.is_set() and not self._is_asked_for(address):
                self._tell(self._name_at(address), why)
            self._ends.wait(_AGAIN_SECONDS)

    def _takes(self, call: KeyCall, address: str) -> bool:
        """Enter who has answered; False if it is followed at another address."""
        with self._news:
            if self._standing.get(call.met.cluster, address) != address:
                self._called[address] = ""
                return False
            self._standing[call.met.cluster] = address
            self._called[address], self._has_met = "", True
            self._news.notify_all()
        return True

    def _copy(self, call: KeyCall) -> None:
        """Copy a cluster's records, and theirs for whom it is asked; NoAnswer ends it."""
        own = call.met.cluster
        while not self._ends.is_set():
            self._pull(call, own, f"{call.met.name} (cluster {own})")
            if own == min(self._standing, default=own):
                for cluster in self._unreached():
                    name, address = self._members[cluster]
                    direct = "" if address is None else self._called.get(address, "")
                    self._pull(call, cluster, f"{name} (cluster {cluster})", direct)
            self._ends.wait(_POLL_SECONDS)

    def _unreached(self) -> list[int]:
        """Return the clusters that have no address, or do not answer there."""
        with self._lock:
            return [
                m
                for m, (_, address) in enumerate(self._members)
                if m not in self._standing and (address is None or self._called.get(address))
            ]

    def _pull(self, call: KeyCall, cluster: int, name: str, direct: str = "") -> None:
        """Copy what is new of a cluster, and tell where that cannot be; NoAnswer passes through."""
        mirror = self._mirrors.setdefault(cluster, ClusterMirror(self._folder, cluster))
        if not mirror.lock.acquire(blocking=False):
            return  # it is being copied by way of another cluster
        try:
            listing = mirror.pull(self._asking(call, cluster))
        except _Refused as error:
            through = "" if cluster == call.met.cluster else f"asked through {call.met.name}: "
            self._tell(name, "; ".join(filter(None, (direct, f"{through}{error}"))))
            return
        except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError) as error:
            self._tell(name, f"what it hands out cannot be copied: {error}")
            return
        finally:
            mirror.lock.release()
        self._tell(name, "")
        if cluster == call.met.cluster:
            self._learn(call, listing.members)

    def _learn(self, call: KeyCall, members: list[tuple[str, str | None]]) -> None:
        """Take the members, as one that has shown its key tells them, and call the others."""
        own = call.met.cluster
        if not own < len(members) <= _MOST_MEMBERS or members[own][0] != call.met.name:
            raise NoAnswer(f"{call.met.name} says that it is cluster {own}, which is another's")
        with self._lock:
            if self._members and [n for n, _ in self._members] != [n for n, _ in members]:
                raise NoAnswer(
                    f"{call.met.name} at {call.address} is of another run, of {len(members)} "
                    "clusters, than the others",
                    "give the addresses of one run in --join",
                )
            self._members = members
        for cluster, (_, address) in enumerate(members):
            if address is None or cluster in self._standing:
                continue
            try:
                link_address(address)
            except ValueError as error:
                self._tell(f"{members[cluster][0]} (cluster {cluster})", str(error))
            else:
                self._call(address)

    def _asking(self, call: KeyCall, cluster: int) -> Ask:
        """Return how a cluster is asked, which waits for its turn."""

        def ask(request: Mapping[str, Any]) -> Mapping[str, Any]:
            body = ASKED + json.dumps({"verb": "records", "to": cluster, **request}).encode()
            until = time.monotonic() + _MOST_WAIT_SECONDS
            while time.monotonic() < until:
                told: Any = json.loads(call.ask(body, _ANSWER_SECONDS))
                if "error" in told:
                    raise _Refused(str(told["error"])[:400])
                answer = told["answers"][str(cluster)]
                if "error" in answer:
                    why = str(answer["error"])[:400]
                    raise _Refused(_NOT_YET if "'records' is not served" in why else why)
                wait = answer.get("wait_seconds")
                if not isinstance(wait, int | float):
                    return answer
                if self._ends.wait(min(max(wait, 0.05), 5.0)):
                    raise NoAnswer("this watch ends")
            raise _Refused(
                f"others ask it so much that no turn has come in {_MOST_WAIT_SECONDS:g} s"
            )

        return ask

    def _is_asked_for(self, address: str) -> bool:
        """Whether another cluster is asked for the one there, and tells whether that answers."""
        return bool(self._standing) and any(at == address for _, at in self._members)

    def _name_at(self, address: str) -> str:
        """Return the name of whoever is, or was, at an address."""
        for cluster, (name, at) in enumerate(self._members):
            if at == address:
                return f"{name} (cluster {cluster})"
        return address

    def _tell(self, who: str, why: str) -> None:
        who, why = plain(who[:600]), plain(why[:600])
        with self._lock:
            before = self._told.get(who, "")
            self._told[who] = why
        if bool(before) != bool(why):  # once, and not with each reason anew
            self._tell_all(who, why)
