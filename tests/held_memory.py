"""The memory that outer state holds, counted tensor by tensor."""

from __future__ import annotations

from dsx.outer.state import StateStore


def held_bytes(state: StateStore) -> int:
    """Return the bytes of all but the shared work vectors and the buffers of codecs."""
    buffers = [b for arenas in state._buffers for b in arenas.buffers]
    vectors = {id(t): t for a in state._buffers for t in (*a._sent, *a._travelling)}
    tensors = [*state.anchor]
    tensors += [t for slots in state.slots for t in slots.named().values()]
    tensors += [*vectors.values()] + [b.sideband.values for b in buffers]
    tensors += [b.posted.values for b in buffers]
    tensors += [t for channel in state.channels for t in channel.before._copies.values()]
    tensors += [b.kept for b in buffers if b.kept is not None]
    tensors += [t for channel in state.channels for t in channel.codec.slots.values()]
    return sum(t.numel() * t.element_size() for t in tensors)


def scratch_bytes(state: StateStore) -> int:
    """Return the bytes of the shared work vectors used so far."""
    return sum(t.numel() * t.element_size() for t in state._scratch.values())
