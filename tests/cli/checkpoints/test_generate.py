"""`phalanx generate`: texts after prompts, the same ones for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import run_phalanx
from tests.train.evaluate.small_checkpoint import make_checkpoint, make_corpus


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("here")
    return make_checkpoint(root / "run", make_corpus(root))


def test_texts_follow_prompts_and_a_seed_draws_them_again(checkpoint: Path) -> None:
    words = ("generate", str(checkpoint), "--prompt", "the fox", "--tokens", "6", "--json")
    done = run_phalanx(*words)
    assert done.returncode == 0, done.stderr
    (greedy,) = json.loads(done.stdout)
    assert greedy["prompt"] == "the fox" and 0 < greedy["tokens"] <= 6
    drawn = (*words, "--samples", "3", "--temperature", "1.5", "--seed", "4")
    first, second = run_phalanx(*drawn), run_phalanx(*drawn, "--ranks", "2", "--tensor", "2")
    texts = [each["text"] for each in json.loads(first.stdout)]
    assert texts == [each["text"] for each in json.loads(second.stdout)]
    assert len(set(texts)) > 1


def test_without_a_prompt_a_document_begins(checkpoint: Path) -> None:
    done = run_phalanx("generate", str(checkpoint), "--tokens", "3")
    assert done.returncode == 0 and done.stdout.startswith("|")


def test_without_a_tokenizer_it_is_said_how_to_give_one(checkpoint: Path, tmp_path: Path) -> None:
    corpus = checkpoint.parents[1] / "corpus"
    corpus.rename(tmp_path / "away")
    try:
        done = run_phalanx("generate", str(checkpoint))
        assert done.returncode != 0 and "give --tokenizer" in done.stderr
        given = run_phalanx("generate", str(checkpoint), "--tokenizer", str(tmp_path / "away"))
        assert given.returncode == 0, given.stderr
    finally:
        (tmp_path / "away").rename(corpus)
