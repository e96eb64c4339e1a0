"""The page: plain files, served by name under the hash of them all; nothing from elsewhere.

A page that was loaded before the server was renewed asks for files of the old hash, and learns
from the live socket that there is a newer one.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import posixpath
import re
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

import msgspec
from msgspec import Struct

KINDS = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
INDEX = "index.html"
# In index.html: the folder of this version's files, the files that every view needs, and by view
# those that it needs beside them. All are asked for at once: no module waits for the one before it.
BASE, SHELL, VIEWS = "{{base}}", "{{shell}}", "{{views}}"
MAIN, VIEW_FOLDER, LOGIN = "main.js", "views/", "login"
_VIEW = re.compile(r"^export function ([a-z]+)View\(", re.MULTILINE)
_IMPORT = re.compile(r"""^import [^"']*["'](\.[^"']+)["'];?$""", re.MULTILINE)
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
    return Page(
        version=version,
        index=_asset(_index(shell.decode(), files, f"/page/{version}"), "text/html; charset=utf-8"),
        files={path: _asset(data, KINDS[_suffix(path)]) for path, data in files.items()},
    )


def view_names() -> tuple[str, ...]:
    """The views that an address can name."""
    texts = [asset.data.decode() for path, asset in load().files.items() if _is_view(path)]
    return tuple(sorted(name for text in texts for name in _VIEW.findall(text) if name != LOGIN))


def _is_view(path: str) -> bool:
    return path.startswith(VIEW_FOLDER)


def _index(text: str, files: dict[str, bytes], base: str) -> bytes:
    shell = imported(files, MAIN)
    links = [f'<link rel="modulepreload" href="{base}/{path}">' for path in shell if path != MAIN]
    views = {
        path.removeprefix(VIEW_FOLDER).removesuffix(".js"): [
            each for each in imported(files, path) if each not in shell
        ]
        for path in files
        if _is_view(path)
    }
    known = html.escape(msgspec.json.encode(views).decode())
    return text.replace(SHELL, "\n".join(links)).replace(VIEWS, known).replace(BASE, base).encode()


def imported(files: dict[str, bytes], path: str) -> list[str]:
    """A module and all that it imports, directly or not, each once."""
    found, waiting = dict[str, None](), [path]
    while waiting:
        if (name := waiting.pop()) not in found:
            found[name] = None
            folder = posixpath.dirname(name)
            needed = _IMPORT.findall(files[name].decode())
            waiting += [posixpath.normpath(posixpath.join(folder, each)) for each in needed]
    return list(found)


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
