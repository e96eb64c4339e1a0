"""The page: plain files, served by name under the hash of them all; nothing from elsewhere.

A page that was loaded before the server was renewed asks for files of the old hash, and learns
from the live socket that there is a newer one.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from msgspec import Struct

KINDS = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
INDEX = "index.html"
BASE = "{{base}}"  # in index.html: the folder of this version's files
SHORTEST_ZIPPED = 512
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "font-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Asset(Struct, frozen=True):
    """One file. ``zipped`` is b"" where it would not pay."""

    data: bytes
    kind: str
    zipped: bytes = b""


class Page(Struct, frozen=True):
    """All files of the page; ``version`` changes when any of them does."""

    version: str
    index: Asset
    files: dict[str, Asset]  # by path below /page/VERSION/


@cache
def load() -> Page:
    """Read the files once."""
    root = resources.files(__package__)
    files = dict(sorted(_walk(root, "")))
    shell = root.joinpath(INDEX).read_bytes()
    digest = hashlib.sha256(shell)
    for path, data in files.items():
        digest.update(path.encode() + b"\0" + data)
    version = digest.hexdigest()[:12]
    index = shell.replace(BASE.encode(), f"/page/{version}".encode())
    return Page(
        version=version,
        index=_asset(index, "text/html; charset=utf-8"),
        files={path: _asset(data, KINDS[_suffix(path)]) for path, data in files.items()},
    )


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    files = []
    for each in folder.iterdir():
        if each.is_dir():
            files += _walk(each, f"{prefix}{each.name}/")
        elif _suffix(each.name) in KINDS:
            files.append((prefix + each.name, each.read_bytes()))
    return files


def _suffix(name: str) -> str:
    return name[name.rfind(".") :] if "." in name else ""


def _asset(data: bytes, kind: str) -> Asset:
    text = not kind.startswith("font/") and len(data) >= SHORTEST_ZIPPED
    return Asset(data, kind, gzip.compress(data, 6, mtime=0) if text else b"")
