"""Every figure of README and docs is in the store, or says where else it comes from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proof import documents, evidence, headlines, history
from proof.claims import CLAIMS
from tests.proof.test_history import measured

AGE = re.compile(r"\(age[^)]*\)")


def test_every_number_with_a_unit_is_a_link_into_the_evidence_or_listed() -> None:
    assert [f"{s.page}:{s.line}: {s.text}" for s in documents.stray_figures()] == []


def test_every_listed_number_still_stands_on_its_page() -> None:
    stands = {
        (stray.page, stray.text)
        for path in documents.pages()
        for stray in documents.figures_of(path)
    }
    listed = {(page, text) for page, texts in documents.other_figures().items() for text in texts}
    assert listed - stands == set()


def test_every_link_says_what_was_measured_last() -> None:
    assert documents.wrong_links(history.read()) == []


def test_the_page_of_evidence_is_what_the_store_gives() -> None:
    page = documents.EVIDENCE.read_text(encoding="utf-8")
    assert AGE.sub("", page) == AGE.sub("", evidence.page(history.read()))


def test_the_page_says_what_a_measurement_does_not_show_any_more() -> None:
    queue = CLAIMS["queue"]
    today = evidence.page([measured("queue", commit="0123456789", command=queue.command)])
    assert "commit 0123456789 (age unknown, not in this history)" in today
    assert "The command was another one" not in today
    before = evidence.page([measured("queue", command="python -m benchmarks.old")])
    assert "The command was another one then: `python -m benchmarks.old`." in before


def test_every_stored_claim_is_known() -> None:
    assert {each.claim for each in history.read()} <= set(CLAIMS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a kill costs 1.02 s, worst 3 s", ["1.02 s", "3 s"]),
        ("4.5 to 4.8 % of a core", ["4.5 to 4.8 %"]),
        ("32,900 events a second", ["32,900 events a second"]),
        ("1,460 MB/s", ["1,460 MB/s"]),
        ("twice, on 16 nodes with 8 GPUs", []),
        ("`--seconds 5 s`", []),
        ('[1.02 s](evidence.md#recovery "recovery.worker_median")', []),
    ],
)
def test_numbers_with_units_are_found_in_prose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: list[str]
) -> None:
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"```\n5 s\n```\n{text}\n")
    assert [stray.text for stray in documents.figures_of(page)] == found


def test_links_are_renewed_and_wrong_ones_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "README.md"
    link = '[{}](docs/evidence.md#queue "queue.{}")'
    monkeypatch.setattr(documents, "pages", lambda: [page])
    monkeypatch.setattr(documents, "EVIDENCE", tmp_path / "evidence.md")
    store = [measured("queue", figures={"decisions_per_second": 6543.0})]
    page.write_text(link.format("9,999/s", "decisions_per_second"))
    assert "measured is '6,543/s'" in documents.wrong_links(store)[0]
    documents.write(store)
    assert page.read_text() == link.format("6,543/s", "decisions_per_second")
    assert documents.wrong_links(store) == []
    page.write_text(link.format("1", "nonsense"))
    assert "claimed nowhere" in documents.wrong_links(store)[0]


def test_the_table_of_readme_is_what_the_store_gives_and_its_bars_are_no_strays() -> None:
    readme = (documents.ROOT / "README.md").read_text(encoding="utf-8")
    shown = history.newest(history.read())
    assert headlines.with_table(readme, shown) == readme
    assert all(f"`{CLAIMS[name].command}`" in readme for name in headlines.HEADLINES)
    nothing = headlines.with_table(readme, {})
    assert "not measured (bar" in nothing and "evidence.md#recovery" not in nothing
