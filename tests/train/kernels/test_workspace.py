"""A node's folder of kernels: filled at a start, clean after a kill, shared by living processes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.train.kernels import workspace
from phalanx.train.kernels.place import NotPrivateError
from phalanx.train.kernels.store import KernelStore
from phalanx.train.kernels.workspace import KernelWorkspace


class Node:
    """A node's disk; ``start`` is what a process does that begins there."""

    def __init__(self, base: Path, store: Path) -> None:
        self.base, self.store = base, store
        self.started: list[KernelWorkspace] = []

    def start(self, key: str = "key") -> KernelWorkspace:
        store = KernelStore(self.store, key, 1 << 20)
        store.open()
        found = KernelWorkspace(self.base, key, store)
        found.open()
        self.started.append(found)
        return found

    def end(self) -> None:
        """All processes end: their locks go."""
        for each in self.started:
            os.close(each._use)
        self.started = []


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "node", tmp_path / "store")
    yield made
    made.end()


def compile_(place: KernelWorkspace, name: str, content: bytes = b"code") -> None:
    path = place.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def has(place: KernelWorkspace, name: str) -> bool:
    return (place.folder / name).exists()


def test_a_bundle_of_another_node_that_is_cut_off_costs_nothing_else(node: Node) -> None:
    first = node.start()
    other = KernelStore(node.store, "key", 1 << 20)
    compile_(first, "a")
    other.publish(["a"], first.folder)
    (name,) = other.names()
    damaged = other.folder / name
    damaged.write_bytes(damaged.read_bytes()[:30])
    compile_(first, "b")
    assert first.share() > 0
    (kept,) = other.names()
    assert sorted(other.held(kept)) == ["a", "b"] and kept != damaged.name


def test_a_restart_finds_what_was_shared_and_nothing_else(node: Node) -> None:
    first = node.start()
    compile_(first, "a/whole.so")
    assert first.share() > 0 and first.share() == 0
    compile_(first, "b/half-written.so")
    node.end()  # killed
    second = node.start()
    assert has(second, "a/whole.so") and not has(second, "b/half-written.so")


def test_a_node_that_replaces_another_finds_it_too(node: Node, tmp_path: Path) -> None:
    first = node.start()
    compile_(first, "a.so", b"of the first")
    first.share()
    other = Node(tmp_path / "other", node.store)
    second = other.start()
    assert (second.folder / "a.so").read_bytes() == b"of the first"
    other.end()


def test_a_process_that_joins_others_takes_nothing_away_from_them(node: Node) -> None:
    first = node.start()
    compile_(first, "a.so")
    second = node.start()
    assert has(second, "a.so")
    assert second.share() > 0 and first.share() == 0


def test_nodes_that_compiled_the_same_share_it_once(node: Node, tmp_path: Path) -> None:
    other = Node(tmp_path / "other", node.store)
    first, second = node.start(), other.start()
    for place in (first, second):
        compile_(place, "a.so")
    compile_(second, "b.so")
    assert first.share() > 0 and second.share() > 0
    held = [second.store.held(name) for name in second.store.names()]
    assert sorted(held) == [["a.so"], ["b.so"]]
    other.end()


def test_nothing_is_shared_while_a_compiler_writes(node: Node) -> None:
    place = node.start()
    compile_(place, "a.so")
    compile_(place, "locks/a.lock")
    with (place.folder / "locks/a.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert place.share() == 0
    assert place.share() > 0


def test_folders_of_other_versions_go_once_nobody_uses_them(node: Node) -> None:
    old = node.start("old")
    node.start("new")
    assert old.folder.exists()
    node.end()
    node.start("new")
    assert not old.folder.exists()


def test_a_damaged_bundle_costs_its_own_kernels_only(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    place = node.start()
    for name in ("a.so", "b.so"):
        compile_(place, name)
        place.share()
    (doomed,) = [name for name in place.store.names() if place.store.held(name) == ["a.so"]]
    (place.store.folder / doomed).write_bytes(b"")
    node.end()
    again = node.start()
    assert has(again, "b.so") and not has(again, "a.so")
    assert "is damaged and was removed" in caplog.text


def test_a_holder_of_the_lock_that_hangs_is_not_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = node.start()
    monkeypatch.setattr(workspace, "FILL_SECONDS", 0.0)
    with place._lock("fill").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compile_(place, "a.so")
        assert place.share() == 0
        node.start()
    assert "another process" in caplog.text


def test_a_folder_that_somebody_else_made_first_is_not_used(node: Node) -> None:
    node.base.mkdir()
    node.base.chmod(0o777)
    with pytest.raises(NotPrivateError):
        node.start()


def test_the_folder_lies_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    places = (tmp_path / "full", tmp_path / "free")
    for place in places:
        place.mkdir()
    monkeypatch.setattr(workspace, "PLACES", [lambda p=p: str(p) for p in places])

    class Usage:
        def __init__(self, free: int) -> None:
            self.free = free

    free = {places[0]: 5, places[1]: 2 << 30}
    monkeypatch.setattr(workspace.shutil, "disk_usage", lambda path: Usage(free[path]))
    assert workspace.find_base().parent == places[1]
    free[places[1]] = 5
    assert workspace.find_base().parent == places[0]
    assert "GB are free" in caplog.text
