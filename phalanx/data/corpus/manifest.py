"""The manifest of a token corpus: what its files must hold, checked before any is read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from phalanx.data.errors import DataError

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
ACCESS_FIX = "have its owner make it readable (chmod a+r), or correct data.path"
REDO_FIX = "tokenise the corpus again with `phalanx data tokenize`, or restore the file"

TokenType = Literal["uint16", "uint32"]
StoredTokens: TypeAlias = NDArray[np.unsignedinteger[Any]]


class ShardFile(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One file of tokens, as it must be found; its index holds a checksum for each block."""

    name: str
    tokens: int
    documents: int  # that start in this file
    index_crc32c: int  # proves the index, and through it every block
    label_runs: int = 0  # of tokens that count as labels, where the corpus says which do

    @property
    def index_name(self) -> str:
        """The file with the checksums of the blocks and the starts of the documents."""
        return str(Path(self.name).with_suffix(".idx"))

    @property
    def names(self) -> tuple[str, str]:
        """Both files of the shard."""
        return self.name, self.index_name


class CorpusOrigin(msgspec.Struct, frozen=True):
    """What a corpus was made from."""

    inputs: tuple[str, ...] = ()  # as given on the command line
    files: int = 0
    text_bytes: int = 0
    empty: int = 0  # documents without text, left out
    unreadable: int = 0  # records that could not be read, left out


class CorpusManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Contents of ``manifest.json``; written last, so its presence means a complete corpus.

    Defaults are left out: the fingerprint of a corpus without them stays what it was.
    """

    version: int
    dtype: TokenType
    vocab: int
    end_of_document: int
    tokenizer: str  # sha256 of tokenizer.json, "" where none is known
    source: CorpusOrigin
    tokens: int
    documents: int
    file_tokens: int  # every file but the last holds exactly so many
    block_bytes: int  # of each checksum
    files: tuple[ShardFile, ...]
    masked: bool = False  # indices say which tokens count as labels; else all do
    packed: int = 0  # samples of so many tokens, each of whole documents; 0: any sample may be cut
    pairs: bool = False  # documents take turns: a preferred answer, the rejected one
    packed_apart: float | None = None  # held-out share whose documents share no sample with others

    @property
    def stored_type(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Type of the tokens on disk, little-endian on every machine."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def fingerprint(self) -> str:
        """Short identity of the tokens and of what they mean, wherever they came from."""
        content = msgspec.structs.replace(self, source=CorpusOrigin())
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]

    def file_bytes(self, number: int) -> int:
        """Size that a file of tokens must have."""
        return self.files[number].tokens * self.stored_type.itemsize


def token_type(vocab: int) -> TokenType:
    """Smallest stored type that holds every token of a vocabulary."""
    if not 0 < vocab <= 1 << 32:
        raise DataError("vocab", vocab, "must be between 1 and 2^32", "use another tokenizer")
    return "uint16" if vocab <= 1 << 16 else "uint32"


def read_manifest(folder: Path) -> CorpusManifest:
    """Read and check ``manifest.json``; the files that it names are checked when they are used."""
    path = folder / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        rule = f"there is no {MANIFEST_NAME} in it, so it is no complete corpus of token shards"
        if not folder.is_dir():
            rule = "is a file, no folder" if folder.exists() else "there is no such folder"
        raise DataError(
            "data.path", folder, rule, "make one with `phalanx data tokenize`, or correct data.path"
        ) from None
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise DataError("data.path", path, rule, ACCESS_FIX) from None
    return parse_manifest(text, str(path))


def parse_manifest(text: bytes, path: str) -> CorpusManifest:
    """Decode a manifest and check that it does not contradict itself; ``path`` names it."""
    try:
        manifest = msgspec.json.decode(text, type=CorpusManifest)
        version = manifest.version
    except msgspec.DecodeError as error:
        try:
            version = msgspec.json.decode(text, type=_CorpusVersion).version
        except msgspec.DecodeError:
            version = FORMAT_VERSION
        if version == FORMAT_VERSION:
            raise DataError("data.path", path, f"is corrupt ({error})", REDO_FIX) from None
    if version != FORMAT_VERSION:
        rule = f"has format version {version}, and this Phalanx reads {FORMAT_VERSION}"
        raise DataError("data.path", path, rule, REDO_FIX)
    for rule in _contradictions(manifest):
        raise DataError("data.path", path, rule, REDO_FIX)
    return manifest


class _CorpusVersion(msgspec.Struct):
    version: int


def _contradictions(manifest: CorpusManifest) -> list[str]:
    problems = []
    if token_type(manifest.vocab) == "uint32" and manifest.dtype == "uint16":
        problems.append(f"stores uint16, which cannot hold a vocabulary of {manifest.vocab}")
    if not 0 <= manifest.end_of_document < manifest.vocab:
        problems.append(
            f"ends documents with token {manifest.end_of_document}, which is not in its "
            f"vocabulary of {manifest.vocab}"
        )
    if manifest.block_bytes < 1 or manifest.block_bytes % manifest.stored_type.itemsize:
        problems.append(f"has blocks of {manifest.block_bytes} bytes: no whole number of tokens")
    if manifest.packed and manifest.tokens % manifest.packed:
        problems.append(f"is no whole number of samples of {manifest.packed} tokens")
    files = manifest.files
    if outside := [file.name for file in files if "/" in file.name]:
        problems.append(f"names a file outside its folder ({outside[0]!r})")
    tokens = [file.tokens for file in files]
    if tokens and (
        tokens[:-1].count(manifest.file_tokens) != len(tokens) - 1
        or not 0 < tokens[-1] <= manifest.file_tokens
    ):
        problems.append(f"has files that do not hold {manifest.file_tokens} tokens before its last")
    if sum(tokens) != manifest.tokens:
        problems.append(f"counts {manifest.tokens} tokens, but its files add up to {sum(tokens)}")
    documents = sum(file.documents for file in files)
    if documents != manifest.documents:
        problems.append(f"counts {manifest.documents} documents, but its files hold {documents}")
    return problems
