"""The data commands, as a user calls them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from phalanx.cli.data.data import app
from phalanx.data import open_stream, read_manifest
from tests.data.corpora import write_corpus
from tests.data.corpus.test_foreign import DOCUMENTS, write_datatrove


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    records = [{"content": f"document number {number}"} for number in range(50)]
    path.write_bytes(msgspec.json.Encoder().encode_lines(records) + b"torn {\n")
    return path


def test_a_tokenizer_is_trained_and_used(lines: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    arguments = ("--text-key", "content", "--out")
    code, text, _ = run("train-tokenizer", lines, "--vocab-size", 300, *arguments, tokenizer)
    assert code == 0 and "vocabulary" in text
    out = tmp_path / "out"
    code, text, error = run("tokenize", lines, "--tokenizer", tokenizer, *arguments, out)
    assert code == 0 and "50 documents" in text
    assert "1 unreadable" in error and f"{lines}:51: " in error
    assert read_manifest(out).source.inputs == (str(lines),)


def test_a_wrong_text_key_is_refused_with_counts_and_the_keys_that_exist(tmp_path: Path) -> None:
    path, out = tmp_path / "mixed.jsonl", tmp_path / "out"
    records = [{"text": f"number {number}"} for number in range(50)]
    records += [{"body": f"number {number}", "id": "x"} for number in range(3004)]
    path.write_bytes(msgspec.json.Encoder().encode_lines(records))
    arguments = ("tokenize", path, "--vocab-size", 300, "--out", out)
    code, _, error = run(*arguments)
    assert code == 2
    assert "3,004 of 3,054 records" in error and "has no key `text`, only `body`, `id`" in error
    assert not (out / "manifest.json").exists()
    code, text, _ = run(*arguments, "--most-unreadable", 1)
    assert code == 0 and "50 documents" in text
    code, text, _ = run(*arguments, "--text-key", "body", "--force")
    assert code == 0 and "3,004 documents" in text


def test_verify_ends_with_the_bad_block_and_code_2(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", 500)
    code, text, _ = run("verify", tmp_path / "c")
    assert code == 0 and "500 tokens in 1 block of 1 file; checksums match" in text
    shard = tmp_path / "c" / "shard-00000.bin"
    shard.write_bytes(b"\xff" + shard.read_bytes()[1:])
    code, _, error = run("verify", tmp_path / "c")
    assert code == 2 and "shard-00000.bin: block 0" in error
    code, text, _ = run("verify", tmp_path / "c", "--json")
    assert code == 2 and "block 0" in msgspec.json.decode(text)["problems"][0]["rule"]


def test_stage_copies_once(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", 500)
    for copied in (True, False):
        code, text, _ = run("stage", tmp_path / "c", tmp_path / "local", "--json")
        assert code == 0 and (msgspec.json.decode(text)["copied_bytes"] > 0) == copied
    assert open_stream(tmp_path / "local").tokens == 500


def test_split_records_what_is_held_out(tmp_path: Path) -> None:
    write_datatrove(tmp_path / "text.ds", [[number + 1, 0] for number in range(100)])
    code, text, _ = run("split", tmp_path / "text.ds", "--fraction", 0.5, "--json")
    report = msgspec.json.decode(text)
    assert code == 0 and 25 < report["documents"] < 75
    held = open_stream(tmp_path / "text.ds", 200, 0.5, "validation")
    assert held.documents == report["documents"] and held.tokens == report["tokens"]
    code, _, error = run("split", tmp_path / "text.ds", "--fraction", 1.0)
    assert code == 2 and "between 0 and 1" in error


def test_inspect_shows_a_histogram_also_of_other_formats(tmp_path: Path) -> None:
    write_datatrove(tmp_path / "text.ds", DOCUMENTS)
    code, text, _ = run("inspect", tmp_path / "text.ds")
    assert code == 0 and "14 tokens in 4 documents" in text
    assert "median 3" in text and "█" in text and "5 6 7 0" in text


def test_inspect_of_a_job_draws_its_blend(tmp_path: Path) -> None:
    for name in ("web", "code"):
        write_corpus(tmp_path / name, 500)
    job = tmp_path / "job.toml"
    job.write_text(
        f"""
[model]
preset = "tiny"
[data]
source = "shards"
sequence = 8
[data.blend.web]
path = "{tmp_path}/web"
weight = 3.0
[data.blend.code]
path = "{tmp_path}/code"
[train]
steps = 10
global_batch = 8
"""
    )
    code, text, error = run("inspect", job)
    assert code == 0, error
    assert "640 tokens in 10 steps" in text and "75.00 %" in text and "25.00 %" in text
    code, text, _ = run("inspect", job, "--json")
    assert [source["drawn_tokens"] for source in msgspec.json.decode(text)["sources"]] == [480, 160]


def write_job(folder: Path) -> Path:
    write_corpus(folder / "corpus", 500, vocab=200)
    job = folder / "order.toml"
    job.write_text(
        f"""
[model]
preset = "tiny"
[data]
source = "shards"
path = "{folder}/corpus"
sequence = 8
[parallel]
data = 2
tensor = 2
[train]
steps = 10
global_batch = 8
micro_batch = 2
"""
    )
    return job


def test_order_tells_what_a_rank_reads(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    code, text, error = run("order", job, "--step", 3, "--json")
    assert code == 0, error
    rows = msgspec.json.decode(text)
    assert [row["sample"] for row in rows] == list(range(16, 24))
    code, text, _ = run("order", job, "--step", 3, "--rank", 2, "--micro-batch", 1, "--json")
    assert msgspec.json.decode(text) == rows[6:]  # ranks 2 and 3 are the second replica
    code, text, _ = run("order", job, "--step", 3, "--rank", 1, "--text", 3)
    assert code == 0 and "shard-00000.bin" in text and "sample 19" in text


def test_order_refuses_a_rank_that_is_not_there(tmp_path: Path) -> None:
    code, _, error = run("order", write_job(tmp_path), "--step", 1, "--rank", 4)
    assert code == 2 and "the job has 4 ranks" in error
    code, _, error = run(
        "order", write_job(tmp_path / "b"), "--step", 1, "--checkpoint", tmp_path / "none"
    )
    assert code == 2 and "checkpoint" in error
