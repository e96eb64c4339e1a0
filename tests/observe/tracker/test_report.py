"""The post-mortem: everything is in it, and nothing that somebody wrote becomes markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from phalanx.observe.tracker.report import Curve, ReportInput, step_shares
from phalanx.observe.tracker.report_pages import html, markdown
from phalanx.observe.tracker.runs import Run

EVIL = "<script>alert(1)</script> | **x** [a](javascript:b) \"'\n# oops"


def material() -> ReportInput:
    buckets = {"productive": str(80 * 10**12), "restart": str(20 * 10**12)}
    run = Run(
        id="7",
        name=EVIL,
        state="failed",
        created=1.7e9,
        ended=1.7e9 + 60,
        exit={"message": EVIL},
        placements=[{"time": 1.7e9, "generation": 2, "nodes": [EVIL], "replicas": 2}],
        provenance={"packages": {"a": "1"}, "project": {"commit": "abc", "dirty": True}},
        summary={"step": 3, "loss": 2.5, "validation_step": 2, "validation_loss": 2.75},
    )
    incident = {
        "time": 1.7e9 + 5,
        "kind": "incident",
        "rank": 3,
        "node": "",
        "sentence": EVIL,
        "suggestion": "look",
        "evidence": {"root_cause_class": "hardware", "resumed_seconds": 1.25},
    }
    return ReportInput(
        run=run,
        curves={
            "loss": Curve([1, 2, 3, 4], [4.0, None, 3.0, 2.5]),
            "validation_loss": Curve([2, 4], [3.5, 2.75]),
            "step_seconds": Curve([1, 2], [1.0, 1.0]),
            "data_seconds": Curve([1, 2], [0.3, 0.3]),
        },
        incidents=[incident],
        ledger={
            "allocation_gpu_ns": str(10**14),
            "buckets": buckets,
            "estimated": (),
            "goodput": 0.8,
            "gpu_hours": 27.8,
            "dollars": 70.0,
        },
        requested={"gang": {"replicas": 2, "tensor": 1}},
        rank_means={"own_seconds": [1.0, 1.0, 1.5, 1.0]},
    )


class Tags(HTMLParser):
    """Tags and addresses of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]


def test_the_page_is_one_file_without_script_or_network() -> None:
    page = Tags()
    page.feed(html(material()))
    assert "script" not in page.tags
    assert page.addresses == []
    assert "svg" in page.tags


def test_both_forms_hold_incidents_causes_ledger_and_advice() -> None:
    for text in (html(material()), markdown(material()).replace("\\", "")):
        for words in (
            "hardware",
            "1.25 s",
            "productive",
            "80.00%",
            "slowest rank",
            "30% of a step",
        ):
            assert words in text


def test_both_forms_tell_the_loss_on_held_out_samples() -> None:
    for text in (html(material()), markdown(material()).replace("\\", "")):
        assert "loss on held-out samples after step 2: 2.75" in text
    assert "validation_loss: first 3.5" in markdown(material())
    assert 'aria-label="validation_loss: 2.75 to 3.5, steps 2 to 4"' in html(material())


def test_markdown_of_hostile_words_is_text() -> None:
    text = markdown(material())
    assert "<script>" not in re.sub(r"\\.", "", text)
    assert "\n# oops" not in text
    assert all(
        line.count("|") == line.count("\\|") or line.startswith("|") for line in text.splitlines()
    )


def test_a_run_of_which_nothing_is_known_still_has_a_report() -> None:
    empty = ReportInput(run=Run(id="x"))
    assert "nothing stands out" in markdown(empty)
    assert "nothing stands out" in html(empty)


def test_parts_of_a_step_sum_to_the_step() -> None:
    parts = {"forward": 0.3, "backward": 0.6, "exposed_communication": 0.4, "optimizer": 0.05}
    curves = {f"{name}_seconds": Curve([1, 2], [each, each]) for name, each in parts.items()}
    shares = step_shares(
        ReportInput(run=Run(id="x"), curves={**curves, "step_seconds": Curve([1, 2], [1.0, 1.0])})
    )
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["exposed_communication"] == pytest.approx(0.4)
    assert shares["backward"] == pytest.approx(2 * shares["forward"])
