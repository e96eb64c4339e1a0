"""Text becomes shards that decode to the same text, identically every time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from phalanx.cli.data.data import app
from phalanx.data import DataError, ShardStream, read_manifest
from phalanx.data.corpus.manifest import TOKENIZER_NAME
from phalanx.data.tokenize import inputs, vocabulary
from phalanx.data.tokenize import run as tokenize

OPTIONS = tokenize.TokenizeOptions(file_bytes=64)
TEXTS = {
    "b.txt": "the quick brown fox jumps over the lazy dog\n" * 20,
    "a/one.txt": "naïve café — 你好 🙂\r\nsecond line\n" * 10,
    "a/two.md": "# Title\n\nSome <|endoftext|> inside a text.\n",
    "empty.txt": "",
    "code.rs": "fn main() {}",
}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    for name, text in TEXTS.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return root


def decoded_documents(corpus: Path) -> list[str]:
    manifest = read_manifest(corpus)
    stream = np.zeros(manifest.tokens, np.int64)
    ShardStream(corpus).read_tokens(0, manifest.tokens, stream)
    ends = np.flatnonzero(stream == manifest.end_of_document)
    encoder = vocabulary.load_tokenizer(corpus / TOKENIZER_NAME)
    starts = [0, *(ends[:-1] + 1)]
    assert ends[-1] == manifest.tokens - 1
    return [
        encoder.decode(stream[start:end].tolist(), skip_special_tokens=False)
        for start, end in zip(starts, ends, strict=True)
    ]


def test_documents_decode_to_their_text_in_sorted_order(texts: Path, tmp_path: Path) -> None:
    files = inputs.find_files([texts])
    encoder = vocabulary.train_tokenizer(files, vocab_size=300)
    done = tokenize.tokenize_files(files, encoder, tmp_path / "out", OPTIONS)
    assert decoded_documents(tmp_path / "out") == [
        TEXTS["a/one.txt"],
        TEXTS["a/two.md"],  # its spelled-out end token is text, not an end
        TEXTS["b.txt"],
    ]
    assert done.manifest.documents == 3  # an empty file is no document
    assert done.manifest.source.text_bytes == sum(
        len(TEXTS[f].encode()) for f in ("a/one.txt", "a/two.md", "b.txt")
    )


def test_a_long_file_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {number} of a long file\n" for number in range(400))
    path = tmp_path / "long.txt"
    path.write_text(text)
    encoder = vocabulary.train_tokenizer([path], vocab_size=280)
    monkeypatch.setattr(inputs, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(tokenize, "_RUN_BYTES", 350)
    tokenize.tokenize_files([path], encoder, tmp_path / "out")
    assert decoded_documents(tmp_path / "out") == [text]


def test_files_that_are_not_utf8_are_left_out_and_named(texts: Path, tmp_path: Path) -> None:
    (texts / "a" / "latin.txt").write_bytes("déjà vu".encode("latin-1"))
    files = inputs.find_files([texts])
    encoder = vocabulary.train_tokenizer(files, vocab_size=300)
    done = tokenize.tokenize_files(files, encoder, tmp_path / "out")
    (found,) = done.unreadable
    assert files[found.file].name == "latin.txt" and "not UTF-8" in found.reason
    assert done.manifest.source.unreadable == 1
    assert len(decoded_documents(tmp_path / "out")) == 3


def test_suffixes_filter_folders_but_not_named_files(texts: Path) -> None:
    found = inputs.find_files([texts, texts / "code.rs", texts / "b.txt"], [".md"])
    assert [path.name for path in found] == ["two.md", "b.txt", "code.rs"]
    with pytest.raises(DataError, match=r"no file with suffix \.xyz"):
        inputs.find_files([texts], [".xyz"])
    with pytest.raises(DataError, match="neither a file nor a folder"):
        inputs.find_files([texts / "missing"])


def test_two_processes_write_identical_bytes(texts: Path, tmp_path: Path) -> None:
    for name, threads in (("one", "1"), ("two", "2")):
        command = [sys.executable, "-c", "from phalanx.cli.data.data import app; app()", "tokenize"]
        command += [str(texts), "--vocab-size", "320", "--out", str(tmp_path / name)]
        environment = {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        root = Path(__file__).parents[3]
        subprocess.run(command, check=True, cwd=root, env=environment, capture_output=True)
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("one", "two")
    )
    assert one == two
    assert set(one) == {"manifest.json", "shard-00000.bin", "shard-00000.idx", "tokenizer.json"}


def test_training_on_a_subsample_reads_files_from_the_whole_list(tmp_path: Path) -> None:
    def word(number: int) -> str:
        return (
            "".join(chr(ord("a") + (number * step) % 26) for step in (1, 3, 5, 7))
            + "xyz"[number // 26]
        )

    files = []
    for number in range(40):
        path = tmp_path / f"{number:02d}.txt"
        path.write_text(f" {word(number)}" * 200)
        files.append(path)
    encoder = vocabulary.train_tokenizer(files, vocab_size=2000, train_bytes=12_000)
    learnt = [n for n in range(40) if len(encoder.encode(f" {word(n)}").ids) == 1]
    assert 5 <= len(learnt) <= 20
    assert min(learnt) < 10 and max(learnt) >= 30


def test_the_standard_library_is_a_corpus_of_a_few_megabytes() -> None:
    files = tokenize.stdlib_corpus()
    assert files == sorted(files)
    assert 3e6 < sum(path.stat().st_size for path in files) < 20e6
    names = {path.name for path in files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any("site-packages" in path.parts or "test" in path.parts for path in files)


def test_a_tokenizer_that_is_none_is_refused(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        vocabulary.load_tokenizer(tmp_path / "missing.json")
    with pytest.raises(DataError, match=r"is no tokenizer\.json"):
        vocabulary.load_tokenizer(texts / "b.txt")
    with pytest.raises(DataError, match="at least 257"):
        vocabulary.train_tokenizer([texts / "b.txt"], vocab_size=100)
    encoder = vocabulary.train_tokenizer([texts / "b.txt"], vocab_size=260)
    with pytest.raises(DataError, match="looked for <nothing>"):
        vocabulary.end_of_document(encoder, "<nothing>")


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_commands_report_in_json(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text, _ = run(
        "tokenize", texts, "--suffix", ".txt", "--vocab-size", 300, "--out", out, "--json"
    )
    report = msgspec.json.decode(text)
    assert (code, report["files"], report["documents"]) == (0, 3, 2)
    code, text, _ = run("inspect", out, "--json", "--verify", "--samples", 2, "--tokens", 16)
    shown = msgspec.json.decode(text)
    assert code == 0 and shown["verified"] is True
    assert shown["manifest"]["tokens"] == report["tokens"]
    assert shown["samples"][0].startswith("naïve") and len(shown["samples"]) == 2


def test_another_corpus_can_reuse_a_tokenizer(texts: Path, tmp_path: Path) -> None:
    assert run("tokenize", texts, "--vocab-size", 300, "--out", tmp_path / "one")[0] == 0
    encoder = tmp_path / "one" / TOKENIZER_NAME
    assert run("tokenize", texts, "--tokenizer", encoder, "--out", tmp_path / "two")[0] == 0
    assert read_manifest(tmp_path / "one") == read_manifest(tmp_path / "two")


def test_limits_of_a_model_s_input_change_no_document(texts: Path, tmp_path: Path) -> None:
    """As files have them that a model's tokenizer was saved to after use."""
    files = inputs.find_files([texts])
    encoder = vocabulary.train_tokenizer(files, vocab_size=300)
    encoder.enable_truncation(8)
    encoder.enable_padding()
    encoder.save(str(tmp_path / "limited.json"))
    limited = vocabulary.load_tokenizer(tmp_path / "limited.json")
    done = tokenize.tokenize_files(files, limited, tmp_path / "out", OPTIONS)
    assert decoded_documents(tmp_path / "out") == [
        TEXTS[f] for f in ("a/one.txt", "a/two.md", "b.txt")
    ]
    encoder.no_truncation()
    encoder.no_padding()
    assert (
        done.manifest == tokenize.tokenize_files(files, encoder, tmp_path / "own", OPTIONS).manifest
    )


def test_inspect_shows_counts_and_text(texts: Path, tmp_path: Path) -> None:
    run("tokenize", texts, "--vocab-size", 300, "--out", tmp_path / "out")
    code, text, _ = run("inspect", tmp_path / "out")
    assert code == 0 and "3 documents" in text and "naïve café" in text


def test_a_user_mistake_ends_with_its_message_and_code_2(texts: Path, tmp_path: Path) -> None:
    for arguments, message in [
        (["inspect", tmp_path / "nowhere"], "phalanx data tokenize"),
        (["tokenize", texts, "--out", tmp_path / "out"], "either --vocab-size"),
        (["tokenize", "--vocab-size", 300, "--out", tmp_path / "out"], "--stdlib"),
    ]:
        code, _, error = run(*arguments)
        assert code == 2 and message in error
