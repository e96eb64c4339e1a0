"""What the tests of evaluation share: made once for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.evaluate.small_checkpoint import make_checkpoint, make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("domain"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("run"), corpus)
