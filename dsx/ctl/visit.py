"""A visit to a run that goes on: one question to whichever cluster answers, with a member's key."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import TimeoutError as WaitedTooLong
from dataclasses import dataclass
from typing import Any

from dsx.comm.links.desk import ASKED, visitor_rank
from dsx.comm.links.link import Link
from dsx.comm.links.settings import LinkSettings
from dsx.comm.links.trust import open_link

_LOOK_SECONDS = 0.1
_ANSWER_SECONDS = 8.0  # whoever is asked asks the others, and waits 3 s for them
_RUNS_NOT = "is the run on? `dsx ctl` reaches members that have an address in link.members"


class NobodyAnswers(Exception):
    """No cluster of the run could be asked; the text says who was tried, where, and what to do."""


@dataclass(frozen=True)
class Who:
    """A member as it was tried."""

    name: str
    address: str
    trouble: str


class Visit:
    """A connection to a run, as a member. Not for several threads."""

    def __init__(self, settings: LinkSettings, own: int, seconds: float) -> None:
        """`own`: which cluster's key is used. Waits up to `seconds` for one that answers.

        NobodyAnswers if there is none; ValueError for what is wrong with keys or addresses.
        """
        addresses = {m: settings.address_of(m) for m in range(len(settings.names))}
        self._called = {m: address for m, address in addresses.items() if address is not None}
        if not self._called:
            raise ValueError(
                "no member in link.members has an address, so nobody can be called: those meet at "
                "a relay, which dsx ctl does not go through; end such a run by a signal"
            )
        self._settings = settings
        self._link: Link = open_link(settings, own, visitor_rank(), 1, host="127.0.0.1")
        try:
            for member, address in self._called.items():
                self._link.expect(member, 0, address)
            self._met = self._meet(seconds)
        except BaseException:
            self.close()
            raise

    def ask(self, verb: str, to: int | None = None, **operands: Any) -> dict[int, dict[str, Any]]:
        """Return what clusters answer, by id: all, or the one that a question is for.

        An answer with "error" says why there is none. NobodyAnswers if whoever is asked is gone.
        """
        body = ASKED + json.dumps({"verb": verb, "to": to, **operands}).encode()
        troubles: dict[int, str] = {}
        for member in sorted(self._called, key=lambda m: m != self._met):
            if self._link.process_at((member, 0)) is None:
                continue
            asked = self._link.ask((member, 0), body)
            try:
                told: Mapping[str, Any] = json.loads(asked.result(_ANSWER_SECONDS))
            except WaitedTooLong:
                asked.cancel()
                troubles[member] = f"it has not answered within {_ANSWER_SECONDS:g} s"
                continue
            except (RuntimeError, ValueError) as error:
                troubles[member] = str(error)
                continue
            if "error" in told:
                raise ValueError(f"cluster {member}: {told['error']}")
            self._met = member
            return {int(id): answer for id, answer in told["answers"].items()}
        raise NobodyAnswers(self._tell(troubles))

    @property
    def met(self) -> int:
        """The cluster that was asked last."""
        return self._met

    def close(self) -> None:
        """End the connection."""
        self._link.close()

    def _meet(self, seconds: float) -> int:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for member in self._called:
                if self._link.process_at((member, 0)) is not None:
                    return member
            time.sleep(_LOOK_SECONDS)
        raise NobodyAnswers(self._tell({}, seconds))

    def _tell(self, troubles: Mapping[int, str], seconds: float | None = None) -> str:
        names = self._settings.names
        tried: list[str] = []
        for member, address in self._called.items():
            trouble = troubles.get(member) or self._link.why_gone((member, 0))
            trouble = trouble or self._link.trouble((member, 0)) or "nothing was heard of it"
            tried.append(f"{names[member]} (cluster {member}) at {address}: {trouble}")
        within = "" if seconds is None else f" within {seconds:g} s"
        return f"nobody answers{within}: {'; '.join(tried)}; {_RUNS_NOT}"
