"""Text of any supported format as a stream of pieces, in constant memory.

JSON lines, Parquet, WebDataset tars and plain text, plain or compressed. A piece is small enough
to hand to a worker; its place (file, number within the file) is where a killed run goes on.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import IO, Literal, NamedTuple

from phalanx.data.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
LINE_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
TAR_SUFFIXES = (".tar", ".tgz")
COMPRESSIONS = ("", ".gz", ".zst")
SUFFIXES = (
    *(
        name + packed
        for name in (*TEXT_SUFFIXES, *LINE_SUFFIXES, ".tar")
        for packed in COMPRESSIONS
    ),
    *PARQUET_SUFFIXES,
    ".tgz",
)
PIECE_CHARACTERS = 1 << 20  # a longer document is encoded in pieces, cut at line ends if it can be
LINES_BYTES = 1 << 18  # of JSON lines in a piece
MOST_LINE_BYTES = 1 << 30  # of a line, which is one document; a longer one is left out
# Whatever a line may hold: msgspec's are ValueErrors, but for lists in lists in lists.
JSON_ERRORS = (ValueError, RecursionError)

LONG_LINE = f"is a line of more than {MOST_LINE_BYTES:,} bytes: cut it"


class UnpackError(Exception):
    """A compressed file that ends early or is damaged."""


UNPACK_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error, UnpackError)


class InputPiece(NamedTuple):
    """Some lines of JSON, or (part of) one document's text, or what could not be read."""

    kind: Literal["lines", "text", "unreadable"]
    content: bytes | str  # lines, text, or the reason
    file: int
    line: int  # number of the first line, row or member, from 1; 0 where there is none
    input_bytes: int  # read from the file, as stored, since the piece before
    first: bool = True  # the document begins here
    last: bool = True  # the document ends here


def find_files(inputs: Iterable[Path], suffixes: Iterable[str] = SUFFIXES) -> list[Path]:
    """Files named by ``inputs`` and those with a fitting suffix below its folders, sorted."""
    wanted = tuple(suffixes)
    matches: set[Path] = set()
    for path in inputs:
        if path.is_dir():
            matches.update(file for file in path.rglob("*") if file.name.endswith(wanted))
        elif path.is_file():
            matches.add(path)
        else:
            raise DataError("input", path, "is neither a file nor a folder", "correct the path")
    files = sorted(file for file in matches if file.is_file())
    if not files:
        shown = " ".join(str(path) for path in inputs)
        rule = f"no file with suffix {', '.join(wanted)} was found"
        raise DataError("input", shown, rule, "name files, or other suffixes with --suffix")
    return files


def read_pieces(
    files: Sequence[Path], text_key: str, first_file: int = 0, first_piece: int = 0
) -> Iterator[tuple[int, int, InputPiece]]:
    """All pieces from a place on, each with its place: (file, number within it, piece)."""
    for number in range(first_file, len(files)):
        skipped = first_piece if number == first_file else 0
        for at, piece in enumerate(_read_file(files[number], number, text_key)):
            if at >= skipped:
                yield number, at, piece


def cut_text(text: str) -> list[str]:
    """A document in pieces of bounded size; what ``_text_pieces`` does to a file."""
    pieces = []
    while len(text) > PIECE_CHARACTERS:
        line_end = text.find("\n", PIECE_CHARACTERS, 2 * PIECE_CHARACTERS)
        past = line_end + 1 if line_end >= 0 else 2 * PIECE_CHARACTERS
        pieces.append(text[:past])
        text = text[past:]
    if text:
        pieces.append(text)
    return pieces


def _read_file(path: Path, number: int, text_key: str) -> Iterator[InputPiece]:
    """Pieces of one file, whatever its format; damage becomes a piece that says so."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    with path.open("rb", buffering=0) as raw:
        progress = _Progress(raw)
        try:
            if path.name.endswith(PARQUET_SUFFIXES):
                from phalanx.data.tokenize.archives import parquet_pieces

                yield from parquet_pieces(path, number, text_key)
            elif name.endswith(TAR_SUFFIXES):
                from phalanx.data.tokenize.archives import tar_pieces

                yield from tar_pieces(open_unpacked(raw, path), number, text_key, progress)
            elif name.endswith(LINE_SUFFIXES):
                yield from _line_pieces(open_unpacked(raw, path), number, progress)
            else:
                yield from _text_pieces(open_unpacked(raw, path), number, progress)
        except UNPACK_ERRORS as error:
            yield InputPiece("unreadable", unpack_reason(error), number, 0, progress())


class _Progress:
    """Bytes read from a file since the last call."""

    def __init__(self, raw: io.FileIO) -> None:
        self._raw = raw
        self._before = 0

    def __call__(self) -> int:
        now = self._raw.tell()
        read, self._before = now - self._before, now
        return read


def _line_pieces(
    stream: IO[bytes], number: int, progress: Callable[[], int]
) -> Iterator[InputPiece]:
    """Runs of whole lines."""
    line = 1
    while data := stream.read(LINES_BYTES):
        rest = stream.readline(MOST_LINE_BYTES)
        if len(rest) == MOST_LINE_BYTES and not rest.endswith(b"\n"):
            pass_line(stream)
            data = data[: data.rfind(b"\n") + 1]
            line_number = line + data.count(b"\n")
            if data:
                yield InputPiece("lines", data, number, line, 0)
            yield InputPiece("unreadable", LONG_LINE, number, line_number, progress())
            line = line_number + 1
            continue
        data += rest
        yield InputPiece("lines", data, number, line, progress())
        line += data.count(b"\n")


def pass_line(stream: IO[bytes]) -> int:
    """Go to the end of a line that is too long; how many bytes that was."""
    passed = 0
    while part := stream.readline(LINES_BYTES):
        passed += len(part)
        if part.endswith(b"\n"):
            break
    return passed


def _text_pieces(
    stream: IO[bytes], number: int, progress: Callable[[], int]
) -> Iterator[InputPiece]:
    """The file as one document, cut at line ends where it has any; an empty one has no text."""
    pending_text, first = "", True
    reason = ""
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    try:
        while piece := text.read(PIECE_CHARACTERS):
            if pending_text:
                yield InputPiece("text", pending_text, number, 0, progress(), first, last=False)
                first = False
            pending_text = piece + text.readline(PIECE_CHARACTERS)
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 ({error.reason}): left out from there on"
    except UNPACK_ERRORS as error:  # the document that has begun must also end
        reason = unpack_reason(error)
    if pending_text or not reason:
        yield InputPiece("text", pending_text, number, 0, progress(), first, last=True)
    if reason:
        yield InputPiece("unreadable", reason, number, 0, progress())


def unpack_reason(error: Exception) -> str:
    """What is left out of a file that is damaged or ends early."""
    return f"cannot be unpacked further: left out from there on ({error})"


def open_unpacked(raw: io.RawIOBase, path: PurePath) -> IO[bytes]:
    """The content of a file that may be compressed, as its suffix says."""
    if path.name.endswith((".gz", ".tgz")):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))
    if path.name.endswith(".zst"):
        return io.BufferedReader(_ZstdReader(raw, path), 1 << 17)
    return io.BufferedReader(raw, 1 << 17)


class _ZstdReader(io.RawIOBase):
    """The content of one or several zstd frames; says so when the file ends inside one."""

    def __init__(self, raw: io.RawIOBase, path: PurePath) -> None:
        try:
            import zstandard
        except ModuleNotFoundError:
            rule = "reading .zst files needs the package zstandard, which is not installed"
            raise DataError("input", path, rule, "pip install 'phalanx[zstd]'") from None
        self._library = zstandard
        self._raw = raw
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._fresh = True  # nothing of the current frame has been read
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            packed = self._frame.unused_data or self._raw.read(1 << 16)
            if not packed:
                if not self._fresh and not self._frame.eof:
                    raise UnpackError("the file ends inside a frame")
                return 0
            if self._frame.eof:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            self._fresh = False
            try:
                self._ready = self._frame.decompress(packed)
            except self._library.ZstdError as error:
                raise UnpackError(str(error)) from None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
