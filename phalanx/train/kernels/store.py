"""Bundles of compiled kernels in one folder that all nodes of a job see.

A bundle is an archive named by the digest of its content, so that a damaged one is noticed before
anything of it is used. It holds what its writer compiled beyond the bundles that there were.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import tarfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path, PurePosixPath

from phalanx.train.kernels.place import FILE, make_private, require_private

ENDING = ".tar.gz"
DRAFT_SECONDS = 86_400.0  # after which nobody writes it any more
GROUP_PREFIX = "__grp__"  # Triton's lists of files that belong together, by absolute path

log = logging.getLogger(__name__)


class DamagedBundleError(OSError):
    """Not what was written."""


class KernelStore:
    """The bundles for one set of versions; ``root`` has those of all."""

    def __init__(self, root: Path, key: str, limit_bytes: int) -> None:
        self.root, self.folder, self.limit_bytes = root, root / key, limit_bytes

    def open(self) -> None:
        """Make the folders; refused where others can write into them."""
        make_private(self.root)
        make_private(self.folder)

    def names(self) -> list[str]:
        """Of the bundles, oldest first."""
        return [path.name for path in sorted(self.folder.glob(f"*{ENDING}"), key=_age)]

    def unpack(self, name: str, target: Path) -> list[str]:
        """Put a bundle's files where they are missing; returns what it holds.

        A damaged one is removed: its kernels are compiled again.
        """
        with self._proved(name) as archive:
            names = [_put(archive, member, target) for member in archive]
        with suppress(OSError):
            os.utime(self.folder / name)  # the least recently used ones go first
        return names

    def held(self, name: str) -> list[str]:
        """What a bundle holds; a damaged one is removed."""
        with self._proved(name) as archive:
            return archive.getnames()

    @contextmanager
    def _proved(self, name: str) -> Iterator[tarfile.TarFile]:
        path = self.folder / name
        with _open(path) as file:
            if _digest(file) != name.removesuffix(ENDING):
                path.unlink(missing_ok=True)
                raise DamagedBundleError(f"{path} is damaged and was removed")
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:gz") as archive:
                yield archive

    def publish(self, files: Iterable[str], source: Path) -> int:
        """Make a bundle of these files; returns its bytes, 0 where it is larger than all may be."""
        draft = self.folder / f".draft-{secrets.token_hex(8)}"
        try:
            with draft.open("xb") as file:
                with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
                    for name in files:
                        archive.add(source / name, arcname=name, recursive=False)
                file.flush()
                os.fsync(file.fileno())
            size = draft.stat().st_size
            if size > self.limit_bytes:
                return 0
            with draft.open("rb") as file:
                name = f"{_digest(file)}{ENDING}"
            draft.chmod(0o600)
            draft.replace(self.folder / name)
        finally:
            draft.unlink(missing_ok=True)
        self._prune(self.folder / name)
        return size

    def _prune(self, newest: Path) -> None:
        """Remove the least recently used until all fit; those of other versions count, too."""
        for draft in self.root.glob("*/.draft-*"):  # of a process that was killed
            if time.time() - _age(draft) > DRAFT_SECONDS:
                draft.unlink(missing_ok=True)
        bundles = sorted(self.root.glob(f"*/*{ENDING}"), key=_age)
        total = sum(_size(path) for path in bundles)
        for path in bundles:
            if total <= self.limit_bytes:
                break
            if path != newest:
                total -= _size(path)
                path.unlink(missing_ok=True)


def _open(path: Path) -> BufferedReader:
    descriptor = os.open(path, FILE)
    try:
        require_private(descriptor, path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _digest(file: BufferedReader) -> str:
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _put(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> str:
    """Write one file, whole or not at all."""
    parts = PurePosixPath(member.name).parts
    if not member.isreg() or not parts or parts[0] == "/" or ".." in parts:
        raise DamagedBundleError(f"{member.name} is no name that we give")
    path = target / member.name
    if not path.exists():
        content = archive.extractfile(member)
        assert content is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            draft.write_bytes(_relocated(content.read(), path))
            draft.chmod(member.mode & 0o700)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    return member.name


def _relocated(content: bytes, path: Path) -> bytes:
    """The same with Triton's absolute paths as they are here."""
    if not path.name.startswith(GROUP_PREFIX):
        return content
    group = json.loads(content)
    children = group.get("child_paths") or {}
    group["child_paths"] = {
        name: str(path.parent / Path(old).name) for name, old in children.items()
    }
    return json.dumps(group).encode()


def files_in(folder: Path) -> Iterator[str]:
    """Names of what compilers finished in a folder: no drafts, no locks."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "tmp."))]
        if Path(parent) == folder and "locks" in folders:
            folders.remove("locks")
        for name in names:
            if not name.startswith(".") and not name.endswith((".lock", ".tmp")):
                yield str(Path(parent, name).relative_to(folder))


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # somebody else removes old ones, too
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
