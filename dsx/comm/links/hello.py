"""The greeting with which each connection begins: whose it is, and which of those."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from dsx.comm.links.frames import BadFrame

_MOST_BYTES = 1024
_MOST = {
    "rank": 1 << 20, "connection": 1 << 10, "number": 1 << 63, "incarnation": 1 << 63,
    "over": 1 << 63,
}  # fmt: skip


@dataclass(frozen=True)
class Hello:
    """`number` is of the caller's connections, `incarnation` when its process was started.

    With `over`, the incarnation of whom it is for, it is no greeting: that one has been left out.
    """

    rank: int
    connection: int
    number: int
    incarnation: int
    over: int = 0

    def pack(self) -> bytes:
        """Return the body of a HELLO frame."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, body: bytes) -> Hello:
        """Read the body of a HELLO frame; BadFrame if it is not one."""
        try:
            if len(body) > _MOST_BYTES:
                raise ValueError
            said = json.loads(body)
            values = {field.name: said[field.name] for field in fields(cls) if field.name != "over"}
            values["over"] = said.get("over", 0)
            if any(type(v) is not int or not 0 <= v < _MOST[name] for name, v in values.items()):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise BadFrame("a greeting that cannot be read") from None
        return cls(**values)
