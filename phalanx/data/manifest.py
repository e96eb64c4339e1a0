"""The manifest of a token corpus: what its files must hold, checked before any is read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from phalanx.data.errors import DataError

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
REDO_FIX = "tokenise the corpus again with `phalanx data tokenize`, or restore the file"

TokenType = Literal["uint16", "uint32"]
StoredTokens: TypeAlias = NDArray[np.unsignedinteger[Any]]


class ShardFile(msgspec.Struct, frozen=True):
    """One file of tokens, as it must be found."""

    name: str
    tokens: int
    bytes: int
    crc32: int


class CorpusManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of ``manifest.json``; written last, so its presence means a complete corpus."""

    version: int
    dtype: TokenType
    vocab: int
    end_of_document: int
    tokenizer: str  # sha256 of tokenizer.json, "" where none is known
    tokens: int
    documents: int
    files: tuple[ShardFile, ...]

    @property
    def stored_type(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Type of the tokens on disk, little-endian on every machine."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def fingerprint(self) -> str:
        """Short identity of the tokens and of what they mean."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


def token_type(vocab: int) -> TokenType:
    """Smallest stored type that holds every token of a vocabulary."""
    if not 0 < vocab <= 1 << 32:
        raise DataError("vocab", vocab, "must be between 1 and 2^32", "use another tokenizer")
    return "uint16" if vocab <= 1 << 16 else "uint32"


def read_manifest(folder: Path) -> CorpusManifest:
    """Read and check ``manifest.json`` and the sizes of the files it names."""
    path = folder / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        rule = f"there is no {MANIFEST_NAME} in it, so it is no complete corpus of token shards"
        raise DataError(
            "data.path", folder, rule, "make one with `phalanx data tokenize`, or correct data.path"
        ) from None
    try:
        version = msgspec.json.decode(text, type=_Versioned).version
        if version != FORMAT_VERSION:
            rule = f"has format version {version}, and this Phalanx reads {FORMAT_VERSION}"
            raise DataError("data.path", path, rule, REDO_FIX)
        manifest = msgspec.json.decode(text, type=CorpusManifest)
    except msgspec.DecodeError as error:
        raise DataError("data.path", path, f"is corrupt ({error})", REDO_FIX) from None
    _check_consistency(path, manifest)
    for file in manifest.files:
        _check_size(folder / file.name, file)
    return manifest


class _Versioned(msgspec.Struct):
    version: int


def _check_consistency(path: Path, manifest: CorpusManifest) -> None:
    def refuse(rule: str) -> DataError:
        return DataError("data.path", path, rule, REDO_FIX)

    if token_type(manifest.vocab) == "uint32" and manifest.dtype == "uint16":
        raise refuse(f"stores uint16, which cannot hold a vocabulary of {manifest.vocab}")
    if not 0 <= manifest.end_of_document < manifest.vocab:
        raise refuse(
            f"ends documents with token {manifest.end_of_document}, which is not in its "
            f"vocabulary of {manifest.vocab}"
        )
    width = manifest.stored_type.itemsize
    for file in manifest.files:
        if Path(file.name).name != file.name:
            raise refuse(f"names a file outside its folder ({file.name!r})")
        if file.bytes != file.tokens * width:
            raise refuse(
                f"says that {file.name} holds {file.tokens} {manifest.dtype} tokens in "
                f"{file.bytes} bytes, which would be {file.tokens * width} bytes: wrong dtype"
            )
    total = sum(file.tokens for file in manifest.files)
    if total != manifest.tokens:
        raise refuse(f"counts {manifest.tokens} tokens, but its files add up to {total}")


def _check_size(path: Path, file: ShardFile) -> None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        rule = "is named by the manifest but missing"
        raise DataError("data.path", path, rule, REDO_FIX) from None
    if found != file.bytes:
        what = "truncated" if found < file.bytes else "too long"
        rule = f"is {what}: {found} bytes, where the manifest says {file.bytes}"
        raise DataError("data.path", path, rule, REDO_FIX)
