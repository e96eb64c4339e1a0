"""Bundles of kernels: whole or not used, written by nobody else, and no more than they may be."""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
from hashlib import blake2b
from pathlib import Path

import pytest

from phalanx.train.kernels.place import NotPrivateError, key_of, make_private
from phalanx.train.kernels.store import DamagedBundleError, KernelStore, files_in

LIMIT = 1 << 20


def opened(root: Path, key: str = "key", limit: int = LIMIT) -> KernelStore:
    store = KernelStore(root, key, limit)
    store.open()
    return store


def written(folder: Path, **files: bytes) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_what_one_node_publishes_another_finds(tmp_path: Path) -> None:
    here = written(tmp_path / "here", a=b"one", b__c=b"two")
    (here / "b/c").chmod(0o755)
    store = opened(tmp_path / "store")
    assert store.publish(["a", "b/c"], here) > 0
    there = tmp_path / "there"
    (name,) = store.names()
    assert opened(tmp_path / "store").unpack(name, there) == ["a", "b/c"]
    assert [(there / each).read_bytes() for each in ("a", "b/c")] == [b"one", b"two"]
    assert os.access(there / "b/c", os.X_OK)
    assert store.held(name) == ["a", "b/c"]


def test_tritons_groups_name_the_files_where_they_lie_now(tmp_path: Path) -> None:
    group = {"child_paths": {"k.cubin": "/old/triton/HASH/k.cubin"}}
    here = written(tmp_path / "here", h__k=b"x")
    name = "h/__grp__k.json"
    (here / name).write_text(json.dumps(group))
    store = opened(tmp_path / "store")
    store.publish(["h/k", name], here)
    store.unpack(store.names()[0], tmp_path / "there")
    moved = json.loads((tmp_path / "there" / name).read_text())
    assert moved == {"child_paths": {"k.cubin": str(tmp_path / "there/h/k.cubin")}}


@pytest.mark.parametrize("keep", [0, 10, -1])
def test_a_half_written_bundle_is_removed_and_never_used(tmp_path: Path, keep: int) -> None:
    store = opened(tmp_path / "store")
    store.publish(["a"], written(tmp_path / "here", a=bytes(5000)))
    (name,) = store.names()
    content = (store.folder / name).read_bytes()
    (store.folder / name).write_bytes(content[:keep])
    with pytest.raises(DamagedBundleError, match="damaged"):
        store.unpack(name, tmp_path / "there")
    assert store.names() == [] and not (tmp_path / "there").exists()


def test_a_bundle_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    store.publish(["a"], written(tmp_path / "here", a=b"x"))
    for evil in ("../out", "/tmp/out"):
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w:gz") as archive:
            archive.addfile(tarfile.TarInfo(evil))
        name = f"{blake2b(data.getvalue(), digest_size=16).hexdigest()}.tar.gz"
        (store.folder / name).write_bytes(data.getvalue())
        with pytest.raises(DamagedBundleError, match="no name"):
            store.unpack(name, tmp_path / "there")
    assert not (tmp_path / "out").exists()


def test_what_others_can_write_is_not_loaded(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    store.publish(["a"], written(tmp_path / "here", a=b"x"))
    (name,) = store.names()
    (store.folder / name).chmod(0o620)
    with pytest.raises(NotPrivateError, match="written by others"):
        store.unpack(name, tmp_path / "there")
    (store.folder / name).chmod(0o600)
    store.folder.chmod(0o770)
    with pytest.raises(NotPrivateError, match="chmod go-w"):
        opened(tmp_path / "store")


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path / "store")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(NotPrivateError, match="belongs to user"):
        opened(tmp_path / "store")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        make_private(tmp_path / "link")


def test_the_least_recently_used_bundles_make_room(tmp_path: Path) -> None:
    here = written(tmp_path / "here", **{name: os.urandom(1000) for name in "abcd"})
    old = opened(tmp_path / "store", "other versions")
    old.publish(["a"], here)
    store = opened(tmp_path / "store", limit=3000)
    store.publish(["b"], here)
    first = store.names()[0]
    for number, path in enumerate([old.folder / old.names()[0], store.folder / first]):
        os.utime(path, (number, number))
    store.publish(["c"], here)
    assert old.names() == [] and len(store.names()) == 2
    store.unpack(first, tmp_path / "there")  # used now
    os.utime(store.folder / next(n for n in store.names() if n != first), (5, 5))
    store.publish(["d"], here)
    assert first in store.names() and len(store.names()) == 2


def test_a_bundle_larger_than_all_may_be_is_not_kept(tmp_path: Path) -> None:
    store = opened(tmp_path / "store", limit=500)
    assert store.publish(["a"], written(tmp_path / "here", a=os.urandom(1000))) == 0
    assert list(store.folder.iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path / "store")
    here = written(tmp_path / "here", a=b"x")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            store.publish(["a"], here)
    assert list(store.folder.iterdir()) == []
    store.publish(["a"], here)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            store.unpack(store.names()[0], tmp_path / "there")
    assert list(files_in(tmp_path / "there")) == []


def test_drafts_of_killed_processes_are_removed_a_day_later(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    old, young = store.folder / ".draft-old", store.folder / ".draft-young"
    old.touch()
    young.touch()
    os.utime(old, (0, 0))
    store.publish(["a"], written(tmp_path / "here", a=b"x"))
    assert (old.exists(), young.exists()) == (False, True)


def test_every_version_has_bundles_of_its_own() -> None:
    usual = {"torch": "2.11", "cuda": "12.8", "device": "H200 9.0"}
    others = [{**usual, name: "other"} for name in usual]
    assert len({key_of(found) for found in (usual, *others)}) == 4


def test_locks_and_drafts_are_no_kernels(tmp_path: Path) -> None:
    folder = written(
        tmp_path,
        a=b"",
        locks__b=b"",
        x__c=b"",
        **{"x__.1.tmp": b"", "y.lock": b"", "tmp.p__z": b""},
    )
    assert sorted(files_in(folder)) == ["a", "x/c"]
