"""Choosing a matmul's algorithm, with a library and clocks that are played."""

from __future__ import annotations

import ctypes
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.model.cuda import cublaslt, matmul_table
from phalanx.model.cuda.cublaslt import MatmulPlan, MatmulProblem
from phalanx.model.cuda.matmul_table import MatmulTable, Tuned, written

PROBLEM = MatmulProblem(64, 32, 16, False, True, torch.bfloat16, torch.bfloat16, False)
H200 = "NVIDIA H200"
VERSION = 120803


class PlayedLibrary:
    """cuBLASLt with four algorithms, numbered by their first word."""

    def __init__(self, version: int = VERSION) -> None:
        self.version = version
        self.asked = 0
        self.accepts: Callable[[int], bool] = lambda number: True
        self.cublasLtGetVersion = lambda: version

    def __getattr__(self, name: str) -> Any:
        def succeed(*_: Any) -> int:
            return 0

        return succeed

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:  # noqa: N802
        results, count = arguments[-2], arguments[-1]._obj
        self.asked += 1
        for number in range(4):
            results[number].algorithm[0] = 100 + number
            results[number].algorithm[7] = (1 << 64) - 1
        count.value = 4
        return 0

    def cublasLtMatmulAlgoCheck(self, *arguments: Any) -> int:  # noqa: N802
        given, checked = (each._obj for each in arguments[-2:])
        checked.workspace = 512
        return 0 if self.accepts(given[0]) else 7


class Start:
    """What a process knows that begins with this library and folder."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path | None, library: PlayedLibrary):
        self.library, self.timed = library, list[int]()
        cublaslt.table.cache_clear()
        patch.setattr(cublaslt, "library", lambda: library)
        patch.setattr(cublaslt, "_handle", lambda device: ctypes.c_void_p())
        patch.setattr(MatmulPlan, "launch", lambda *_: None)
        patch.setattr(MatmulPlan, "_seconds", self._seconds)
        patch.setattr(torch.cuda, "get_device_name", lambda device: H200)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        if folder is None:
            patch.delenv(cublaslt.FOLDER_VARIABLE, raising=False)
        else:
            patch.setenv(cublaslt.FOLDER_VARIABLE, str(folder))

    def _seconds(self, candidate: Any, *_: Any) -> float:
        number = candidate.algorithm[0]
        self.timed.append(number)
        return 1e-3 if number == 102 else 2e-3

    def chosen(self, problem: MatmulProblem = PROBLEM) -> int:
        plan = MatmulPlan(problem, 0)
        nothing = torch.empty(0)
        plan.run(nothing, nothing, nothing, None)
        assert plan.chosen is not None and plan.chosen.algorithm[7] == (1 << 64) - 1
        return int(plan.chosen.algorithm[0])


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Start]:
    def begin(folder: Path | None, library: PlayedLibrary | None = None) -> Start:
        return Start(monkeypatch, folder, library or PlayedLibrary())

    return begin


def test_the_second_start_times_nothing(start: Callable[..., Start], tmp_path: Path) -> None:
    first = start(tmp_path / "matmuls")
    assert first.chosen() == 102 and set(first.timed) == {100, 101, 102, 103}
    second = start(tmp_path / "matmuls")
    assert second.chosen() == 102
    assert (second.timed, second.library.asked) == ([], 0)


def test_each_shape_has_a_choice_of_its_own(start: Callable[..., Start], tmp_path: Path) -> None:
    start(tmp_path).chosen()
    other = start(tmp_path)
    other.chosen(PROBLEM._replace(turn_a=True))
    assert other.timed
    names = {PROBLEM._replace(**change).text for change in ({}, {"rows": 1}, {"fast": True})}
    assert len(names) == 3 and PROBLEM.text == "64x32x16-nt-bfloat16-bfloat16"


def test_another_library_times_anew(start: Callable[..., Start], tmp_path: Path) -> None:
    start(tmp_path).chosen()
    other = start(tmp_path, PlayedLibrary(VERSION + 1))
    assert other.chosen() == 102 and other.timed


def test_what_the_library_refuses_is_timed_anew(
    start: Callable[..., Start], tmp_path: Path
) -> None:
    start(tmp_path).chosen()
    library = PlayedLibrary()
    library.accepts = lambda number: number != 102
    other = start(tmp_path, library)
    other.chosen()
    assert other.timed


@pytest.mark.parametrize("content", ["", "{", "[]", '{"problem": 1}', "{}"])
def test_a_damaged_file_costs_the_timing_only(
    start: Callable[..., Start], tmp_path: Path, content: str
) -> None:
    start(tmp_path).chosen()
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    other = start(tmp_path)
    assert other.chosen() == 102 and other.timed
    assert start(tmp_path).chosen() == 102


def test_a_full_disk_costs_the_next_start_only(
    start: Callable[..., Start], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    first = start(tmp_path)
    monkeypatch.setattr(Path, "replace", full)
    assert first.chosen() == 102
    assert list(tmp_path.iterdir()) == []


def test_a_captured_graph_takes_the_librarys_first_and_keeps_nothing(
    start: Callable[..., Start], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert first.chosen() == 100 and list(tmp_path.iterdir()) == []


def test_a_shipped_table_holds_for_its_device_and_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[..., Start]
) -> None:
    words = (102, 0, 0, 0, 0, 0, 0, (1 << 64) - 1)
    text = written(H200, VERSION, {PROBLEM.text: Tuned(words, 512, 12.25)})
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/h200.toml").write_text(text)
    monkeypatch.setattr(matmul_table.resources, "files", lambda _package: tmp_path)
    matmul_table.shipped.cache_clear()
    try:
        assert MatmulTable(H200, VERSION, None).find(PROBLEM.text) == Tuned(words, 512, 12.2)
        assert MatmulTable("NVIDIA H100", VERSION, None).find(PROBLEM.text) is None
        assert MatmulTable(H200, VERSION + 1, None).find(PROBLEM.text) is None
        began = start(None)
        assert began.chosen() == 102 and began.timed == []
    finally:
        matmul_table.shipped.cache_clear()


def test_every_shipped_table_can_be_read() -> None:
    folder = Path(matmul_table.__file__).parent / matmul_table.SHIPPED
    for file in folder.glob("*.toml"):
        table = tomllib.loads(file.read_text())
        found = matmul_table.shipped(table["device"], table["library"])
        assert all(len(tuned.algorithm) == 8 for tuned in found.values()), file
