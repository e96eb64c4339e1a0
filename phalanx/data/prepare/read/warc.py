"""Pages out of WARC and WET files: a reader of what crawls hold, no more.

Records of type ``response`` (HTML over HTTP) and ``conversion`` (text, as WET files have it) are
read, all others passed over. ISO 28500 has more: records in segments are not joined.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from typing import IO, NamedTuple

from phalanx.data.prepare.read.html_text import html_to_text

MOST_RECORD_BYTES = 64 << 20  # a larger one is passed over and named
_MOST_HEADER_LINES, _MOST_HEADER_BYTES = 1000, 1 << 20  # of a line
_MOST_DIGITS = 18  # of a length that can be one
_CHARSET = re.compile(rb"charset=[\"']?([\w.:-]+)", re.IGNORECASE)
_SNIFFED = 4096  # bytes of a page in which its charset may stand


class WarcPage(NamedTuple):
    """One record: the text of a page, or nothing of interest, or what is wrong with it."""

    text: str | None
    id: str  # the page's URL
    offset: int
    problem: str = ""


def is_warc(stream: IO[bytes]) -> bool:
    """Whether a buffered stream begins as WARC files do; reads nothing from it."""
    return isinstance(stream, io.BufferedReader) and stream.peek(5)[:5] == b"WARC/"


def read_warc(stream: IO[bytes]) -> Iterator[WarcPage]:
    """Every record of an unpacked file; damage ends it with a record that says so."""
    offset = 0
    while True:
        line, blank = stream.readline(_MOST_HEADER_BYTES), 0
        while line in (b"\r\n", b"\n"):  # two end a record
            blank += len(line)
            line = stream.readline(_MOST_HEADER_BYTES)
        if not line:
            return
        here = offset + blank
        headers, size = _headers(stream)
        length = headers.get(b"content-length", b"")
        sized = length.isdigit() and len(length) <= _MOST_DIGITS
        if not line.startswith(b"WARC/") or not sized:
            yield WarcPage(None, "", here, f"is no WARC record: {line[:40]!r} at byte {here}")
            return
        block = stream.read(min(int(length), MOST_RECORD_BYTES))
        _skip(stream, int(length) - len(block))
        offset = here + len(line) + size + int(length)
        yield _page(headers, block, here, int(length))


def _headers(stream: IO[bytes]) -> tuple[dict[bytes, bytes], int]:
    """Names in lower case and values up to the empty line, and how many bytes that was."""
    headers: dict[bytes, bytes] = {}
    size = 0
    for _ in range(_MOST_HEADER_LINES):
        line = stream.readline(_MOST_HEADER_BYTES)
        size += len(line)
        if not line.strip():
            break
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    return headers, size


def _skip(stream: IO[bytes], count: int) -> None:
    while count > 0 and (passed := stream.read(min(count, 1 << 20))):
        count -= len(passed)


def _page(headers: dict[bytes, bytes], block: bytes, offset: int, length: int) -> WarcPage:
    url = headers.get(b"warc-target-uri", b"").decode("utf-8", "replace").strip("<>")
    if length > MOST_RECORD_BYTES:
        return WarcPage(None, url, offset, f"has {length:,} bytes, more than is read of a page")
    if len(block) < length:
        return WarcPage(None, url, offset, "ends before its length")
    kind = headers.get(b"warc-type", b"").lower()
    if kind == b"conversion":
        return WarcPage(block.decode("utf-8", "replace"), url, offset)
    if kind != b"response" or not headers.get(b"content-type", b"").lower().startswith(
        b"application/http"
    ):
        return WarcPage(None, url, offset)
    return _response(block, url, offset)


def _response(block: bytes, url: str, offset: int) -> WarcPage:
    """The text of an HTTP response, if it is a page that was found."""
    stream = io.BytesIO(block)
    status = stream.readline().split()
    headers, _ = _headers(stream)
    content_type = headers.get(b"content-type", b"").lower()
    if status[1:2] != [b"200"] or not content_type.startswith(
        (b"text/html", b"application/xhtml", b"text/plain")
    ):
        return WarcPage(None, url, offset)
    body = stream.read()
    try:
        if headers.get(b"content-encoding", b"").lower() in (b"gzip", b"x-gzip"):
            body = gzip.decompress(body)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        return WarcPage(None, url, offset, f"its body cannot be unpacked ({error})")
    text = _decoded(body, content_type)
    return WarcPage(
        text if content_type.startswith(b"text/plain") else html_to_text(text), url, offset
    )


def _decoded(body: bytes, content_type: bytes) -> str:
    """In the charset that the header or the page names; what does not fit is replaced."""
    found = _CHARSET.search(content_type) or _CHARSET.search(body[:_SNIFFED])
    try:
        return body.decode(found[1].decode("ascii") if found else "utf-8", "replace")
    except (LookupError, ValueError):  # a charset that does not exist
        return body.decode("utf-8", "replace")
