"""The codec of every group format whose kernels are C: one call a vector, in no work space.

The message is group_codec.py's, byte for byte, and so are the values; see there for its layout.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from dsx.compress.wire.group_format import GroupFormat
from dsx.compress.wire.group_kernels import noise_key
from dsx.compress.wire.native import library
from dsx.compress.wire.work_space import require_sizes


class NativeCodec:
    """`Codec` for one `GroupFormat` on the CPU; see base.py for the contract.

    `instructions` names an instruction set, of `library.instruction_sets()`; None: the best.
    """

    kernels = "native"

    def __init__(
        self, name: str, form: GroupFormat, numel: int, instructions: str | None = None
    ) -> None:
        self._form = form
        self._numel = numel
        self._library = library.library()
        self._set = library.index_of(instructions)
        self._c_form = library.form_of(name, form)
        self._of_form = ctypes.addressof(self._c_form)

    def encode(self, x: Tensor, out: Tensor, seed: int = 0) -> None:
        """Write the message of `x` to `out`."""
        self._encode(x, None, out, seed)

    def encode_with_feedback(self, x: Tensor, residual: Tensor, out: Tensor, seed: int = 0) -> None:
        """Add `residual` to `x`, write the message to `out` and the error to `residual`."""
        self._encode(x, residual, out, seed)

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Write the values of `data` to `out`."""
        self._decode(data, out, is_added=False)

    def decode_add(self, data: Tensor, out: Tensor) -> None:
        """Add the values of `data` to `out`."""
        self._decode(data, out, is_added=True)

    def _encode(self, x: Tensor, residual: Tensor | None, out: Tensor, seed: int) -> None:
        require_sizes(x, out, self._numel, self._form.num_bytes(x.numel()))
        if residual is not None and residual.numel() != x.numel():
            raise ValueError(
                f"a residual of {residual.numel()} elements beside a vector of {x.numel()}: give "
                "one of as many"
            )
        _, first, second = noise_key(seed, 0)
        self._library.dsx_wire_encode(
            self._set,
            self._of_form,
            _address(x, torch.float32),
            None if residual is None else _address(residual, torch.float32),
            _address(out, torch.uint8),
            x.numel(),
            first & 0xFFFFFFFF,
            second & 0xFFFFFFFF,
        )

    def _decode(self, data: Tensor, out: Tensor, is_added: bool) -> None:
        require_sizes(out, data, self._numel, self._form.num_bytes(out.numel()))
        self._library.dsx_wire_decode(
            self._set,
            self._of_form,
            _address(data, torch.uint8),
            _address(out, torch.float32),
            out.numel(),
            is_added,
        )


def _address(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return where its elements lie; ValueError for what kernels would take for something else."""
    if tensor.dtype is not dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"a {tensor.dtype} tensor of strides {tensor.stride()} on {tensor.device} must be "
            f"contiguous, of {dtype} and on the CPU; make it so before"
        )
    return tensor.data_ptr()
