"""Which files a source holds, in which order, and on which side of the split."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsx.data.corpus import find_corpus, held_out, read_text, require_fraction, score
from dsx.data.tokenizer import ByteTokenizer


def write(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def split(keys: list[str], fraction: float) -> tuple[list[str], list[str]]:
    is_held_out = held_out(np.array([score(key) for key in keys]), fraction).tolist()
    sides = zip(keys, is_held_out, strict=True)
    train = [key for key, held in zip(keys, is_held_out, strict=True) if not held]
    return train, [key for key, held in sides if held]


def test_directory_is_listed_sorted_without_hidden_entries(tmp_path: Path) -> None:
    write(tmp_path, b="b", a="a", sub__c="c", sub__a="a")
    write(tmp_path / ".git", config="hidden", objects="hidden")
    (tmp_path / ".env").write_text("hidden")
    corpus = find_corpus([tmp_path])
    assert [file.key for file in corpus.files] == ["a", "b", "sub/a", "sub/c"]
    assert corpus.num_hidden == 2
    assert corpus.sources == (tmp_path.name,)


def test_overlapping_sources_count_a_file_once(tmp_path: Path) -> None:
    write(tmp_path, a="a", sub__b="b")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    corpus = find_corpus([tmp_path, tmp_path / "sub", tmp_path / "a"])
    assert [file.key for file in corpus.files] == ["a", "sub/b"]
    assert corpus.num_duplicates == 3


def test_stdlib_is_the_library_without_tests_and_packages() -> None:
    corpus = find_corpus(["stdlib"])
    keys = [file.key for file in corpus.files]
    assert {"argparse.py", "json/decoder.py", "collections/__init__.py"} <= set(keys)
    assert keys == sorted(keys)
    parts = {part for key in keys for part in key.split("/")}
    assert parts.isdisjoint({"site-packages", "dist-packages", "__pycache__", "test", "tests"})
    assert all(key.endswith(".py") for key in keys)
    assert sum(file.size_bytes for file in corpus.files) > 8_000_000
    version = ".".join(map(str, sys.version_info[:3]))
    assert corpus.sources[0].startswith(f"python-stdlib {version}")


def test_digest_follows_names_sizes_and_times(tmp_path: Path) -> None:
    write(tmp_path, a="a", b="b")
    before = find_corpus([tmp_path]).digest()
    assert find_corpus([tmp_path]).digest() == before
    write(tmp_path, a="longer")
    after = find_corpus([tmp_path]).digest()
    (tmp_path / "a").rename(tmp_path / "c")
    assert len({before, after, find_corpus([tmp_path]).digest()}) == 3


def test_missing_source_names_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'.*absent' does not exist; name 'stdlib'"):
        find_corpus([tmp_path / "absent"])
    with pytest.raises(ValueError, match="no source given"):
        find_corpus([])


def test_read_text_keeps_line_ends_and_rejects_binary(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes("caf\u00e9\r\n".encode())
    assert read_text(path) == "caf\u00e9\r\n"
    path.write_bytes("caf\u00e9".encode("latin-1"))
    assert read_text(path) is None
    path.write_bytes(b"ascii\0with nul")
    assert read_text(path) is None


@given(
    keys=st.lists(
        st.text(alphabet="ab/.\u00e9", min_size=1, max_size=8), min_size=2, max_size=30, unique=True
    ),
    fraction=st.floats(0.001, 0.999),
)
def test_split_is_a_partition_in_order_with_no_empty_side(keys: list[str], fraction: float) -> None:
    train, validation = split(keys, fraction)
    assert train and validation
    assert sorted(train + validation, key=keys.index) == keys
    assert train == sorted(train, key=keys.index)
    assert validation == sorted(validation, key=keys.index)


def test_split_is_stable_when_files_come_and_go() -> None:
    keys = [f"file{i}" for i in range(2000)]
    validation = set(split(keys, 0.05)[1])
    assert 60 < len(validation) < 140
    assert set(split(keys[::2], 0.05)[1]) == validation & set(keys[::2])
    assert validation < set(split(keys, 0.2)[1])


def test_split_needs_two_documents_and_a_fraction() -> None:
    with pytest.raises(ValueError, match=r"hold 1 non-empty .* at least 2"):
        split(["a"], 0.05)
    with pytest.raises(ValueError, match=r"validation_fraction=1.0 must lie between 0 and 1"):
        require_fraction(1.0)


@given(st.text(alphabet="a\r\n\u00e9\u20ac\U0001f600"))
def test_tokenizer_round_trips(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == "uint16"
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode([*tokens, tokenizer.eod]) == text


def test_tokenizer_decodes_cut_characters_and_rejects_padding_ids() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert tokenizer.vocab_size == tokenizer.eod + 1 == 257
    with pytest.raises(ValueError, match=r"token 257 is outside the vocabulary 0..256"):
        tokenizer.decode([1, 257])
