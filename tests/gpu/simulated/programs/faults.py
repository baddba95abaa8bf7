"""What a program must not do on a GPU, and how the simulated one shows it."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from tests.gpu.simulated import notes

LENGTH = 1000


def main(fault: str) -> None:
    """Do one of the things below."""
    globals()[fault]()
    print("shown:", fault)


def host_read() -> None:
    """Ends the process."""
    ctypes.string_at(torch.ones(LENGTH, device="cuda").data_ptr(), 4)


def host_write() -> None:
    """Ends the process."""
    ctypes.memset(torch.ones(LENGTH, device="cuda").data_ptr(), 0, 4)


def no_record_stream() -> None:
    """Memory that a stream still reads is given to the next tensor; not where it was noted."""
    assert torch.equal(copied_beside(is_noted=True), torch.full((LENGTH,), 3.0))
    assert torch.equal(copied_beside(is_noted=False), torch.full((LENGTH,), 9.0))


def copied_beside(is_noted: bool) -> Tensor:
    """Return threes that a side stream has copied, of a tensor that was let go of before."""
    side, target = torch.cuda.Stream(), torch.empty(LENGTH, pin_memory=True)
    source = torch.full((LENGTH,), 3.0, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    if is_noted:
        source.record_stream(side)
    del source
    torch.full((LENGTH,), 9.0, device="cuda")
    torch.cuda.current_stream().synchronize()
    side.synchronize()
    return target


def no_wait_for_a_stream() -> None:
    """A side stream that does not wait for what it reads finds NaN."""
    side, target = torch.cuda.Stream(), torch.empty(LENGTH, pin_memory=True)
    source = torch.full((LENGTH,), 3.0, device="cuda")
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    side.synchronize()
    assert not torch.equal(target, source.cpu())


def no_wait_for_a_copy() -> None:
    """The host reads what was there before a copy to it has run; behind a wait, the copy."""
    target = torch.zeros(LENGTH).pin_memory()
    assert target.is_pinned()
    target.copy_(torch.full((LENGTH,), 3.0, device="cuda"), non_blocking=True)
    assert not target.any()
    torch.cuda.synchronize()
    assert torch.equal(target, torch.full((LENGTH,), 3.0))


def tensor_of_the_host() -> None:
    """An operation on tensors of the device and of the host is refused, but for numbers."""
    there = torch.ones(LENGTH, device="cuda")
    assert torch.equal((there * torch.tensor(2.0)).cpu(), torch.full((LENGTH,), 2.0))
    for calculate in (torch.add, torch.dot, torch.cat):
        operands = (there, torch.ones(LENGTH))
        try:
            calculate(operands) if calculate is torch.cat else calculate(*operands)
        except RuntimeError as refused:
            assert "of one device" in str(refused) or "the same device" in str(refused)
        else:
            raise AssertionError(f"{calculate.__name__} takes both")


def tensor_of_another_device() -> None:
    """So are tensors of two devices."""
    try:
        torch.add(torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1"))
    except RuntimeError as refused:
        assert "cuda:0 and cuda:1" in str(refused)
    else:
        raise AssertionError("add takes both")


def waits() -> None:
    """What makes the thread wait is told of, and what does not is not."""
    there, locked = torch.ones(LENGTH, device="cuda"), torch.ones(LENGTH, pin_memory=True)
    there.add_(1).copy_(locked, non_blocking=True)
    locked.copy_(there, non_blocking=True)
    assert not notes.taken
    event = torch.cuda.current_stream().record_event()
    there.add_(1)
    event.synchronize()
    there.sum().item()
    there.nonzero()
    there.cpu()
    torch.cuda.synchronize()
    assert [note.what for note in notes.taken] == [
        "an event", "a number to the host", "nonzero", "a copy to the host", "all streams",
    ]  # fmt: skip
    notes.taken.clear()
    there.copy_(torch.ones(LENGTH), non_blocking=True)
    assert [note.kind for note in notes.taken] == ["pageable"]


def call_elsewhere() -> None:
    """Calls to the first device of a rank of the second are told of."""
    torch.cuda.set_device(1)
    there = torch.ones(LENGTH, device="cuda")
    notes.keep_to(1)
    event = torch.cuda.current_stream().record_event()
    event.query()
    assert there.get_device() == 1 and not notes.elsewhere()
    with torch.cuda.device(0):
        event.query()
        torch.ones(LENGTH, device="cuda")
    torch.cuda.set_device(0)
    assert {note.what for note in notes.elsewhere()} == {
        "a query of an event on device 0", "memory on device 0", "an operation on device 0",
        "a thread's device on device 0",
    }  # fmt: skip
