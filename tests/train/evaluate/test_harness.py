"""Requests of the harness: the end of what is too long, stops, and rules for special tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from phalanx.config import ConfigError
from phalanx.train.evaluate.rows import rolling
from phalanx.train.evaluate.score import ModelScorer
from tests.train.evaluate.small_checkpoint import SEQUENCE, TEXTS, opened

if TYPE_CHECKING:
    from phalanx.train.evaluate.harness import HarnessModel

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm_eval is not installed: pip install 'phalanx[eval]'",
)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> HarnessModel:
    from phalanx.train.evaluate.harness import HarnessModel  # threads, which no fork may meet

    loaded = opened(checkpoint)
    assert loaded.codec is not None
    return HarnessModel(ModelScorer(loaded), loaded.codec)


def asked(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


def test_a_continuation_is_scored_after_the_end_of_its_context(model: HarnessModel) -> None:
    long, short = "the quick brown fox " * 20, "the fox"
    found = model.loglikelihood([asked(long, " dog"), asked(short, " dog"), asked("", "dog")])
    assert len(found) == 3 and all(value < 0 for value, _ in found)
    tokens = model.codec.encode(long.rstrip())
    cut = model.codec.decode(tokens[-(SEQUENCE - 1) :])
    assert model.codec.encode(cut) == tokens[-(SEQUENCE - 1) :]


def test_a_text_is_scored_by_windows_of_it(model: HarnessModel) -> None:
    (found,) = model.loglikelihood_rolling([asked(TEXTS[1])])
    windows = list(rolling(model.codec.encode(TEXTS[1]), model.codec.start, SEQUENCE))
    assert len(windows) > 1
    expected = sum(score.log_probability for score in model.scorer.score(windows))
    assert found == pytest.approx(expected, abs=1e-6)


def test_texts_are_written_up_to_the_first_stop(model: HarnessModel) -> None:
    free, stopped, other = {"until": [], "max_gen_toks": 8}, {"until": ["e"]}, {"max_gen_toks": 3}
    stopped["max_gen_toks"] = 8  # type: ignore[assignment]
    requests = [asked("the quick", each) for each in (free, stopped, other, free)]
    whole, cut, short, again = model.generate_until(requests)
    assert whole == again and whole.startswith(cut) and "e" not in cut
    assert whole.startswith(short)
    with pytest.raises(ConfigError, match="give --sequence"):
        model.generate_until([asked("the", {"max_gen_toks": SEQUENCE})])


def test_a_text_that_begins_with_the_special_token_gets_no_other(model: HarnessModel) -> None:
    name = model.codec.decode([model.codec.start], special=True)
    assert model.tok_encode(name)[:1] == [model.codec.start]
    assert model.tok_encode("a", add_special_tokens=False) == model.codec.encode("a")
