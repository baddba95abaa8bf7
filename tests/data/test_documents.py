"""Sources with a document in every row, and tokenizers of Hugging Face: local files alone."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dsx.data import build
from dsx.data.command import app
from dsx.data.dataset import Progress
from dsx.data.tokenizer import ByteTokenizer, FolderTokenizer
from dsx.data.windows import open_tokens
from tests.data.test_build import documents
from tests.installed import needs

TEXTS = [f"row {number}\n" * (number % 3 + 1) for number in range(60)]
WORDS = {"row": 0, "end": 1, "?": 2, **{str(number): 3 + number for number in range(60)}}


def lines(texts: list[Any], key: str = "text") -> str:
    return "".join(json.dumps({key: text, "id": n}) + "\n" for n, text in enumerate(texts))


def everything(out: Path) -> list[str]:
    return sorted(documents(out / "train") + documents(out / "validation"))


def test_json_lines_are_documents(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.jsonl").write_text(lines([*TEXTS[:30], "", None]) + "\n")
    (source / "b.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[30:]).encode()))
    (source / "c.txt").write_text("a whole file")
    summary = build([source], tmp_path / "out")
    assert everything(tmp_path / "out") == sorted([*TEXTS, "a whole file"])
    assert summary.train.num_documents + summary.validation.num_documents == 61
    assert summary.skipped.num_empty == 2
    again = build([source], tmp_path / "out")
    assert again.status == "up to date" and again.content_digest == summary.content_digest
    held = set(documents(tmp_path / "out" / "validation"))
    (source / "a.jsonl").write_text(lines(TEXTS[:29]))  # the others keep their side
    build([source], tmp_path / "out")
    assert set(documents(tmp_path / "out" / "validation")) <= held


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}\n{"body": "b"}\n', r"line 2 of .*a.jsonl has no 'text', but 'body'; give"),
        ('{"text": "a"}\n{"text": 7}\n', "line 2 of .* 'text' holds int, and a text is read"),
        ('{"text": "a"}\n{"text": \n', "line 2 of .* is not valid JSON: .* mend or remove it"),
        ('{"text": "a"}\n["b"]\n', "line 2 of .* must hold an object"),
    ],
)  # fmt: skip
def test_lines_that_are_none(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        build([tmp_path / "a.jsonl"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


BAD = ['{"text": ', '["b"]', '{"body": "b"}', '{"text": 7}', '{"text": "\\ud800"}', "[" * 99_999]


def test_rows_that_are_bad_are_left_out_and_counted(tmp_path: Path) -> None:
    """Exactly so in parts, by several processes, and where a build that has ended goes on."""
    rows = [json.dumps({"text": text}) for text in TEXTS]
    source, out, cut = tmp_path / "a.jsonl", tmp_path / "out", tmp_path / "cut"
    for n in range(len(BAD) * 5):
        rows.insert(2 * n, BAD[n % len(BAD)])
    source.write_text("\n".join(rows) + "\n")
    for row in BAD:
        (tmp_path / "b.jsonl").write_text(f"{row}\n")
        with pytest.raises(ValueError, match="b.jsonl.*--skip-bad"):
            build([tmp_path / "b.jsonl"], out)
    summary = build([source], out, skip_bad=True)
    assert (summary.skipped.num_bad, summary.skipped.num_empty) == (5 * len(BAD), 0)
    assert everything(out) == sorted(TEXTS)
    assert build([source], out, skip_bad=True).status == "up to date"
    with pytest.raises(ValueError, match="--skip-bad"):
        build([source], out)

    def stop(progress: Progress) -> None:
        if progress.num_done > progress.num_bytes // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build([source], cut, skip_bad=True, part_bytes=300_000, progress=stop)
    told: list[Progress] = []
    build([source], cut, skip_bad=True, part_bytes=300_000, progress=told.append)
    assert told[0].num_kept > 0
    for name in ("dataset.json", "train.bin", "train.idx", "validation.bin", "validation.idx"):
        assert (cut / name).read_bytes() == (out / name).read_bytes()


def test_the_count_of_bad_rows_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(TEXTS) + '{"text": 7}\n[]\n')
    arguments = ["build", "--from", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]
    failed = CliRunner().invoke(app, arguments)
    assert failed.exit_code == 2 and "--skip-bad" in failed.stderr
    done = CliRunner().invoke(app, [*arguments, "--skip-bad", "--workers", "1"])
    assert done.exit_code == 0 and "skipped: 2 bad" in done.stdout, done.output


def test_another_column_and_progress(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(TEXTS, "body"))
    told: list[Progress] = []
    summary = build([tmp_path / "a.jsonl"], tmp_path / "out", text_key="body", progress=told.append)
    tokens = summary.train.num_tokens + summary.validation.num_tokens
    size = (tmp_path / "a.jsonl").stat().st_size
    assert everything(tmp_path / "out") == sorted(TEXTS)
    assert told[0] == Progress(size, 0, 0, 0, 0, 0)
    assert told[-1] == Progress(size, size, 0, 60, tokens, tokens)
    arguments = ["build", "--from", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "other")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "give --text-key the one with the text" in result.stderr


@pytest.mark.ci
@needs("pyarrow", "datasets")
def test_parquet_and_saved_datasets(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(60))})
    rows.to_parquet(tmp_path / "a.parquet")
    rows.select(range(10, 50)).save_to_disk(tmp_path / "saved", num_shards=2)
    build([tmp_path / "a.parquet"], tmp_path / "out")
    assert everything(tmp_path / "out") == sorted(TEXTS)
    summary = build([tmp_path / "saved"], tmp_path / "of saved")
    assert everything(tmp_path / "of saved") == sorted(TEXTS[10:50])
    assert summary.skipped.num_not_text == 0  # nothing beside the rows is read
    parts = datasets.DatasetDict({"train": rows, "test": rows.select(range(5))})
    parts.save_to_disk(tmp_path / "parts")
    with pytest.raises(ValueError, match="the splits train, test: name the one to read, such as"):
        build([tmp_path / "parts"], tmp_path / "of parts")
    build([tmp_path / "parts" / "train"], tmp_path / "of parts")
    assert everything(tmp_path / "of parts") == sorted(TEXTS)


@pytest.mark.ci
@needs("tokenizers")
def test_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer, folder = Tokenizer(WordLevel(WORDS, unk_token="?")), tmp_path / "tokenizer"
    tokenizer.pre_tokenizer = Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="names no eos_token that its tokenizer knows"):
        FolderTokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "end"}}')
    (tmp_path / "a.jsonl").write_text(lines(TEXTS))
    summary = build([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=folder)
    assert (summary.vocab_size, summary.eod, summary.dtype) == (63, 1, "uint16")
    found = [np.asarray(open_tokens(tmp_path / "out" / s)) for s in ("train", "validation")]
    ours = sorted(np.concatenate(found).tolist())
    expected = [
        token
        for number, text in enumerate(TEXTS)
        for token in [*(t for _ in text.splitlines() for t in (0, 3 + number)), 1]
    ]
    assert ours == sorted(expected)
    assert summary.train.num_tokens + summary.validation.num_tokens == len(expected)
    assert build([tmp_path / "a.jsonl"], tmp_path / "out").status == "rebuilt"  # of bytes


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no tokenizer.json; give a folder that has one"):
        FolderTokenizer(tmp_path)
    assert [list(t) for t in ByteTokenizer().encode_all(["a", ""])] == [[97], []]
