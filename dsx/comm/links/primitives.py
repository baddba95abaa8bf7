"""The cryptography that links use, all of it from libzmq and the package cryptography.

Keys of a line are of CURVE (Curve25519), those that sign of Ed25519; all are 32 bytes. libzmq
takes the former as 40 bytes of Z85. ModuleNotFoundError, on import, says how to get both packages.
"""

from __future__ import annotations

import os

from dsx.comm.links.extra import missing_extra

try:
    import zmq
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )
    from zmq.utils import z85
except ModuleNotFoundError as error:
    raise missing_extra(error) from error

KEY_BYTES = 32
SIGNATURE_BYTES = 64


def new_curve_pair() -> tuple[bytes, bytes]:
    """Return the public and the secret key of a line, 32 bytes each."""
    public, secret = zmq.curve_keypair()
    return z85.decode(public), z85.decode(secret)


def curve_public_of(secret: bytes) -> bytes:
    """Return the public key that belongs to a secret one."""
    return z85.decode(zmq.curve_public(z85.encode(secret)))


def as_z85(key: bytes) -> bytes:
    """Return 32 bytes as the 40 that libzmq takes."""
    return z85.encode(key)


def new_sign_seed() -> bytes:
    """Return the seed of a key that signs: 32 bytes from the system."""
    return os.urandom(KEY_BYTES)


def sign_public_of(seed: bytes) -> bytes:
    """Return the public key of a seed."""
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def sign(seed: bytes, data: bytes) -> bytes:
    """Return the 64 bytes of data's signature, the same for the same data."""
    return Ed25519PrivateKey.from_private_bytes(seed).sign(data)


def is_signed(public: bytes, data: bytes, signature: bytes) -> bool:
    """Whether a signature of the data is by the owner of a public key."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):  # the latter where the key is no point of the curve
        return False
    return True
