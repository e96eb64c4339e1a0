"""Raw files are found on disk and in object stores; their version changes with their content."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from phalanx.data import DataError
from phalanx.data.prepare.engine import LocalEngine
from phalanx.data.prepare.output.trace import CorpusTrace
from phalanx.data.prepare.read.file_formats import read_documents
from phalanx.data.prepare.read.inputs import (
    InputFile,
    find_inputs,
    group_inputs,
    open_input,
    stat_input,
)
from phalanx.data.prepare.run import prepare
from tests.data.prepare.raw import prose, recipe, write_lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.txt", "deep/c.warc.gz", "deep/x.bin", "deep/d.jsonl.zst"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def names(folder: Path, *patterns: str) -> list[str]:
    return [file.path.removeprefix(f"{folder}/") for file in find_inputs("read.inputs", patterns)]


def test_inputs_are_files_folders_and_patterns_sorted_and_once(folder: Path) -> None:
    everything = ["a.txt", "b.jsonl", "deep/c.warc.gz", "deep/d.jsonl.zst"]
    assert names(folder, str(folder), f"{folder}/*.jsonl") == everything
    assert names(folder, f"{folder}/**/*.bin") == ["deep/x.bin"]
    assert names(folder, f"{folder}/de*") == everything[2:]


def test_what_matches_nothing_is_refused(folder: Path) -> None:
    (folder / "empty").mkdir()
    for pattern in ("*.csv", "empty", "none/there"):
        with pytest.raises(DataError, match="matches nothing"):
            find_inputs("read.inputs", [f"{folder}/{pattern}"])


def test_a_version_changes_with_the_content(folder: Path) -> None:
    before = stat_input(str(folder / "a.txt"))
    os.utime(folder / "a.txt", ns=(1, 1))
    assert stat_input(str(folder / "a.txt")).version != before.version


def test_small_files_are_one_unit_and_a_new_one_changes_only_its_own() -> None:
    files = [InputFile(f"{number:04}.txt", 10, "") for number in range(1000)]
    groups = group_inputs(files, 10_000)
    assert [file for group in groups for file in group] == files
    assert 10 < len(groups) < 40
    longer = group_inputs([*files[:500], InputFile("0499a.txt", 10, ""), *files[500:]], 10_000)
    assert sum(group not in groups for group in longer) <= 2


def test_large_files_and_full_groups_stand_alone() -> None:
    sizes = [1, 1, 99, 100, 1, 1]
    files = [InputFile(f"{at}.txt", size, "") for at, size in enumerate(sizes)]
    groups = group_inputs(files, 100)
    assert [[file.bytes for file in group] for group in groups] == [[1, 1], [99], [100], [1, 1]]
    assert len(group_inputs(files, 0)) == 6


class TestStores:
    """A folder as a store: the client is the same as for S3."""

    @pytest.fixture(autouse=True)
    def _client(self) -> None:
        pytest.importorskip("obstore")

    def test_objects_are_listed_by_folder_pattern_and_name(self, folder: Path) -> None:
        url = f"file://{folder}"
        everything = [f"{url}/{name}" for name in ("a.txt", "b.jsonl", "deep/c.warc.gz")]
        everything.append(f"{url}/deep/d.jsonl.zst")
        assert names(folder, url) == everything
        assert names(folder, f"{url}/deep/*.zst") == everything[3:]
        assert names(folder, f"{url}/b.jsonl") == [everything[1]]
        (found,) = find_inputs("read.inputs", [f"{url}/b.jsonl"])
        assert found.bytes == 7 and found.stored
        for missing in ("*.csv", "none.jsonl"):
            with pytest.raises(DataError, match="matches nothing"):
                find_inputs("read.inputs", [f"{url}/{missing}"])

    def test_objects_are_read_as_files_are(self, tmp_path: Path) -> None:
        lines = b"".join(b'{"text": "number %d"}\n' % number for number in range(2000))
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
        url = f"file://{tmp_path}/a.jsonl.gz"
        with open_input(url) as raw:
            assert raw.readall() == (tmp_path / "a.jsonl.gz").read_bytes()
        on_disk = list(read_documents(str(tmp_path / "a.jsonl.gz"), "text", "id"))
        assert list(read_documents(url, "text", "id")) == on_disk and len(on_disk) == 2000

    def test_a_corpus_is_made_of_objects_and_traced_to_them(self, tmp_path: Path) -> None:
        write_lines(tmp_path / "store/a.jsonl", [prose(seed) for seed in range(4)])
        url = f"file://{tmp_path}/store"
        sets = [f'read.inputs=["{url}"]', "deduplicate.near=false"]
        report = prepare(recipe(tmp_path, overrides=sets), tmp_path, LocalEngine(1)).report
        assert report.documents == 4
        traced = CorpusTrace(tmp_path / "out").document(2)
        assert (traced.file, traced.record) == (f"{url}/a.jsonl", 3) and traced.content
