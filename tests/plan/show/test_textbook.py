"""The back of the envelope: its numbers, and where the usual ones contradict each other."""

from __future__ import annotations

import pytest

from phalanx.config import ConfigError
from phalanx.hardware import cluster
from phalanx.plan.show.textbook import FormulaLine, TextbookCase, textbook


@pytest.fixture(scope="module")
def lines() -> dict[str, FormulaLine]:
    found: dict[str, FormulaLine] = {}
    for line in textbook():
        found.setdefault(line.topic, line)
    return found


@pytest.mark.parametrize(
    ("topic", "value", "result"),
    [
        ("training state", 16e12, "16.0 TB"),
        ("GPUs to hold it", 200, ">= 200 GPUs"),
        ("speed", 6.596e6, "6.6M tok/s"),
        ("time to train", 26.32, "26 days"),
        ("bubble", 15 / 79, "19.0%"),
        ("replicas", 781, "781 replicas"),
        ("sequences in a batch", 512, "512 sequences"),
        ("NVLink to network", 18, "18x"),
        ("the same, one way", 9, "9x"),
        ("PCIe 5.0 x16", 63.0e9, "63.0 GB/s one way"),
        ("ring all-reduce moves", 2 * 780 / 781, "1.9974 x"),
        ("one bucket", 0.9987e-3, "0.999 ms"),
        ("time between failures", 4.0, "4 h"),
        ("Llama 3", 3.093, "3.1 h"),
        ("6.5 per 1000 node-days", 1.803, "1.8 h"),
    ],
)
def test_the_usual_figures(
    lines: dict[str, FormulaLine], topic: str, value: float, result: str
) -> None:
    assert lines[topic].value == pytest.approx(value, rel=1e-3)
    assert lines[topic].result == result


def test_the_rate_of_rsc_1_gives_14_minutes_at_131072_gpus() -> None:
    assert textbook()[-1].result == "14 min"


def test_contradictions_are_pointed_out(lines: dict[str, FormulaLine]) -> None:
    assert not lines["sequences in a batch"].fits
    assert "781 replicas" in lines["sequences in a batch"].note
    assert not lines["time between failures"].fits
    assert "half hour" in lines["time between failures"].note
    assert lines["speed"].fits and lines["bubble"].fits


def test_numbers_that_agree_are_not_called_wrong() -> None:
    case = TextbookCase(parameters=8e9, pipeline=1, micro_batches=1, batch_tokens=2**24)
    fits = {line.topic: line.fits for line in textbook(case, cluster("h100-1024"))}
    assert fits["sequences in a batch"] and fits["batch for that bubble"] and fits["their overlap"]


@pytest.mark.parametrize(
    ("case", "on", "said"),
    [
        (TextbookCase(), "h100-64", "must fit on 64"),
        (TextbookCase(mfu=40.0), "h100-100k", "at most 1"),
        (TextbookCase(), "v100-1024", "no such peak"),
    ],
)
def test_what_cannot_be_computed_is_refused(case: TextbookCase, on: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        textbook(case, cluster(on))
