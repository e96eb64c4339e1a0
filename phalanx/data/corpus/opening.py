"""The one place that opens a corpus, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from phalanx.config import Data, Store
from phalanx.data.corpus.foreign import is_megatron, open_datatrove, open_megatron
from phalanx.data.corpus.heldout import cut
from phalanx.data.corpus.manifest import MANIFEST_NAME
from phalanx.data.corpus.shards import ShardStream
from phalanx.data.corpus.stream import FileStream, Split, TokenStream
from phalanx.data.errors import DataError

ANY_VOCAB = 1 << 32  # where no model says what its tokens are


def open_stream(
    path: str | Path,
    vocab: int = ANY_VOCAB,
    validation_fraction: float = 0.0,
    split: Split = "all",
) -> TokenStream:
    """Open one side of a corpus for a model of ``vocab`` tokens.

    ``path`` is a folder of token shards, of Megatron or of datatrove files, or one such file, or
    the URL of a folder of token shards in an object store.
    """
    return one_side(open_whole(path, vocab), path, vocab, validation_fraction, split)


def one_side(
    whole: FileStream, path: str | Path, vocab: int, validation_fraction: float, split: Split
) -> TokenStream:
    """The documents of a corpus that are trained on, or those held out, or all."""
    if whole.vocab > vocab:
        rule = f"the corpus at {path} was made with a vocabulary of {whole.vocab}"
        raise DataError("model.vocab", vocab, rule, f"set model.vocab to {whole.vocab} or more")
    if split == "all" or (split == "train" and validation_fraction == 0.0):
        return whole
    if not 0.0 < validation_fraction < 1.0:
        rule = "no documents are held out to validate on"
        fix = "set it to a share such as 0.01"
        raise DataError("data.validation_fraction", validation_fraction, rule, fix)
    return cut(whole, validation_fraction, split, own_hashes=isinstance(whole, ShardStream))


def open_whole(
    path: str | Path,
    vocab: int = ANY_VOCAB,
    store: Store | None = None,
    check_sizes: bool = True,
) -> FileStream:
    """Open all of a corpus; ``store`` says how an object store is read.

    Without ``check_sizes`` shards that are missing or truncated are found when they are read.
    """
    if "://" in str(path):
        from phalanx.data.remote.shards import open_remote  # its event loop loads only where needed

        return open_remote(str(path), store or Store())
    home = Path(path)
    if home.is_dir():
        if (home / MANIFEST_NAME).exists():
            return ShardStream(home, check_sizes=check_sizes)
        if files := sorted(home.rglob("*.ds")):
            return open_datatrove(home, files, vocab)
        if files := [path for path in sorted(home.rglob("*.idx")) if is_megatron(path)]:
            return open_megatron(home, files, vocab, check_sizes)
        return ShardStream(home)  # which says what is missing
    if home.suffix == ".ds":
        return open_datatrove(home, [home], vocab)
    index_path = (
        home.with_suffix(".idx") if home.suffix in (".bin", ".idx") else Path(f"{home}.idx")
    )
    if index_path.exists():
        return open_megatron(home, [index_path], vocab, check_sizes)
    return ShardStream(home)


def refuse_mixed_tokenizers(streams: Mapping[str, TokenStream]) -> None:
    """Refuse sources whose tokens mean different things; unknown tokenizers pass."""
    makers = {name: stream.tokenizer for name, stream in streams.items() if stream.tokenizer}
    for name, tokenizer in makers.items():
        first = next(iter(makers))
        if tokenizer != makers[first]:
            raise DataError(
                "data.path",
                name,
                f"was made with tokenizer {tokenizer[:16]}, and {first} with {makers[first][:16]}",
                "tokenise both with the same tokenizer.json",
            )


def refuse_other_layout(whole: FileStream, data: Data, path: str) -> bool:
    """Raise ``DataError`` where a job would read a corpus' samples as what they are not.

    Returns whether the samples were packed in advance.
    """
    manifest = whole.manifest if isinstance(whole, ShardStream) else None
    pairs = manifest is not None and manifest.pairs
    if data.pairs != pairs:
        what = "pairs of answers" if pairs else "documents, not pairs of answers"
        rule = f"the corpus at {path} holds {what}"
        fix = f"set it to {str(pairs).lower()}, or data.path to another corpus"
        raise DataError("data.pairs", str(data.pairs).lower(), rule, fix)
    if manifest is None or not manifest.packed:
        return False
    if data.sequence != manifest.packed:
        rule = f"the corpus at {path} was packed into samples of {manifest.packed} tokens"
        fix = f"set it to {manifest.packed}, or prepare the corpus again with --sequence"
        raise DataError("data.sequence", data.sequence, rule, fix)
    apart = manifest.packed_apart
    if apart is not None and data.validation_fraction not in (0, apart):
        rule = f"the corpus at {path} was packed with {apart} of its documents apart"
        fix = f"set it to {apart}, or pack the corpus again with --validation-fraction"
        raise DataError("data.validation_fraction", data.validation_fraction, rule, fix)
    if not data.document_mask and manifest.documents * manifest.packed > manifest.tokens:
        rule = f"a sample of the corpus at {path} holds several documents, which would be mixed"
        fix = "set it to true, or prepare the corpus again with --no-pack"
        raise DataError("data.document_mask", "false", rule, fix)
    return True
