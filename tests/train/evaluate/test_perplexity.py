"""Every token of a domain counts once: exact numbers of tokens and bytes, and the sum of losses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from phalanx.config import ConfigError
from phalanx.data import ShardWriter
from phalanx.data.corpus.shards import ShardStream
from phalanx.data.pack.documents import PackOptions, pack_documents
from phalanx.data.tokenize.run import tokenize_files
from phalanx.data.tokenize.vocabulary import train_tokenizer
from phalanx.train.evaluate.loaded import LoadedModel
from phalanx.train.evaluate.perplexity import DomainScore, domain_score, open_domain
from phalanx.train.evaluate.score import ModelScorer
from phalanx.train.evaluate.text import TextCodec
from tests.data.corpus.test_foreign import write_megatron
from tests.train.evaluate.small_checkpoint import SEQUENCE, TEXTS, opened


def scored(loaded: LoadedModel, path: Path, limit: int = 0) -> DomainScore:
    domain = open_domain("news", str(path), loaded.codec, 300)
    found = domain_score(domain, ModelScorer(loaded), limit)
    assert found is not None
    return found


def codec_of(loaded: LoadedModel) -> TextCodec:
    assert loaded.codec is not None
    return loaded.codec


def surprise(loaded: LoadedModel, text: str) -> float:
    """The textbook: windows of the text one by one, each token by what stands before it there."""
    codec = codec_of(loaded)
    whole, nats = [codec.end, *codec.encode(text)], 0.0
    for first in range(0, len(whole) - 1, SEQUENCE):
        past = min(first + SEQUENCE, len(whole) - 1)
        tokens = torch.tensor(whole[max(0, past - SEQUENCE) : past + 1])
        loaded.model.prepare(torch.arange(len(tokens) - 1))
        with torch.no_grad():
            shares = loaded.model(tokens[None, :-1])[0].log_softmax(-1)
        nats -= float(shares.gather(1, tokens[1:, None])[first - past :].sum())
    return nats


def test_shards_and_their_text_have_the_same_score(checkpoint: Path, corpus: Path) -> None:
    loaded = opened(checkpoint)
    by_tokens, by_text = scored(loaded, corpus), scored(loaded, corpus.parent / "texts.jsonl")
    codec = codec_of(loaded)
    assert by_tokens.documents == by_text.documents == len(TEXTS)
    assert by_tokens.tokens == by_text.tokens == sum(len(codec.encode(text)) for text in TEXTS)
    assert by_tokens.text_bytes == by_text.text_bytes == sum(len(t.encode()) for t in TEXTS)
    assert by_tokens.nats == by_text.nats
    assert by_tokens.nats == pytest.approx(sum(surprise(loaded, t) for t in TEXTS), rel=1e-5)
    numbers = by_tokens.numbers
    assert numbers["loss"] == pytest.approx(by_tokens.nats / by_tokens.tokens)
    assert numbers["perplexity"] == pytest.approx(math.exp(numbers["loss"]))
    bits = by_tokens.nats / math.log(2)
    assert numbers["bits_per_byte"] == pytest.approx(bits / by_tokens.text_bytes)


def test_a_limit_takes_the_first_documents(checkpoint: Path, corpus: Path) -> None:
    loaded = opened(checkpoint)
    found = scored(loaded, corpus, limit=2)
    assert found.documents == 2
    assert found.tokens == sum(len(codec_of(loaded).encode(text)) for text in TEXTS[:2])


def test_without_a_tokenizer_shards_are_scored_and_their_bytes_unknown(
    checkpoint: Path, corpus: Path
) -> None:
    loaded = opened(checkpoint)
    with_bytes = scored(loaded, corpus)
    loaded.codec = None
    found = scored(loaded, corpus)
    assert found.text_bytes is None and "bits_per_byte" not in found.numbers
    assert (found.nats, found.tokens) == (with_bytes.nats, with_bytes.tokens)
    with pytest.raises(ConfigError, match="give --tokenizer"):
        open_domain("news", str(corpus.parent / "texts.jsonl"), None, 300)


def test_texts_of_a_folder_are_documents(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXTS[0])
    (tmp_path / "b.md").write_text(TEXTS[2])
    (tmp_path / "empty.txt").write_text("")
    found = scored(opened(checkpoint), tmp_path)
    assert found.documents == 2
    assert found.text_bytes == len(TEXTS[0].encode()) + len(TEXTS[2].encode())


def test_nothing_to_score_is_no_score(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    loaded = opened(checkpoint)
    domain = open_domain("news", str(tmp_path), loaded.codec, 300)
    assert domain_score(domain, ModelScorer(loaded)) is None


def test_what_cannot_be_read_is_named_with_its_fix(checkpoint: Path, tmp_path: Path) -> None:
    codec = opened(checkpoint).codec
    with pytest.raises(ConfigError, match=r"perplexity\.news.*there is no such file or folder"):
        open_domain("news", str(tmp_path / "nowhere"), codec, 300)
    text = tmp_path / "other.txt"
    text.write_text("an entirely different text " * 20)
    tokenize_files([text], train_tokenizer([text], 280), tmp_path / "other")
    with pytest.raises(ConfigError, match="another tokenizer"):
        open_domain("news", str(tmp_path / "other"), codec, 300)
    with pytest.raises(ConfigError, match="vocabulary"):
        open_domain("news", str(tmp_path / "other"), None, 100)


def test_documents_longer_than_a_stretch_of_shards_stay_whole(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.train.evaluate.perplexity.STRETCH_TOKENS", 5)
    lengths = [3, 12, 1, 7]
    with ShardWriter(tmp_path / "made", 300, 0, "", 1 << 20) as writer:
        for number, length in enumerate(lengths):
            writer.write([number + 1] * length)
            writer.end_document()
        writer.finish()
    domain = open_domain("made", str(tmp_path / "made"), None, 300)
    assert [each.tokens for each in domain.documents] == [
        [number + 1] * length for number, length in enumerate(lengths)
    ]


def test_packed_samples_are_refused_since_padding_is_no_text(
    checkpoint: Path, corpus: Path, tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    found = pack_documents(ShardStream(corpus), packed, PackOptions(sequence=SEQUENCE))
    assert found.padding
    with pytest.raises(ConfigError, match="padding"):
        open_domain("news", str(packed), opened(checkpoint).codec, 300)


def test_documents_of_a_foreign_corpus_end_as_the_model_s_own(
    checkpoint: Path, corpus: Path, tmp_path: Path
) -> None:
    """Such a corpus does not say which token that is; the tokenizer does."""
    loaded = opened(checkpoint)
    codec = codec_of(loaded)
    write_megatron(tmp_path / "theirs", [[*codec.encode(text), codec.end] for text in TEXTS])
    assert scored(loaded, tmp_path / "theirs") == scored(loaded, corpus)
