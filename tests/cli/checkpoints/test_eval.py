"""`phalanx eval`: scores as a table, JSON and a file; what is wrong in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import run_phalanx
from tests.train.evaluate.small_checkpoint import make_checkpoint, make_corpus


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and one run's checkpoint."""
    root = tmp_path_factory.mktemp("here")
    corpus = make_corpus(root)
    make_checkpoint(root / "runs" / "try" / "20260101-120000-abc123" / "checkpoints", corpus)
    return root


def test_domains_are_scored_into_a_table_json_and_a_file(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores.json"
    words = ("eval", "runs/try", "--perplexity", "texts=texts.jsonl", "--perplexity")
    done = run_phalanx(*words, "shards=corpus", "--out", str(out), folder=runs)
    assert done.returncode == 0, done.stderr
    assert "texts.perplexity" in done.stdout and "step 7" in done.stdout
    found = json.loads(out.read_text())
    assert set(found) == {"checkpoint", "step", "scores"} and found["step"] == 7
    assert found["scores"]["texts.loss"] == found["scores"]["shards.loss"]
    as_json = run_phalanx(*words, "shards=corpus", "--json", "--ranks", "2", folder=runs)
    assert as_json.returncode == 0, as_json.stderr
    told = json.loads(as_json.stdout)
    assert told["scores"] == pytest.approx(found["scores"], rel=1e-6)
    assert told["checkpoint"] == found["checkpoint"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runs/try"], "name --tasks, or --perplexity"),
        (["runs/try", "--perplexity", "corpus"], "NAME=PATH"),
        (["runs/none", "--perplexity", "a=corpus"], "runs/none"),
        (["runs/try", "--perplexity", "a=nowhere"], "perplexity.a"),
        (["runs/try", "--perplexity", "a=corpus", "--ranks", "2", "--tensor", "3"], "divisor"),
        (["runs/try", "--perplexity", "a=corpus", "--ema"], "holds no average of the weights"),
        (["runs/try", "--perplexity", "a=corpus", "--ranks", "3", "--tensor", "3"], "nearest"),
    ],
)
def test_what_is_wrong_is_one_sentence(runs: Path, words: list[str], said: str) -> None:
    done = run_phalanx("eval", *words, folder=runs)
    assert done.returncode != 0
    assert said in done.stderr and "Traceback" not in done.stderr


def test_a_domain_without_text_is_named_and_ends_with_an_error(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    done = run_phalanx("eval", "runs/try", "--perplexity", f"empty={tmp_path}", folder=runs)
    assert done.returncode == 1 and "not scored: empty" in done.stdout
