"""Tokenising gives the same bytes however many workers do it and however often it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from phalanx.data import DataError, ShardStream, verify
from phalanx.data.folder_lock import alone_in
from phalanx.data.tokenize import inputs, vocabulary
from phalanx.data.tokenize import run as tokenize
from phalanx.data.tokenize.inputs import find_files
from phalanx.data.tokenize.run import TokenizeOptions, TokenizeProgress, tokenize_files

ROOT = Path(__file__).parents[2]
SHARD_BYTES = 2000


class KilledError(BaseException):
    """As abrupt as an exception can be."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of all lengths in lines and files, with empty and unreadable ones among them."""
    folder = tmp_path_factory.mktemp("texts")
    random = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "naïve", "fn main() {}", "\n", "你好"]
    for name in ("a", "b", "c"):
        lengths = random.integers(0, 60, 60).tolist()
        documents = [" ".join(random.choice(words, length)) for length in lengths]
        lines = [msgspec.json.encode({"text": document}) for document in documents]
        lines.insert(20, b'{"text": "torn')
        (folder / f"{name}.jsonl").write_bytes(b"\n".join(lines))
    (folder / "long.txt").write_text(" ".join(random.choice(words, 4000)))
    (folder / "empty.txt").touch()
    return folder


@pytest.fixture(scope="module")
def encoder(corpus: Path) -> Tokenizer:
    return vocabulary.train_tokenizer(find_files([corpus]), vocab_size=300)


@pytest.fixture(autouse=True)
def _small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_RUN_BYTES", 1500)
    monkeypatch.setattr("phalanx.data.tokenize.inputs.LINES_BYTES", 700)
    monkeypatch.setattr("phalanx.data.tokenize.inputs.PIECE_CHARACTERS", 1000)


def run(corpus: Path, encoder: Tokenizer, out: Path, **options: object) -> tokenize.Tokenized:
    settings = TokenizeOptions(file_bytes=SHARD_BYTES, **options)  # type: ignore[arg-type]
    return tokenize_files(find_files([corpus]), encoder, out, settings)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stop_after(runs: int) -> object:
    seen = 0

    def report(done: TokenizeProgress) -> None:
        nonlocal seen
        seen += 1
        if seen == runs:
            raise KilledError

    return report


def test_any_number_of_workers_writes_the_same_bytes(
    corpus: Path, encoder: Tokenizer, tmp_path: Path
) -> None:
    for workers in (1, 2, 3):
        run(corpus, encoder, tmp_path / str(workers), workers=workers)
    one, two, three = (content(tmp_path / name) for name in "123")
    assert one == two == three
    assert len([name for name in one if name.endswith(".bin")]) > 5
    verify(tmp_path / "1")


def test_a_run_stopped_anywhere_goes_on_without_redoing_finished_shards(
    corpus: Path, encoder: Tokenizer, tmp_path: Path
) -> None:
    run(corpus, encoder, tmp_path / "whole")
    files = find_files([corpus])
    options = TokenizeOptions(file_bytes=SHARD_BYTES)
    for stop in range(1, 24, 2):
        out = tmp_path / str(stop)
        with pytest.raises(KilledError):
            tokenize_files(files, encoder, out, options, stop_after(stop))  # type: ignore[arg-type]
        before = {path.name: path.stat().st_ino for path in out.glob("shard-*.bin")}
        done = tokenize_files(files, encoder, out, options)
        assert done.resumed_shards == len(before)
        assert (
            before.items()
            <= {path.name: path.stat().st_ino for path in out.glob("shard-*.bin")}.items()
        )
        assert content(out) == content(tmp_path / "whole")


def test_a_run_stopped_again_and_again_ends_with_the_same_bytes(
    corpus: Path, encoder: Tokenizer, tmp_path: Path
) -> None:
    run(corpus, encoder, tmp_path / "whole")
    options = TokenizeOptions(file_bytes=SHARD_BYTES)
    for _ in range(40):
        try:
            tokenize_files(
                find_files([corpus]),
                encoder,
                tmp_path / "cut",
                options,
                stop_after(6),  # type: ignore[arg-type]
            )
            break
        except KilledError:
            pass
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


KILLED = """
import multiprocessing, os, pathlib, signal, sys
from phalanx.data.tokenize import inputs
from phalanx.data.tokenize import run as tokenize
from phalanx.data.tokenize.inputs import find_files
from phalanx.data.tokenize.vocabulary import load_tokenizer
tokenize._RUN_BYTES, inputs.LINES_BYTES, inputs.PIECE_CHARACTERS = 1500, 700, 1000
texts, tokenizer, out = map(pathlib.Path, sys.argv[1:4])
def report(done):
    if len(list(out.glob("shard-*.bin"))) >= 3:
        pids = [str(worker.pid) for worker in multiprocessing.active_children()]
        (out.parent / "pids").write_text(" ".join(pids))
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    options = tokenize.TokenizeOptions(file_bytes=2000, workers=2)
    tokenize.tokenize_files(find_files([texts]), load_tokenizer(tokenizer), out, options, report)
"""


def test_a_killed_process_leaves_no_workers_and_can_be_continued(
    corpus: Path, encoder: Tokenizer, tmp_path: Path
) -> None:
    run(corpus, encoder, tmp_path / "whole")
    tokenizer = tmp_path / "whole" / "tokenizer.json"
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(corpus), str(tokenizer), str(tmp_path / "cut")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    workers = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 90
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
    assert not (tmp_path / "cut" / "manifest.json").exists()
    done = run(corpus, encoder, tmp_path / "cut", workers=2)
    assert done.resumed_shards >= 3
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def interrupted(corpus: Path, encoder: Tokenizer, out: Path) -> None:
    options = TokenizeOptions(file_bytes=SHARD_BYTES)
    with pytest.raises(KilledError):
        tokenize_files(find_files([corpus]), encoder, out, options, stop_after(8))  # type: ignore[arg-type]
    assert (out / "progress.jsonl").exists()


def test_a_torn_last_line_of_the_journal_is_as_if_never_written(
    corpus: Path, encoder: Tokenizer, tmp_path: Path
) -> None:
    run(corpus, encoder, tmp_path / "whole")
    interrupted(corpus, encoder, tmp_path / "cut")
    journal = tmp_path / "cut" / "progress.jsonl"
    journal.write_bytes(journal.read_bytes()[:-25])
    run(corpus, encoder, tmp_path / "cut")
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_an_unfinished_run_is_continued_only_as_it_began(
    corpus: Path, encoder: Tokenizer, tmp_path: Path
) -> None:
    interrupted(corpus, encoder, tmp_path / "cut")
    other = vocabulary.train_tokenizer(find_files([corpus]), vocab_size=290)
    with pytest.raises(DataError, match=r"progress\.jsonl.*another tokenizer.*--force"):
        run(corpus, other, tmp_path / "cut")
    with pytest.raises(DataError, match=r"progress\.jsonl.*other inputs"):
        run(corpus / "a.jsonl", encoder, tmp_path / "cut")
    (tmp_path / "cut" / "shard-00001.bin").write_bytes(b"short")
    with pytest.raises(DataError, match=r"shard-00001\.bin: was finished.*gone or changed"):
        run(corpus, encoder, tmp_path / "cut")
    done = run(corpus, other, tmp_path / "cut", replace=True)
    assert done.resumed_shards == 0
    run(corpus, other, tmp_path / "fresh")
    assert content(tmp_path / "cut") == content(tmp_path / "fresh")


NO_SPACE = """
import pathlib, resource, sys
from phalanx.data import (DataError)
from phalanx.data.tokenize import inputs
from phalanx.data.tokenize import run as tokenize
from phalanx.data.tokenize.inputs import find_files
from phalanx.data.tokenize.vocabulary import load_tokenizer
tokenize._RUN_BYTES, inputs.LINES_BYTES, inputs.PIECE_CHARACTERS = 1500, 700, 1000
texts, tokenizer, out = map(pathlib.Path, sys.argv[1:4])
def report(done):
    if len(list(out.glob("shard-*.bin"))) >= 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
options = tokenize.TokenizeOptions(file_bytes=2000)
try:
    tokenize.tokenize_files(find_files([texts]), load_tokenizer(tokenizer), out, options, report)
except DataError as error:
    sys.exit(str(error))
"""


def test_no_space_left_is_said_in_words_and_finished_shards_are_kept(
    corpus: Path, encoder: Tokenizer, tmp_path: Path
) -> None:
    run(corpus, encoder, tmp_path / "whole")
    tokenizer = tmp_path / "whole" / "tokenizer.json"
    out = tmp_path / "full"
    command = [sys.executable, "-c", NO_SPACE, str(corpus), str(tokenizer), str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "no space left" in ended.stderr and "run the same command again" in ended.stderr
    assert not list(out.glob("*.tmp")) and not (out / "manifest.json").exists()
    assert run(corpus, encoder, out).resumed_shards >= 3
    assert content(out) == content(tmp_path / "whole")


def test_what_was_left_out_is_counted_and_listed_with_line_numbers(
    corpus: Path, encoder: Tokenizer, tmp_path: Path
) -> None:
    done = run(corpus, encoder, tmp_path / "out", inputs=("texts",))
    source = done.manifest.source
    assert (source.files, source.unreadable, source.inputs) == (5, 3, ("texts",))
    assert source.empty >= 1
    lines = (tmp_path / "out" / "unreadable.jsonl").read_bytes().splitlines()
    listed = [msgspec.json.decode(line) for line in lines]
    assert [(Path(entry["file"]).name, entry["line"]) for entry in listed] == [
        ("a.jsonl", 21),
        ("b.jsonl", 21),
        ("c.jsonl", 21),
    ]


def test_a_document_longer_than_a_shard_crosses_shards(
    corpus: Path, encoder: Tokenizer, tmp_path: Path
) -> None:
    run(corpus, encoder, tmp_path / "out")
    stream = ShardStream(tmp_path / "out")
    starts = stream.document_starts(0, stream.tokens)
    ends = np.append(starts[1:], stream.tokens)
    longest = int((ends - starts).argmax())
    assert ends[longest] - starts[longest] > 2 * stream.manifest.file_tokens
    tokens = np.zeros(ends[longest] - starts[longest], np.int64)
    stream.read_tokens(int(starts[longest]), len(tokens), tokens)
    text = (corpus / "long.txt").read_text()
    assert encoder.decode(tokens[:-1].tolist(), skip_special_tokens=False) == text
    assert (tokens[:-1] != stream.end_of_document).all()
    assert tokens[-1] == stream.end_of_document


def test_a_vocabulary_beyond_16_bits_is_stored_in_32(tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(70_000)}
    encoder = Tokenizer(models.WordLevel({**words, "</s>": 70_000}, unk_token="</s>"))
    encoder.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (tmp_path / "a.txt").write_text("w1 w69999 w65536")
    done = tokenize_files([tmp_path / "a.txt"], encoder, tmp_path / "out")
    assert (done.manifest.dtype, done.manifest.vocab) == ("uint32", 70_001)
    tokens = np.zeros(4, np.int64)
    ShardStream(tmp_path / "out").read_tokens(0, 4, tokens)
    assert tokens.tolist() == [1, 69_999, 65_536, 70_000]


def test_inputs_of_which_nothing_can_be_read_make_no_corpus(
    tmp_path: Path, encoder: Tokenizer
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"body": "here"}\n{"body": "and here"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1: no document .*`text`.*--text-key"):
        tokenize_files([tmp_path / "a.jsonl"], encoder, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    options = TokenizeOptions(text_key="body")  # nothing is left to stand in the way
    done = tokenize_files([tmp_path / "a.jsonl"], encoder, tmp_path / "out", options)
    assert done.manifest.documents == 2


def test_texts_without_a_document_make_an_empty_corpus(tmp_path: Path, encoder: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": ""}\n{"text": ""}\n')
    done = tokenize_files([tmp_path / "a.jsonl"], encoder, tmp_path / "out")
    assert (done.manifest.tokens, done.manifest.source.empty) == (0, 2)
    assert ShardStream(tmp_path / "out").tokens == 0


def test_lines_of_nested_lists_and_lines_that_no_memory_holds_are_named(
    tmp_path: Path, encoder: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "LINES_BYTES", 64)
    monkeypatch.setattr(inputs, "MOST_LINE_BYTES", 300_000)
    lines = [f'{{"text": "text {number}"}}' for number in range(20)]
    lines[5] = '{"text": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    lines[9] = '{"text": "' + "x" * 900_000 + '"}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    done = tokenize_files([tmp_path / "a.jsonl"], encoder, tmp_path / "out")
    assert [found.line for found in done.unreadable] == [6, 10]
    assert done.manifest.documents == 18


def test_a_file_that_changes_while_it_is_read_makes_no_corpus(
    tmp_path: Path, encoder: Tokenizer
) -> None:
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_text("a text that is short\n")

    def grow(done: TokenizeProgress) -> None:
        path.write_text("a text that is longer than it was\n")

    with pytest.raises(DataError, match="changed while it was read"):
        tokenize_files([path], encoder, out, progress=grow)
    assert not (out / "manifest.json").exists()
    assert tokenize_files([path], encoder, out).manifest.documents == 1


def test_two_runs_in_one_folder_do_not_mix(tmp_path: Path, encoder: Tokenizer) -> None:
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_text("a text\n")
    out.mkdir()
    with alone_in(out), pytest.raises(DataError, match="another process is writing"):
        tokenize_files([path], encoder, out)
    assert tokenize_files([path], encoder, out).manifest.documents == 1
