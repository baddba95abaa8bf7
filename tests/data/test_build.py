"""Building a dataset directory: contents, reuse, replacement, what is refused, the command."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dsx.data import build, read_summary
from dsx.data.command import app
from dsx.data.tokenizer import ByteTokenizer
from dsx.data.windows import open_tokens

TEXTS = {f"file{i:02}.txt": f"document {i}\n" * (i + 1) for i in range(40)}
FILES = ["dataset.json", "train.bin", "train.idx", "validation.bin", "validation.idx"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    root.mkdir()
    for name, text in TEXTS.items():
        (root / name).write_text(text)
    return root


def documents(prefix: Path) -> list[str]:
    """Split the token stream at the end-of-document ids."""
    tokens = np.asarray(open_tokens(prefix))
    ends = np.flatnonzero(tokens == ByteTokenizer().eod)
    assert ends[-1] == tokens.size - 1
    return [ByteTokenizer().decode(part) for part in np.split(tokens, ends + 1)[:-1]]


class TestBuilt:
    def test_every_file_is_one_document_of_one_split(self, corpus: Path, tmp_path: Path) -> None:
        (corpus / "empty.txt").write_text("")
        (corpus / "picture.png").write_bytes(b"\x89PNG\xff\0")
        (corpus / ".hidden").write_text("hidden")
        out = tmp_path / "nested" / "out"
        summary = build([corpus], out)
        assert sorted(path.name for path in out.iterdir()) == FILES
        train, validation = documents(out / "train"), documents(out / "validation")
        assert sorted(train + validation) == sorted(TEXTS.values())
        assert (summary.train.num_documents, summary.validation.num_documents) == (
            len(train),
            len(validation),
        )
        assert summary.train.num_tokens == sum(len(text) + 1 for text in train)
        assert summary.validation.num_tokens == sum(len(text) + 1 for text in validation)
        skipped = summary.skipped
        assert (skipped.num_hidden, skipped.num_not_text, skipped.num_empty) == (1, 1, 1)
        assert summary.status == "built"

    def test_entropy_and_digest_follow_from_the_tokens(self, corpus: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        summary = build([corpus], out)
        counts = Counter(np.asarray(open_tokens(out / "train")).tolist())
        total = sum(counts.values())
        expected = -sum(n / total * math.log(n / total) for n in counts.values())
        assert summary.unigram_entropy == pytest.approx(expected, rel=1e-12)
        stream = (out / "train.bin").read_bytes() + (out / "validation.bin").read_bytes()
        assert summary.content_digest == blake2b(stream, digest_size=16).hexdigest()

    def test_manifest_is_the_summary_and_names_no_absolute_path(
        self, corpus: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        summary = build([corpus], out)
        text = (out / "dataset.json").read_text()
        assert str(tmp_path) not in text
        fields = json.loads(text)
        assert (fields["format"], fields["format_version"]) == ("dsx-dataset", 2)
        assert (fields["tokenizer"], fields["vocab_size"], fields["eod"]) == ("byte", 257, 256)
        assert (fields["dtype"], fields["sources"]) == ("uint16", ["texts"])
        again = read_summary(out)
        assert again.status == "up to date"
        assert again.train == summary.train and again.sources == summary.sources

    def test_same_sources_are_reused_and_force_rebuilds_the_same_bytes(
        self, corpus: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        build([corpus], out)
        before = {name: (out / name).read_bytes() for name in FILES}
        inode = (out / "train.bin").stat().st_ino
        assert build([corpus], out).status == "up to date"
        assert (out / "train.bin").stat().st_ino == inode
        assert build([corpus], out, force=True).status == "rebuilt"
        assert {name: (out / name).read_bytes() for name in FILES} == before

    def test_changed_sources_fraction_or_damage_rebuild(self, corpus: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        first = build([corpus], out)
        (corpus / "new.txt").write_text("one more")
        second = build([corpus], out)
        assert second.status == "rebuilt"
        assert second.content_digest != first.content_digest
        assert build([corpus], out, validation_fraction=0.5).status == "rebuilt"
        (out / "train.bin").write_bytes(b"")
        assert build([corpus], out, validation_fraction=0.5).status == "rebuilt"
        (out / "validation.idx").unlink()
        assert build([corpus], out, validation_fraction=0.5).status == "rebuilt"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]

    def test_megatron_caches_go_but_a_foreign_file_stops_a_rebuild(
        self, corpus: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        build([corpus], out)
        (out / "train" / "cache").mkdir(parents=True)
        build([corpus], out, force=True)
        assert not (out / "train").exists()
        (out / "notes.txt").write_text("mine")
        with pytest.raises(ValueError, match=r"holds 'notes.txt', which dsx did not write"):
            build([corpus], out, force=True)
        assert (out / "notes.txt").read_text() == "mine"

    def test_failed_build_leaves_the_old_dataset_and_what_is_finished(
        self,
        corpus: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        out = tmp_path / "out"
        first = build([corpus], out)

        def fail(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(sys.modules["dsx.data.dataset"], "write_manifest", fail)
        with pytest.raises(OSError, match="disk full"):
            build([corpus], out, force=True)
        assert read_summary(out).content_digest == first.content_digest
        assert f"is kept in {tmp_path / '.out.partial'}: the same build goes on" in caplog.text
        monkeypatch.undo()
        build([corpus], out)  # is up to date: what is left over is not needed
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


def test_directory_of_someone_else_is_never_touched(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "dataset.json").write_text('{"format": "other"}')
    with pytest.raises(ValueError, match=r"is not a dsx dataset; allowed are .* --out"):
        build([corpus], out, force=True)
    with pytest.raises(ValueError, match="is not a dsx dataset"):
        build([corpus], corpus / "file00.txt", force=True)
    assert [path.name for path in out.iterdir()] == ["dataset.json"]
    with pytest.raises(ValueError, match="is not a dsx dataset"):
        read_summary(out)


def test_out_inside_a_source_is_refused(corpus: Path) -> None:
    with pytest.raises(ValueError, match="lies inside the source 'texts'"):
        build([corpus], corpus / "data" / "out")


def test_too_few_files_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("only one")
    with pytest.raises(ValueError, match="need at least 2"):
        build([tmp_path / "one.txt"], tmp_path / "nested" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]


def test_importing_the_package_and_its_command_is_light() -> None:
    code = (
        "import sys, dsx.data.command\n"
        "heavy = {'megatron', 'deepspeed'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from dsx.data import TokenWindows, ClusterBatches, ClusterShard\n"
        "assert not {'megatron', 'deepspeed'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_command_takes_several_sources_after_one_from(corpus: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("one")
    two.write_text("two")
    out = tmp_path / "out"
    arguments = ["build", "--from", str(corpus), str(one), str(two), "--out", str(out), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["sources"] == ["texts", "one.txt", "two.txt"]
    assert summary["train"]["num_documents"] + summary["validation"]["num_documents"] == 42
    repeated = ["build", "--from", str(corpus), "--from", str(one), "--from", str(two)]
    result = CliRunner().invoke(app, [*repeated, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "up to date" in result.stdout and "nats per token" in result.stdout


def test_command_reports_a_mistake_in_one_line(tmp_path: Path) -> None:
    arguments = ["build", "--from", str(tmp_path / "absent"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("dsx data build: source ") and result.stderr.count("\n") == 1
