"""The examples of the pages about data do what they show."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from phalanx.config import check
from phalanx.config.load import job_from_table
from phalanx.data import ShardWriter

DOCS = Path(__file__).parents[2] / "docs"
NAMES = ("how-to/prepare-data.md", "concepts/data-order.md")
PAGE = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in NAMES)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ShardWriter(Path("runs/docs/corpus"), vocab=4096, end_of_document=0) as writer:
        writer.write(np.random.default_rng(0).integers(1, 4096, 100_000))
        writer.end_document()
        writer.finish()
    assert blocks("python")
    for example in blocks("python"):
        exec(compile(example, "docs/concepts/data-order.md", "exec"), {})


def test_the_job_examples_are_accepted() -> None:
    assert blocks("toml")
    for example in blocks("toml"):
        check(job_from_table({"model": {"preset": "tiny"}, **tomllib.loads(example)}), 1)
