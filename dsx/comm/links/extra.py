"""The packages that links take beyond those of dsx: an extra of its own."""

from __future__ import annotations

_TEXT = (
    "keys and secured links between clusters need pyzmq and cryptography: "
    'pip install "dsx-train[links]"'
)


def missing_extra(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error that says how to get what is missing."""
    return ModuleNotFoundError(_TEXT, name=error.name)


def require_extra() -> None:
    """Raise ModuleNotFoundError, which says how to get them, unless both packages are there.

    Before anything is imported that takes them, wherever a run or a command comes to links.
    """
    try:
        import cryptography
        import zmq
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    del cryptography, zmq
