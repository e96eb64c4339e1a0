"""Planted near-duplicates are found, and what is only similar is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.data.prepare import duplicates
from phalanx.data.prepare.dedup.minhash import shingles
from phalanx.data.prepare.duplicates import Removed, find_duplicates
from phalanx.data.prepare.engine import LocalEngine, run_phase
from phalanx.data.prepare.filter_files import KeptWriter
from phalanx.data.prepare.read.file_formats import SourceDocument
from phalanx.data.prepare.recipe import DeduplicateSettings, PrepareRecipe
from phalanx.data.prepare.words import TextView
from phalanx.data.prepare.work import FilterFiles, GroupLayout, UnitPhase, WorkFolder
from tests.data.prepare.raw import changed, prose, recipe


def similarity(one: str, other: str) -> float:
    left, right = (set(shingles(TextView(text), 5).tolist()) for text in (one, other))
    return len(left & right) / len(left | right)


def write_filtered(work: WorkFolder, files: list[list[str]]) -> tuple[GroupLayout, ...]:
    layout = []
    for number, texts in enumerate(files):
        with work.commit(work.result(FilterFiles.folder, f"file{number}")) as out:
            writer = KeptWriter(out, DeduplicateSettings())
            for at, text in enumerate(texts):
                writer.write(SourceDocument(text, "", at, 0), TextView(text))
            writer.close()
        layout.append(GroupLayout(f"file{number}", 1, len(texts)))
    return tuple(layout)


def removed_of(
    work: WorkFolder,
    layout: tuple[GroupLayout, ...],
    settings: DeduplicateSettings,
    any_recipe: PrepareRecipe,
) -> Removed:
    def run(name: str, units: list) -> None:  # type: ignore[type-arg]
        phase = UnitPhase(name, any_recipe, "", tuple(units), layout)
        run_phase(LocalEngine(1), work, phase, lambda *_: None)

    return find_duplicates(work, layout, settings, run)


@pytest.fixture(scope="module")
def planted() -> tuple[list[str], dict[int, float]]:
    """Originals, then a variant of each; the similarity of each variant by its number."""
    originals = [prose(seed, words=150) for seed in range(300)]
    variants = [changed(text, 1 + seed % 9) for seed, text in enumerate(originals)]
    alike = {
        len(originals) + at: similarity(originals[at], variant)
        for at, variant in enumerate(variants)
    }
    assert min(alike.values()) < 0.6 and max(alike.values()) > 0.9
    return originals + variants, alike


def test_planted_near_duplicates_are_found_and_nothing_else(
    planted: tuple[list[str], dict[int, float]], tmp_path: Path
) -> None:
    texts, alike = planted
    work = WorkFolder(tmp_path / "work")
    layout = write_filtered(work, [texts[:250], texts[250:]])
    removed = set(
        removed_of(work, layout, DeduplicateSettings(), recipe(tmp_path)).numbers.tolist()
    )
    near = {number for number, measured in alike.items() if measured >= 0.8}
    assert len(near) > 80 and len(alike) - len(near) > 80
    assert len(removed & near) / len(near) >= 0.95
    assert len(removed & near) / len(removed) >= 0.99


def test_partitions_change_nothing(
    planted: tuple[list[str], dict[int, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = planted[0][:100] + planted[0][300:400] + planted[0][:10]
    found = []
    for name, most in (("one", 1000), ("many", 30)):
        monkeypatch.setattr(duplicates, "MOST_SORTED", most)
        monkeypatch.setattr(duplicates, "VERIFIED_TOGETHER", most)
        work = WorkFolder(tmp_path / name)
        layout = write_filtered(work, [texts[:70], texts[70:]])
        removed = removed_of(work, layout, DeduplicateSettings(), recipe(tmp_path))
        found.append((removed.exact, removed.near, removed.numbers.tolist()))
    assert found[0] == found[1]
    assert found[0][0] == 10
    assert len(list((tmp_path / "many/buckets").iterdir())) > 60
