"""The store keeps every measurement, and compares like with like."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from proof import history
from proof.history import Measurement


def measured(claim: str = "queue", rate: float = 100.0, **changes: object) -> Measurement:
    one = Measurement(
        claim=claim,
        date="2026-11-16",
        commit="abc",
        machine="here",
        busy=0.0,
        trusted=True,
        seconds=1.0,
        figures={"rate": rate},
    )
    return msgspec.structs.replace(one, **changes)


def test_what_is_appended_is_read_again_and_stored_once(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history.append([measured(), measured("core")], path)
    history.append([measured(), measured(rate=90.0)], path)
    assert history.read(path) == [measured(), measured("core"), measured(rate=90.0)]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history.append([measured()], path)
    path.write_text(path.read_text() + '{"claim": "qu\n')
    with pytest.raises(SystemExit, match=r"history\.jsonl:2"):
        history.read(path)


def test_the_reference_is_the_median_of_the_last_trusted_ones_on_such_a_machine() -> None:
    past = [measured(rate=1000.0)] * 3 + [measured(rate=rate) for rate in (100, 104, 96, 98, 102)]
    past += [measured(rate=1.0, trusted=False), measured(rate=1.0, machine="elsewhere")]
    assert history.reference(past, "queue", "here") == {"rate": 100.0}
    assert history.reference(past, "queue", "nowhere") == {}


def test_a_trusted_measurement_is_shown_before_a_newer_doubtful_one() -> None:
    doubtful = measured(rate=1.0, trusted=False)
    assert history.newest([measured(), doubtful])["queue"] == measured()
    assert history.newest([doubtful])["queue"] == doubtful
    assert history.newest([doubtful, measured()])["queue"] == measured()
