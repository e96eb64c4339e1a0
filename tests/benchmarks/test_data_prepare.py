"""The benchmark of deduplication plants what it says, on a small scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.data_prepare import measure_quality, plant, write_keys
from phalanx.data.prepare.filter_files import KEYS_NAME
from phalanx.data.prepare.work import FilterFiles, WorkFolder


def test_planted_variants_lie_on_both_sides_of_the_bar_and_are_told_apart(tmp_path: Path) -> None:
    texts, alike = plant(400)
    assert len(texts) == 400 and len(alike) == 200
    assert sum(value >= 0.8 for value in alike.values()) > 20
    assert sum(value < 0.8 for value in alike.values()) > 20
    figures = measure_quality(tmp_path, 400)
    assert figures["precision"] == 1.0 and figures["recall"] >= 0.95


def test_a_tenth_of_the_made_up_documents_resembles_another(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path)
    layout = write_keys(work, 1000)
    keys = [np.load(work.result(FilterFiles.folder, each.key) / KEYS_NAME)[0] for each in layout]
    assert sum(each.documents for each in layout) == 1000
    assert 1000 - len(np.unique(np.concatenate(keys))) == 99  # the first has none before it
