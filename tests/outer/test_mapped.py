"""Outer state in files: the same bits, nothing left behind, and a word where there is no room."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsx.config.schema import ConfigError, load_config, preset
from dsx.core.buffers import Buffers
from dsx.engines import simulated
from dsx.outer import mapped
from dsx.outer.loop import OuterLoop
from dsx.outer.mapped import MappedMemory, read_ahead
from dsx.outer.memory import predict
from dsx.outer.resources import Resources
from tests.outer.test_memory import Net, sgd
from tests.simulated import Simulated

METHODS: dict[str, dict[str, Any]] = {  # recommended makes codes at the launch
    "dilocox": {
        "schedule": {"interval": 2}, "control": {"type": "fixed"},
        "compression": {"dense_rounds": 1, "rank": 6, "kernels": "eager"},
    },
    "co2": {"schedule": {"interval": 2}},
    "recommended": {"schedule": {"interval": 4}, "delay": {"steps": 2}},
    "cocktail_sgd": {},
}  # fmt: skip


def mappings_in(folder: Path) -> Iterator[tuple[int, int]]:
    """Begin and end of every mapping of a file in a folder."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(f"{folder}/"):
            begin, _, end = fields[0].partition("-")
            yield int(begin, 16), int(end, 16)


def is_in(folder: Path, tensor: Tensor) -> bool:
    place = tensor.data_ptr()
    return any(begin <= place < end for begin, end in mappings_in(folder))


def trained(method: str, num_clusters: int) -> Simulated:
    torch.manual_seed(0)
    run = Simulated(Net(), sgd, preset(method, num_clusters, **METHODS[method]), num_clusters)
    for _ in range(9):
        run.train_step(lambda model, cluster, step: model(torch.tensor([cluster, step])))
    return run


def test_memory_of_a_file_is_zero_and_goes_with_its_last_tensor(tmp_path: Path) -> None:
    x = Buffers(pages=MappedMemory(tmp_path)).zeros(3, 5000)
    assert x.shape == (3, 5000) and x.dtype == torch.float32 and not x.any()
    assert not [*tmp_path.iterdir()] and is_in(tmp_path, x)
    part = x[1, 3:7]
    part.add_(1)
    assert x.sum() == 4
    del x
    gc.collect()
    assert [*mappings_in(tmp_path)] and part.sum() == 4
    del part
    gc.collect()
    assert not [*mappings_in(tmp_path)]
    assert MappedMemory(tmp_path)(0).numel() == 0 and not [*mappings_in(tmp_path)]


def kilobytes_of(folder: Path) -> int:
    """What of the mappings of a folder's files this process has in its tables."""
    is_of_folder, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if "-" in fields[0]:
            is_of_folder = len(fields) == 6 and fields[5].startswith(f"{folder}/")
        elif is_of_folder and fields[0] == "Rss:":
            found += int(fields[1])
    return found


def test_what_is_read_ahead_is_in_memory(tmp_path: Path) -> None:
    x = Buffers(pages=MappedMemory(tmp_path)).zeros(257, 4099)
    assert kilobytes_of(tmp_path) < 1024
    read_ahead([x, torch.zeros(0), torch.zeros(())])
    assert kilobytes_of(tmp_path) >= x.nbytes // 1024


def test_a_disk_without_room_refuses_at_once(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"has no room for 1 PB more: .* are free \(.*dsx m"):
        MappedMemory(tmp_path)(10**15)
    assert not [*mappings_in(tmp_path)]


def test_other_errors_of_a_disk_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> None:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OSError, match="Input/output error"):
        MappedMemory(tmp_path)(1)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        with pytest.raises(ValueError, match=f"state.dir='.*{name}' is no folder on this host: ma"):
            MappedMemory(tmp_path / name)


def test_a_folder_in_memory_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, table = tmp_path.stat().st_dev, tmp_path / "mountinfo"
    monkeypatch.setattr(mapped, "_MOUNTS", table)
    for kind in ("ext4", "tmpfs"):
        caplog.clear()
        table.write_text(
            "21 1 0:999 / /proc rw - proc proc rw\n"
            f"22 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - {kind} none rw\n"
        )
        with caplog.at_level(logging.WARNING):
            MappedMemory(tmp_path)
        assert ("which is memory itself" in caplog.text) == (kind == "tmpfs")
    table.unlink()  # not told by every system
    MappedMemory(tmp_path)


@pytest.mark.parametrize("method", METHODS)
def test_state_in_files_gives_the_bits_of_state_in_memory(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_clusters = 4 if method == "recommended" else 2  # owners keep what means lose, too
    in_memory = trained(method, num_clusters)
    monkeypatch.setattr(simulated, "OuterLoop", partial(OuterLoop, resources=Resources(tmp_path)))
    in_files = trained(method, num_clusters)
    for ours, theirs in zip(in_files.loops, in_memory.loops, strict=True):
        for fragment in ours.adapter.fragments:
            state = ours.state.named_state(fragment.id)
            other = theirs.state.named_state(fragment.id)
            assert state.keys() == other.keys()
            for name, tensor in state.items():
                assert torch.equal(tensor, other[name]), name
                is_of_state = tensor.numel() and not name.startswith("parity_check")
                assert not is_of_state or is_in(tmp_path, tensor), name
            channel = ours.state.channels[fragment.id]
            assert all(is_in(tmp_path, t) for t in channel.before._copies.values() if t.numel())
    for ours, theirs in zip(in_files.parameters(), in_memory.parameters(), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not [*tmp_path.iterdir()]


def test_what_is_in_files_is_told_as_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))

    method = preset("dilocox", 2, control={"type": "fixed"}, compression={"rank": 64})
    monkeypatch.setattr(simulated, "OuterLoop", partial(OuterLoop, resources=Resources(tmp_path)))
    run = Simulated(Wide(), sgd, method, 2)
    loop = run.loops[0]
    counts = [len(parameters) for parameters in loop.adapter.fragment_parameters]
    fragments = loop.adapter.fragments
    wires = [g.wire for g in loop.matrix_gathers]
    told = predict(method, fragments, counts, wires, 2, is_on_disk=True)
    mapped_bytes = sum(end - begin for begin, end in mappings_in(tmp_path))
    assert mapped_bytes == pytest.approx(2 * told.on_disk("disk"), rel=0.05)  # whole pages
    assert told.on_disk("disk") > 0.4 * told.total and told.on_disk("host") == 0
    assert told.on_disk("disk") + told.on_host("disk") == told.on_host("host") == told.total
    assert told.on_device("disk") == told.on_device("host") == 0
    assert told.on_device("masters") + told.on_host("masters") == told.total


def test_a_folder_goes_with_disk() -> None:
    block = {"preset": "diloco", "clusters": {"num_clusters": 2}}
    state = load_config({"dsx": {**block, "state": {"device": "disk", "dir": "/nvme"}}}).state
    assert state.folder == Path("/nvme") and state.is_on_host
    with pytest.raises(ConfigError, match=r'dsx.state.dir is missing: device="disk" needs'):
        load_config({"dsx": {**block, "state": {"device": "disk"}}})
    with pytest.raises(
        ConfigError, match=r"dsx.state.dir='/nvme' has no effect with device='host'"
    ):
        load_config({"dsx": {**block, "state": {"device": "host", "dir": "/nvme"}}})
