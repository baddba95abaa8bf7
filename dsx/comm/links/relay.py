"""Where two sites meet that can only call out: joins a caller with a site that has registered.

A site opens one connection, says which ranks it has, and signs a fresh challenge with its member's
key. Whoever calls one of these ranks (SOCKS5) waits until the site has called back with the token
that the relay gave it for this caller; then the two are joined. The relay holds public keys alone,
and cannot read what it forwards, which is encrypted from rank to rank. Nothing but connections that
came in is ever joined: it connects to nobody.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

from dsx.comm.links import greetings
from dsx.comm.links.entrance import Caller, Entrance, Limits, Talk
from dsx.comm.links.event_loop import EventLoop, Timer
from dsx.comm.links.greetings import (
    BadGreeting,
    Message,
    ToName,
    Wanted,
    greet_relay,
    member_in,
    pack_message,
    read_message,
    socks_reply,
    what_is_signed,
)
from dsx.comm.links.joined import Bucket, Joined, Pipes
from dsx.comm.links.key_lines import PublicKey
from dsx.comm.links.members import MembersFolder
from dsx.comm.links.primitives import is_signed
from dsx.comm.links.relay_site import ALIVE_SECONDS, NONCE_BYTES, SILENT_SECONDS, read_names

_LOOK_SECONDS = 1.0
_MOST_NAMES = 1024
_MOST_SITES = 256  # of all members together: hosts that have registered
_MOST_WAITING = 256  # callers of one site that it has not called back for
_TOKEN_BYTES = 16


class Site:
    """A host of a member that has registered, over one connection; `gone` is called once."""

    def __init__(
        self,
        loop: EventLoop,
        connection: socket.socket,
        key: PublicKey,
        names: list[str],
        host: str,
        gone: Callable[[Site, str], object],
        cannot: Callable[[str, str], object],
    ) -> None:
        self.key, self.names, self.host = key, names, host
        self.num_waiting = 0
        self._loop, self._connection, self._gone, self._cannot = loop, connection, gone, cannot
        self._is_open = True
        self._silent: Timer | None = None
        self._listen()
        loop.after(ALIVE_SECONDS, self._keep_alive)

    def send(self, data: bytes) -> None:
        """Say something short; a site that does not take it is gone."""
        try:
            if self._is_open and self._connection.send(data) != len(data):
                self.close("it does not read what it is told")
        except OSError as error:
            self.close(error.strerror or str(error))

    def close(self, why: str) -> None:
        """End the connection."""
        if self._is_open:
            self._is_open = False
            self._talk.stop()
            if self._silent is not None:
                self._silent.cancel()
            self._connection.close()
            self._gone(self, why)

    def _listen(self) -> None:
        if self._silent is not None:
            self._silent.cancel()
        silent = f"silent for {SILENT_SECONDS:.0f} s"
        self._silent = self._loop.after(SILENT_SECONDS, lambda: self.close(silent))
        self._talk = Talk(self._loop, self._connection, read_message(), self._told)

    def _told(self, message: Message | None, error: Exception | None) -> None:
        try:
            if message is None:
                raise BadGreeting(str(error))
            if message.kind == greetings.CANNOT:
                self._cannot(message.field("token", str), message.field("why", str))
            elif message.kind != greetings.ALIVE:
                raise BadGreeting("a message that no site sends")
        except BadGreeting as problem:
            self.close(str(problem))
        else:
            self._listen()

    def _keep_alive(self) -> None:
        if self._is_open:
            self.send(pack_message(greetings.ALIVE))
            self._loop.after(ALIVE_SECONDS, self._keep_alive)


class Relay:
    """A listener, the sites that have registered, and what is joined; `say` gets a line of text.

    ValueError if the folder of keys cannot be used.
    """

    def __init__(
        self,
        loop: EventLoop,
        listener: socket.socket,
        directory: Path,
        limits: Limits,
        say: Callable[[str], object],
    ) -> None:
        self._loop, self._limits, self._say = loop, limits, say
        self._members = MembersFolder(directory)
        if problems := self._members.look():
            raise ValueError(problems[0])
        self._told: set[str] = set()
        self._sites: dict[str, Site] = {}  # by the name of a rank
        self._waiting: dict[str, tuple[Caller, Site]] = {}  # by token
        self._joined: dict[Joined, Site] = {}  # with who was called
        self.bucket = Bucket(loop)
        self._pipes = Pipes()
        self.num_bytes = 0
        self.num_joined_ever = 0
        self._entrance = Entrance(loop, listener, limits, greet_relay, self._wanted)
        loop.after(_LOOK_SECONDS, self._look)

    @property
    def members(self) -> list[str]:
        """Return who may register."""
        return sorted(self._members.standing.keys)

    @property
    def num_joined(self) -> int:
        """Return how many callers are joined with a site now."""
        return len(self._joined)

    @property
    def num_greeting(self) -> int:
        """Return how many have come in and are not joined."""
        return self._entrance.num_open

    @property
    def refused(self) -> Counter[str]:
        """Return why others were not let in."""
        return self._entrance.counts

    @property
    def registered(self) -> dict[str, int]:
        """Return of each member that has registered how many ranks can be called."""
        return dict(Counter(site.key.name for site in self._sites.values()))

    def close(self) -> None:
        """End everything."""
        self._entrance.close()
        for site in {*self._sites.values()}:
            site.close("the relay has ended")
        for joined in [*self._joined]:
            joined.close()

    def _wanted(self, caller: Caller, wanted: Wanted) -> None:
        if isinstance(wanted, ToName):
            self._call(caller, wanted.name)
        elif isinstance(wanted, Message) and wanted.kind == greetings.REGISTER:
            self._challenge(caller, wanted)
        elif isinstance(wanted, Message) and wanted.kind == greetings.TAKE:
            self._take(caller, wanted)
        else:
            caller.refuse("a message that no site begins with")

    def _call(self, caller: Caller, name: str) -> None:
        """Have a site call back for a caller."""
        site = self._sites.get(name)
        if site is None:
            caller.refuse("no site has registered the name", socks_reply(greetings.NOT_THERE))
            return
        self._waiting = {t: w for t, w in self._waiting.items() if w[0].is_open}
        num_waiting = sum(each is site for _, each in self._waiting.values())
        num = len(self._joined) + len(self._waiting)
        if num_waiting >= _MOST_WAITING or num >= self._limits.most_connections:
            caller.refuse("too many connections", socks_reply(greetings.FAILED))
            return
        token = os.urandom(_TOKEN_BYTES).hex()
        self._waiting[token] = (caller, site)
        site.send(pack_message(greetings.OPEN, name=name, token=token))

    def _cannot(self, token: str, why: str) -> None:
        caller, site = self._waiting.pop(token, (None, None))
        if caller is not None and site is not None:
            text = "".join(c if c.isprintable() else "?" for c in why[:200])
            caller.refuse(f"{site.key.name} cannot: {text}", socks_reply(greetings.NOT_THERE))

    def _take(self, caller: Caller, message: Message) -> None:
        """Join who has called back with the one it calls back for."""
        try:
            token = message.field("token", str)
        except BadGreeting as error:
            caller.refuse(str(error))
            return
        waiting, site = self._waiting.pop(token, (None, None))
        if waiting is None or site is None or not waiting.is_open:
            caller.refuse("a call back for nobody")
            return
        inside, outside = caller.take(), waiting.take()
        try:
            outside.send(socks_reply(greetings.JOINED))
        except OSError:
            inside.close()
            outside.close()
            return
        joined = Joined(
            self._loop, self._pipes, outside, inside, self.bucket, self._ended, pays_both=True
        )
        self._joined[joined] = site
        self.num_joined_ever += 1

    def _ended(self, joined: Joined) -> None:
        self._joined.pop(joined, None)
        self.num_bytes += sum(joined.num_bytes)

    def _challenge(self, caller: Caller, message: Message) -> None:
        """Ask a site to prove whose it is, with a nonce that was never used before."""
        try:
            member, names = read_names(message)
        except BadGreeting as error:
            caller.refuse(str(error))
            return
        why = self._why_not(member, names)
        if why is not None:
            caller.refuse(why, pack_message(greetings.REFUSED, why=why))
            return
        nonce = os.urandom(NONCE_BYTES)
        data = what_is_signed(nonce, message.raw)

        def signed(answer: Message | None, error: Exception | None) -> None:
            key = self._who_signed(member, data, answer)
            if key is None:
                why = "the signature is not that of the member's key"
                caller.refuse(why, pack_message(greetings.REFUSED, why=why))
            else:
                self._register(caller, key, names)

        caller.talk = Talk(self._loop, caller.connection, _ask_signature(nonce), signed)

    def _why_not(self, member: str, names: list[str]) -> str | None:
        if member not in self._members.standing.keys:
            return "not a member with a key that stands"
        if not 0 < len(names) <= _MOST_NAMES:
            return f"a registration of {len(names)} ranks; 1 to {_MOST_NAMES} are allowed"
        if any(member_in(name) != member for name in names):
            return "a registration of ranks that are not the member's own"
        if len({*self._sites.values()}) >= _MOST_SITES:
            return "too many have registered"
        return None

    def _who_signed(self, member: str, data: bytes, answer: Message | None) -> PublicKey | None:
        if answer is None or answer.kind != greetings.SIGNED:
            return None
        try:
            signature = bytes.fromhex(answer.field("signature", str))
        except ValueError:
            return None
        keys = self._members.standing.keys.get(member, ())
        return next((key for key in keys if is_signed(key.sign, data, signature)), None)

    def _register(self, caller: Caller, key: PublicKey, names: list[str]) -> None:
        connection = caller.take()
        site = Site(self._loop, connection, key, names, caller.host, self._gone, self._cannot)
        before = {self._sites[name] for name in names if name in self._sites}
        for name in names:
            self._sites[name] = site
        for old in before - {*self._sites.values()}:
            old.close("it has registered anew")
        for joined, was in [*self._joined.items()]:
            if was is not site and not {*was.names}.isdisjoint(names):
                joined.close()  # its line was cut, which its caller may not see
        site.send(pack_message(greetings.REGISTERED))
        self._say(f"{key.name} has registered from {caller.host}: {', '.join(names[:8])}"
                  + (f" and {len(names) - 8} more" if len(names) > 8 else ""))  # fmt: skip

    def _gone(self, site: Site, why: str) -> None:
        self._sites = {name: each for name, each in self._sites.items() if each is not site}
        self._say(f"{site.key.name} from {site.host} is gone: {why}")

    def _look(self) -> None:
        """Read the folder again; who is no member any more is cut off."""
        self._loop.after(_LOOK_SECONDS, self._look)
        problems = self._members.look()
        for problem in problems:
            if problem not in self._told:
                self._say(f"{problem}; the keys of before stay in force")
        self._told = {*problems}
        stand = self._members.standing.keys
        for site in {*self._sites.values()}:
            if site.key not in stand.get(site.key.name, ()):
                site.close("its key is revoked")
        for joined, site in [*self._joined.items()]:
            if site.key not in stand.get(site.key.name, ()):
                joined.close()


def _ask_signature(nonce: bytes) -> Generator[int | bytes, bytes, Message]:
    yield pack_message(greetings.CHALLENGE, nonce=nonce.hex())
    return (yield from read_message())
