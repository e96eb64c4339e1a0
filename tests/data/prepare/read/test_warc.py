"""WARC and WET: pages as a crawl holds them, other records passed over, damage named."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest

from phalanx.data.prepare.read import warc
from phalanx.data.prepare.read.file_formats import SourceDocument, UnreadableRecord, read_documents
from phalanx.data.prepare.read.warc import WarcPage, is_warc, read_warc

HTTP = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=%b\r\n%b\r\n%b"


def record(kind: str, body: bytes, url: str = "http://x.org/", content: str = "") -> bytes:
    headers = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\n"
        f"Content-Type: {content or 'application/http; msgtype=response'}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return headers.encode() + body + b"\r\n\r\n"


def response(html: bytes, charset: bytes = b"utf-8", more: bytes = b"") -> bytes:
    return record("response", HTTP % (charset, more, html))


def pages(content: bytes) -> list[WarcPage]:
    return list(read_warc(io.BufferedReader(io.BytesIO(content))))


def test_pages_of_responses_are_text_and_other_records_are_passed_over() -> None:
    content = (
        record("warcinfo", b"software: x", content="application/warc-fields")
        + record("request", b"GET / HTTP/1.1\r\n\r\n")
        + response(b"<p>Hello <b>there</b>.</p>")
    )
    info, request, page = pages(content)
    assert info.text is None and request.text is None and not info.problem
    assert page.text == "Hello there." and page.id == "http://x.org/"
    assert content[page.offset :].startswith(b"WARC/1.0\r\nWARC-Type: response")


def test_text_of_wet_files_is_taken_as_it_is() -> None:
    (page,) = pages(record("conversion", "Grüße\n".encode(), content="text/plain"))
    assert page.text == "Grüße\n"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (response("<p>é</p>".encode("latin-1"), b"iso-8859-1"), "é"),
        (response(b"<p>x</p>", b"no-such-charset"), "x"),
        (response(gzip.compress(b"<p>zip</p>"), more=b"Content-Encoding: gzip\r\n"), "zip"),
        (record("response", b"HTTP/1.1 404 No\r\nContent-Type: text/html\r\n\r\n<p>x"), None),
        (record("response", b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n\x89"), None),
        (record("response", b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n<x>"), "<x>"),
        (record("response", b""), None),
    ],
)
def test_only_pages_that_were_found_are_documents(page: bytes, text: str | None) -> None:
    assert [each.text for each in pages(page)] == [text]


def test_damage_is_a_record_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    good = response(b"<p>x</p>")
    (first, broken) = pages(good + b"nonsense\r\n")
    assert first.text == "x" and "is no WARC record" in broken.problem
    (short,) = pages(good[:-20])
    assert short.problem == "ends before its length"
    (body,) = pages(response(b"no gzip", more=b"Content-Encoding: gzip\r\n"))
    assert "cannot be unpacked" in body.problem
    monkeypatch.setattr(warc, "MOST_RECORD_BYTES", 10)
    (large, after) = pages(good + record("conversion", b"small", content="text/plain"))
    assert "more than is read of a page" in large.problem and after.text == "small"


def test_a_packed_crawl_file_of_many_members_is_read_with_offsets(tmp_path: Path) -> None:
    parts = [response(b"<p>page %d</p>" % number) for number in range(3)]
    (tmp_path / "crawl.warc.gz").write_bytes(b"".join(map(gzip.compress, parts)))
    found = list(read_documents(str(tmp_path / "crawl.warc.gz"), "text", "id"))
    size = len(parts[0])
    assert found == [
        SourceDocument(f"page {at}", "http://x.org/", at + 1, at * size) for at in range(3)
    ]
    (tmp_path / "cut.warc").write_bytes(parts[0] + parts[1][:-30])
    good, bad = read_documents(str(tmp_path / "cut.warc"), "text", "id")
    assert isinstance(good, SourceDocument) and isinstance(bad, UnreadableRecord)


def test_a_warc_is_known_by_its_first_bytes() -> None:
    assert is_warc(io.BufferedReader(io.BytesIO(b"WARC/1.1\r\n")))
    assert not is_warc(io.BufferedReader(io.BytesIO(b"other")))


def test_a_length_that_is_none_is_named() -> None:
    head = b"WARC/1.0\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\nabc"
    (page,) = read_warc(io.BytesIO(head))
    assert "is no WARC record" in page.problem
