"""What an outer step does to each element in one pass, by native kernels where they are.

Of several operations of torch each reads and writes its vectors, even where they are in the cache.
The kernels (compress/wire/native/steps.h) do the same operations in the same order, so with the
same bits, and each cluster may go without. They run on the calling thread alone: where torch has
several for an operation, its own are faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsx.compress.wire.native import library

if TYPE_CHECKING:
    from torch import Tensor


def momentum_(
    grad: Tensor, buffer: Tensor, out: Tensor, scratch: Tensor, lr: float, mu: float,
    looks_ahead: bool,
) -> Tensor:  # fmt: skip
    """Set `buffer = mu*buffer + grad`, in place; return `lr * buffer`, in `out`.

    With `looks_ahead` it is `lr * (grad + mu*buffer)`. All are fp32 `[n]`; `out` may be `grad`, and
    `scratch` is free.
    """
    import torch

    if _serves(grad, buffer, out):
        library.library().dsx_step_momentum(
            library.index_of(None), grad.data_ptr(), buffer.data_ptr(), out.data_ptr(),
            grad.numel(), lr, mu, looks_ahead,
        )  # fmt: skip
        return out
    buffer.mul_(mu).add_(grad)
    if not looks_ahead:
        return torch.mul(buffer, lr, out=out)
    return torch.add(grad, torch.mul(buffer, mu, out=scratch), out=out).mul_(lr)


def blend_(local: Tensor, anchor: Tensor, scratch: Tensor, alpha: float) -> Tensor:
    """Return `(1 - alpha) * local + alpha * anchor`, in place of `local`; fp32 `[n]`."""
    import torch

    if _serves(local, anchor):
        library.library().dsx_step_blend(
            library.index_of(None), local.data_ptr(), anchor.data_ptr(), local.numel(), 1 - alpha,
            alpha,
        )  # fmt: skip
        return local
    return local.mul_(1 - alpha).add_(torch.mul(anchor, alpha, out=scratch))


def difference_(origin: Tensor, local: Tensor, out: Tensor) -> Tensor:
    """Return `origin - local`, in `out`; fp32 `[n]`."""
    import torch

    if not _serves(origin, local, out):
        return torch.sub(origin, local, out=out)
    library.library().dsx_step_difference(
        library.index_of(None), origin.data_ptr(), local.data_ptr(), out.data_ptr(), out.numel()
    )
    return out


def _serves(*vectors: Tensor) -> bool:
    """Whether the kernels can do it, and nothing else does it sooner."""
    import torch

    if torch.get_num_threads() > 1 or library.unavailable() is not None:
        return False
    return all(x.is_cpu and x.dtype is torch.float32 and x.is_contiguous() for x in vectors)
