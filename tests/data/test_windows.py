"""Windows over the indexed format, against megatron-core and against hand-written files."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from dsx.data.windows import TokenWindows, open_tokens

CODES = {"uint8": 1, "int32": 4, "int64": 5, "float32": 7, "uint16": 8}


def write_indexed(
    prefix: Path, documents: list[list[int]], dtype: str = "uint16", sentences: int = 1
) -> Path:
    """Write .bin and .idx by the letter of the format; so many entries are one document."""
    lengths = np.array([len(document) for document in documents], dtype="<i4")
    itemsize = np.dtype(dtype).itemsize
    offsets = (np.cumsum(lengths, dtype="<i8") - lengths) * itemsize
    bounds = np.arange(0, len(documents) + 1, sentences, dtype="<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], lengths.size, bounds.size)
    body = lengths.tobytes() + offsets.tobytes() + bounds.tobytes()
    prefix.with_suffix(".idx").write_bytes(header + body)
    tokens = np.array([token for document in documents for token in document], dtype=dtype)
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    return prefix


def test_windows_overlap_by_one_and_cover_the_stream(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "x", [list(range(7)), list(range(7, 12))])
    windows = TokenWindows(prefix, 4)
    assert [window.tolist() for window in windows] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert len(windows) == 2
    assert windows[0].dtype == torch.int64
    assert len(TokenWindows(prefix, 11)) == 1
    with pytest.raises(IndexError, match=r"window 2 is outside 0..1"):
        windows[2]
    with pytest.raises(IndexError):
        windows[-1]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_every_integer_dtype_is_read(tmp_path: Path, dtype: str) -> None:
    prefix = write_indexed(tmp_path / "x", [[1, 2, 3], [250, 251]], dtype)
    assert TokenWindows(prefix, 4)[0].tolist() == [1, 2, 3, 250, 251]


def test_equals_megatron_byte_for_byte(tmp_path: Path) -> None:
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 257, size=size).tolist() for size in (1, 300, 17, 64, 5)]
    ours = write_indexed(tmp_path / "ours", documents)
    theirs = tmp_path / "theirs"
    builder = indexed_dataset.IndexedDatasetBuilder(str(theirs) + ".bin", np.uint16)
    for document in documents:
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(str(theirs) + ".idx")
    for suffix in (".bin", ".idx"):
        assert ours.with_suffix(suffix).read_bytes() == theirs.with_suffix(suffix).read_bytes()
    read = indexed_dataset.IndexedDataset(str(theirs))
    stream = np.concatenate([read[i] for i in range(len(read))])
    tokens = open_tokens(theirs)
    assert tokens.dtype == stream.dtype and tokens.tobytes() == stream.tobytes()
    for length in (1, 7, 64):
        windows = TokenWindows(theirs, length)
        for index, window in enumerate(windows):
            expected = stream[index * length : index * length + length + 1]
            assert window.tolist() == expected.tolist()


def test_multimodal_index_is_read_as_well(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "x", [[1, 2], [3]])
    with prefix.with_suffix(".idx").open("ab") as stream:
        stream.write(b"\0\1")
    assert TokenWindows(prefix, 2)[0].tolist() == [1, 2, 3]


def test_pickle_reopens_the_files(tmp_path: Path) -> None:
    windows = TokenWindows(write_indexed(tmp_path / "x", [list(range(1000)) * 50]), 10)
    raw = pickle.dumps(windows)
    assert len(raw) < 1000
    assert torch.equal(pickle.loads(raw)[7], windows[7])


def test_too_short_for_one_window(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "x", [[1, 2, 3]])
    with pytest.raises(ValueError, match=r"holds 3 tokens, .*sequence_length=3 needs 4"):
        TokenWindows(prefix, 3)
    with pytest.raises(ValueError, match=r"holds 0 tokens"):
        TokenWindows(write_indexed(tmp_path / "y", []), 3)
    with pytest.raises(ValueError, match="sequence_length=0 must be at least 1"):
        TokenWindows(prefix, 0)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent.idx' does not exist; .*dsx data build"):
        TokenWindows(tmp_path / "absent", 4)
    prefix = write_indexed(tmp_path / "x", [[1, 2, 3]])
    prefix.with_suffix(".bin").unlink()
    with pytest.raises(ValueError, match=r"x.bin' does not exist"):
        TokenWindows(prefix, 1)


def test_truncated_files_are_told(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "x", [[1, 2, 3], [4, 5]])
    data, index = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
    whole = index.read_bytes()
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"x.bin' has 8 bytes, its index says 10; .*truncated"):
        TokenWindows(prefix, 1)
    for size in (20, 40, len(whole) - 1):
        index.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"x.idx' .*truncated"):
            TokenWindows(prefix, 1)


def test_wrong_magic_version_dtype_and_offsets(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "x", [[1, 2, 3], [4, 5]])
    index = prefix.with_suffix(".idx")
    whole = index.read_bytes()
    index.write_bytes(b"PK" + whole[2:])
    with pytest.raises(ValueError, match="not Megatron's indexed format"):
        TokenWindows(prefix, 1)
    index.write_bytes(b"")
    with pytest.raises(ValueError, match="not Megatron's indexed format"):
        TokenWindows(prefix, 1)
    index.write_bytes(whole[:9] + struct.pack("<Q", 2) + whole[17:])
    with pytest.raises(ValueError, match="index version 2"):
        TokenWindows(prefix, 1)
    index.write_bytes(whole[:17] + b"\x07" + whole[18:])
    with pytest.raises(ValueError, match=r"dtype code 7, token ids need one of \[1, 2, 3, 4, 5, 8"):
        TokenWindows(prefix, 1)
    second_offset = 34 + 2 * 4 + 8
    index.write_bytes(whole[:second_offset] + struct.pack("<q", 8) + whole[second_offset + 8 :])
    with pytest.raises(ValueError, match="do not lie end to end"):
        TokenWindows(prefix, 1)
