"""A whole preparation: what is dropped, what comes out, and that only the input decides it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from phalanx.data import DataError, ShardStream, read_manifest
from phalanx.data.prepare import units as unit_code
from phalanx.data.prepare.engine import LocalEngine
from phalanx.data.prepare.output.summary import PrepareReport
from phalanx.data.prepare.output.trace import CorpusTrace
from phalanx.data.prepare.recipe import PrepareRecipe
from phalanx.data.prepare.run import Prepared, prepare
from phalanx.data.prepare.units import run_unit
from phalanx.data.prepare.work import WorkFolder
from tests.data.prepare.raw import prose, recipe, write_lines, write_raw

HERE = LocalEngine(1)


def made(recipe: PrepareRecipe, folder: Path, **options: bool) -> Prepared:
    return prepare(recipe, folder, HERE, **options)


def fingerprints(out: Path) -> dict[str, str]:
    """Of everything in a corpus but the work folder."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file() and "work" not in path.relative_to(out).parts
    }


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PrepareReport]:
    folder = tmp_path_factory.mktemp("prepared")
    write_raw(folder / "raw")
    return folder, made(recipe(folder), folder).report


def test_every_step_says_what_it_dropped(prepared: tuple[Path, PrepareReport]) -> None:
    _, report = prepared
    dropped = {step.name: step.dropped for step in report.steps if step.dropped}
    assert dropped == {
        "unreadable": 2,
        "empty": 1,
        "gopher.word_count": 1,
        "exact duplicates": 2,
        "near duplicates": 2,
    }
    assert report.records == 49 and report.documents == 41 == report.steps[-1].left
    assert report.masked == {"email": 1, "ip": 1}
    examples = report.examples["exact duplicates"]
    assert [(Path(each.file).name, each.id) for each in examples] == [
        ("a.jsonl", "a-20"),
        ("b.jsonl", "b-20"),
    ]
    assert "a.jsonl:4 (a-3)" in examples[0].reason
    assert report.examples["unreadable"][0].reason == "has no text under 'text', only text"
    assert report.examples["gopher.word_count"][0].text == "too short"


def test_the_corpus_is_one_that_training_reads(prepared: tuple[Path, PrepareReport]) -> None:
    folder, report = prepared
    manifest = read_manifest(folder / "out")
    stream = ShardStream(folder / "out")
    assert (manifest.documents, manifest.tokens) == (report.documents, report.tokens)
    assert manifest.source.unreadable == 2 and manifest.source.empty == 1
    stream.check(0, stream.tokens)


def test_the_report_is_a_page_and_a_text(prepared: tuple[Path, PrepareReport]) -> None:
    folder, report = prepared
    page = (folder / "out/report.html").read_text()
    text = (folder / "out/report.md").read_text()
    assert page.count("<rect") >= len(report.steps) and "near duplicates" in page
    assert "| exact duplicates | 2 |" in text and "█" in text


def test_any_number_of_workers_makes_the_same_bytes(prepared: tuple[Path, PrepareReport]) -> None:
    folder, _ = prepared
    expected = fingerprints(folder / "out")
    shutil.rmtree(folder / "out")
    prepare(recipe(folder), folder, LocalEngine(2))
    assert fingerprints(folder / "out") == expected


def test_a_second_run_has_nothing_to_do(
    prepared: tuple[Path, PrepareReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, report = prepared
    monkeypatch.setattr(unit_code, "_do", None)  # no unit may be run
    again = made(recipe(folder), folder)
    assert again.unchanged and again.report == report


def test_another_recipe_does_not_replace_a_corpus_unless_told(
    prepared: tuple[Path, PrepareReport], tmp_path: Path
) -> None:
    shutil.copytree(prepared[0], tmp_path, dirs_exist_ok=True)
    other = recipe(tmp_path, "[deduplicate]\njaccard = 0.99\n")
    with pytest.raises(DataError, match="already holds a corpus"):
        made(other, tmp_path)
    assert made(other, tmp_path, replace=True).report.documents == 43


class Killed(BaseException):
    """As a signal would end the process."""


def after(count: int, act: Callable[[], None]) -> Callable[..., None]:
    """A stand-in for the work of units that acts at the unit of that number."""
    real, calls = unit_code._do, 0

    def do(*given: object) -> None:
        nonlocal calls
        calls += 1
        real(*given)  # type: ignore[arg-type]
        if calls == count:
            act()

    return do


def test_killed_at_any_unit_it_goes_on_and_repeats_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_raw(tmp_path / "raw")
    near = "[deduplicate]\nrecall = 0.5\n"  # few bands, so few units
    real = unit_code._do

    def end() -> None:
        raise Killed

    runs = 0
    while True:
        runs += 1
        monkeypatch.setattr(unit_code, "_do", after(3, end))
        try:
            made(recipe(tmp_path, near), tmp_path)
        except Killed:
            drafts = list((tmp_path / "out/work").glob("*/.*"))
            assert not drafts or all(path.is_dir() for path in drafts)
        else:
            break
    interrupted = fingerprints(tmp_path / "out")
    done = sum(1 for path in (tmp_path / "out/work").glob("*/*") if path.is_dir())
    assert runs >= done // 3 - 1  # two units more each time, none lost
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setattr(unit_code, "_do", real)
    made(recipe(tmp_path, near), tmp_path)
    assert fingerprints(tmp_path / "out") == interrupted


def test_killed_between_manifest_and_report_it_completes_the_report(
    prepared: tuple[Path, PrepareReport], tmp_path: Path
) -> None:
    shutil.copytree(prepared[0] / "raw", tmp_path / "raw")
    report = made(recipe(tmp_path), tmp_path).report
    (tmp_path / "out/report.json").unlink()
    again = made(recipe(tmp_path), tmp_path)
    assert not again.unchanged and again.report == report


class DyingWorkers:
    """An engine whose workers die after some units of each call."""

    def __init__(self, units: int) -> None:
        self._units = units

    def run(self, phase: Path, units: int, done: Callable[[], None]) -> None:
        work, described = WorkFolder.of_phase(phase)
        left = [unit for unit in described.units if not work.done(unit)]
        for unit in left[::-1][: self._units]:  # in another order, too
            run_unit(work, described, unit)


def test_a_corpus_of_another_recipe_is_not_taken_for_that_of_the_report(
    prepared: tuple[Path, PrepareReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(prepared[0] / "raw", tmp_path / "raw")
    first = recipe(tmp_path)
    other = msgspec.structs.replace(first, examples=first.examples + 1)
    made(first, tmp_path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("phalanx.data.prepare.run.write_report", killed)
    with pytest.raises(KeyboardInterrupt):
        made(other, tmp_path, replace=True)
    monkeypatch.undo()
    with pytest.raises(DataError, match="of another recipe"):
        made(first, tmp_path)
    assert not made(other, tmp_path).unchanged


def test_units_of_workers_that_died_are_done_again(
    prepared: tuple[Path, PrepareReport], tmp_path: Path
) -> None:
    shutil.copytree(prepared[0] / "raw", tmp_path / "raw")
    prepare(recipe(tmp_path), tmp_path, DyingWorkers(5))
    ours, expected = tmp_path / "out", prepared[0] / "out"
    assert read_manifest(ours).fingerprint == read_manifest(expected).fingerprint


def test_workers_that_always_die_end_the_run_with_a_sentence(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.jsonl", [prose(1)])
    with pytest.raises(DataError, match="1 of 1 units of the phase inputs ended without a result"):
        prepare(recipe(tmp_path), tmp_path, DyingWorkers(0))


def test_only_what_a_changed_file_touches_is_done_again(
    prepared: tuple[Path, PrepareReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(prepared[0] / "raw", tmp_path / "raw")
    made(recipe(tmp_path), tmp_path)
    ran: list[str] = []
    real = unit_code._do

    def note(work: WorkFolder, phase: object, unit: unit_code.WorkUnit, out: Path) -> None:
        ran.append(unit.folder)
        real(work, phase, unit, out)  # type: ignore[arg-type]

    monkeypatch.setattr(unit_code, "_do", note)
    os.utime(tmp_path / "raw/a.jsonl")  # touched, but with the same content
    write_lines(tmp_path / "raw/b.jsonl", [prose(77)])
    made(recipe(tmp_path), tmp_path, replace=True)
    assert ran.count("inputs") == 2 and ran.count("filtered") == 1


def test_files_of_the_same_content_are_filtered_once_and_removed_once(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.jsonl", [prose(seed) for seed in range(5)], name="x")
    shutil.copy(tmp_path / "raw/a.jsonl", tmp_path / "raw/b.jsonl")
    report = made(recipe(tmp_path), tmp_path).report
    dropped = {step.name: step.dropped for step in report.steps if step.dropped}
    assert dropped == {"exact duplicates": 5}
    assert len(list((tmp_path / "out/work/filtered").iterdir())) == 1


def test_too_many_unreadable_records_are_refused_with_the_first(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.jsonl", [prose(seed) for seed in range(12)])
    with pytest.raises(
        DataError, match=r"12 of 12 records cannot be read.*has no text under 'body'"
    ):
        made(recipe(tmp_path, overrides=["read.text_key=body"]), tmp_path)


CLASSIFIER = """
def score(text):
    if text.startswith("B"):
        raise ValueError("no B")
    return 0.9 if len(text) % 2 else 0.1
"""


def test_a_classifier_drops_and_its_failures_are_counted_and_named(tmp_path: Path) -> None:
    texts = [prose(seed) for seed in range(60)]
    write_lines(tmp_path / "raw/a.jsonl", texts)
    (tmp_path / "own_score.py").write_text(CLASSIFIER)
    asked = '[[classifier]]\nfunction = "own_score:score"\nmost_failed = {}\n'
    failing = sum(text.startswith("B") for text in texts)
    low = sum(not text.startswith("B") and len(text) % 2 == 0 for text in texts)
    assert failing and low
    report = made(recipe(tmp_path, asked.format(0.5)), tmp_path).report
    assert report.failed == {"own_score:score": failing}
    dropped = {step.name: step.dropped for step in report.steps if step.dropped}
    assert dropped == {"own_score:score": low, "own_score:score failed": failing}
    assert report.examples["own_score:score failed"][0].reason == "ValueError: no B"


def test_a_classifier_that_fails_too_often_ends_the_run(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.jsonl", [prose(seed) for seed in range(12)])
    (tmp_path / "broken_score.py").write_text("def score(text):\n    raise KeyError('x')\n")
    asked = '[[classifier]]\nfunction = "broken_score:score"\n'
    with pytest.raises(DataError, match=r"fails on 12 of 12 documents.*KeyError: 'x'"):
        made(recipe(tmp_path, asked), tmp_path)


def test_evaluation_sets_keep_documents_out(tmp_path: Path) -> None:
    texts = [prose(seed) for seed in range(8)]
    write_lines(tmp_path / "raw/a.jsonl", texts)
    question = " ".join(texts[2].split()[10:30])
    (tmp_path / "exam.jsonl").write_bytes(msgspec.json.encode({"q": question, "a": "yes"}))
    check = f'[decontaminate]\nagainst = ["{tmp_path / "exam.jsonl"}"]\n'
    report = made(recipe(tmp_path, check), tmp_path).report
    assert {step.name: step.dropped for step in report.steps if step.dropped} == {
        "decontaminate": 1
    }
    assert report.examples["decontaminate"][0].id == "a-2"


def test_without_deduplication_copies_stay(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.jsonl", [prose(1), prose(1)])
    whole = recipe(tmp_path, overrides=["deduplicate=none"])
    assert made(whole, tmp_path).report.documents == 2


def test_when_nothing_passes_it_says_what_dropped_it(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.jsonl", ["short", "shorter"])
    with pytest.raises(
        DataError, match=r"none of 2 records passes \(dropped: 2 by gopher.word_count"
    ):
        made(recipe(tmp_path), tmp_path)


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.jsonl", [prose(1)])
    (tmp_path / "raw/b.parquet").write_bytes(b"no parquet")
    report = made(recipe(tmp_path), tmp_path).report
    assert report.examples["unreadable"][0].reason.startswith("is no Parquet file")


def test_small_files_in_one_unit_are_told_apart(
    prepared: tuple[Path, PrepareReport], tmp_path: Path
) -> None:
    shutil.copytree(prepared[0] / "raw", tmp_path / "raw")
    report = made(recipe(tmp_path, overrides=["read.group_mb=8"]), tmp_path).report
    assert len(list((tmp_path / "out/work/filtered").iterdir())) == 1
    assert {step.name: step.dropped for step in report.steps} == {
        step.name: step.dropped for step in prepared[1].steps
    }
    one, other = CorpusTrace(tmp_path / "out"), CorpusTrace(prepared[0] / "out")
    for number in range(report.documents):
        ours, theirs = one.document(number), other.document(number)
        assert Path(ours.file).name == Path(theirs.file).name
        assert (ours.record, ours.offset, ours.id) == (theirs.record, theirs.offset, theirs.id)
    for name, examples in report.examples.items():
        files = [Path(each.file).name for each in examples]
        assert files == [Path(each.file).name for each in prepared[1].examples[name]]
