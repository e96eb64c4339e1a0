"""Hashes of files: of what they hold, not of where they lie; read again when they changed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from phalanx.data.prepare.engine import LocalEngine
from phalanx.data.prepare.run import prepare
from phalanx.pipelines.run.content import (
    ContentCache,
    has_files,
    last_checkpoint,
    output_content,
    pattern_paths,
)
from tests.data.prepare.raw import prose, recipe, write_lines

OLD_NS = time.time_ns() - 3600 * 10**9


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, ns=(OLD_NS, OLD_NS))
    return path


@pytest.fixture
def cache(tmp_path: Path) -> ContentCache:
    return ContentCache(tmp_path / "hashes.json")


def test_the_same_files_elsewhere_have_the_same_content(
    tmp_path: Path, cache: ContentCache
) -> None:
    for folder in ("one", "two"):
        write(tmp_path / folder / "a.txt", "a")
        write(tmp_path / folder / "deep" / "b.txt", "b")
    for pattern in ("a.txt", "", "**/*.txt"):
        one, two = (cache.of_pattern(f"{tmp_path}/{folder}/{pattern}") for folder in ("one", "two"))
        assert one.content == two.content and one.files[0].path != two.files[0].path


@pytest.mark.parametrize("change", ["text", "name", "more"])
def test_another_text_name_or_number_of_files_is_another_content(
    tmp_path: Path, cache: ContentCache, change: str
) -> None:
    path = write(tmp_path / "x" / "a.txt", "a")
    before = cache.of_pattern(f"{tmp_path}/x/*").content
    if change == "text":
        path.write_text("b")
    elif change == "name":
        path.rename(path.with_name("b.txt"))
    else:
        write(tmp_path / "x" / "b.txt", "")
    assert cache.of_pattern(f"{tmp_path}/x/*").content != before


def test_a_file_is_read_once_until_it_looks_different(tmp_path: Path, cache: ContentCache) -> None:
    path = write(tmp_path / "a.txt", "a")
    first = cache.of_file(path)
    cache.save()
    path.write_text("b")
    os.utime(path, ns=(OLD_NS, OLD_NS))  # nobody can see that it changed
    again = ContentCache(tmp_path / "hashes.json")
    assert again.of_file(path) == first
    path.write_text("b")
    assert again.of_file(path).sha256 != first.sha256


def test_a_file_that_was_just_written_is_not_trusted_by_its_time(
    tmp_path: Path, cache: ContentCache
) -> None:
    path = tmp_path / "a.txt"
    lately = time.time_ns() + 3600 * 10**9  # however slow this machine is
    path.write_text("a")
    os.utime(path, ns=(lately, lately))
    first = cache.of_file(path)
    path.write_text("b")
    os.utime(path, ns=(lately, lately))
    assert cache.of_file(path).sha256 != first.sha256


def test_a_damaged_cache_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "hashes.json").write_text("{")
    assert ContentCache(tmp_path / "hashes.json").of_file(write(tmp_path / "a", "a")).size == 1


def test_patterns_are_files_in_order_and_a_folder_is_itself(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt"):
        write(tmp_path / "x" / name, name)
    assert pattern_paths(f"{tmp_path}/x/*.txt") == [f"{tmp_path}/x/a.txt", f"{tmp_path}/x/b.txt"]
    assert pattern_paths(f"{tmp_path}/x") == [f"{tmp_path}/x"]
    assert has_files(f"{tmp_path}/x/*.txt") and not has_files(f"{tmp_path}/x/*.md")


def test_links_are_followed_but_not_in_circles(tmp_path: Path, cache: ContentCache) -> None:
    write(tmp_path / "elsewhere" / "a.txt", "a")
    (tmp_path / "x" / "deep").mkdir(parents=True)
    (tmp_path / "x" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "x" / "deep" / "circle").symlink_to(tmp_path / "x")
    files = cache.of_pattern(f"{tmp_path}/x").files
    assert [each.path for each in files] == [f"{tmp_path}/x/link/a.txt"]


def test_a_run_is_the_weights_of_its_last_checkpoint(tmp_path: Path) -> None:
    for run, session in (("one", "abc"), ("two", "def")):
        for step in (5, 10):
            folder = tmp_path / run / "checkpoints" / f"step-{step:08d}"
            write(folder / f"rank-00000.{session}.safetensors", f"weights {step}")
            write(folder / "manifest.json", session)
        write(tmp_path / run / "checkpoints" / "step-00000020" / "rank-00000.x.safetensors", run)
        write(tmp_path / run / "logs" / "rank-0.log", run)
    one, two = tmp_path / "one", tmp_path / "two"
    assert last_checkpoint(one) == one / "checkpoints" / "step-00000010"
    assert output_content(one) == output_content(two)
    write(two / "checkpoints" / "step-00000010" / "rank-00000.def.safetensors", "others")
    assert output_content(one) != output_content(two)


def test_a_checkpoint_of_a_gang_is_its_step_whatever_its_generation(tmp_path: Path) -> None:
    for run, generation in (("one", ""), ("two", ".g1"), ("three", ".g12")):
        folder = tmp_path / run / "checkpoints" / f"step-00000010{generation}"
        write(folder / "rank-00000.abc.safetensors", "weights")
        write(folder / "manifest.json", "{}")
        assert last_checkpoint(tmp_path / run) == folder
    assert len({output_content(tmp_path / run) for run in ("one", "two", "three")}) == 1


def test_a_corpus_is_its_tokens_and_its_tokenizer(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw" / "a.jsonl", [prose(seed) for seed in range(3)])
    for name in ("one", "two"):  # their reports and units of work say where they are
        prepare(recipe(tmp_path, overrides=[f"out={tmp_path / name}"]), tmp_path, LocalEngine(1))
    one, two = tmp_path / "one", tmp_path / "two"
    assert (one / "report.json").read_bytes() != (two / "report.json").read_bytes()
    assert output_content(one) == output_content(two)
    shard = two / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[::-1])
    assert output_content(one) != output_content(two)
    shard.unlink()  # no corpus, and so all of its files
    (one / "shard-00000.bin").unlink()
    assert output_content(one) != output_content(two)
