"""Prepared conversations are read back as samples of whole documents with their labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.config import Data
from phalanx.data import (
    WEIGHTLESS,
    DataError,
    Feed,
    open_sources,
    open_stream,
    read_manifest,
    verify,
)
from phalanx.data.chat.encode import ChatEncoder
from phalanx.data.chat.run import ChatOptions, PreparedChat, prepare_chat
from phalanx.data.corpus.survey import sample_texts
from tests.data.chat.chats import CONVERSATIONS, write_lines, write_tokenizer

SEQUENCE = 128
VOCAB = 1000


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def prepare(
    folder: Path, encoder: ChatEncoder, records: list[dict[str, Any]], **options: Any
) -> PreparedChat:
    file = write_lines(folder / "chats.jsonl", records)
    settings = {"sequence": SEQUENCE, "inputs": (str(file),), **options}
    return prepare_chat([file], encoder, folder / "corpus", ChatOptions(**settings))


def settings(folder: Path, **more: Any) -> Data:
    given = {"sequence": SEQUENCE, "document_mask": True, "prefetch": 0, **more}
    return Data(source="shards", path=str(folder / "corpus"), **given)


def chats(count: int) -> list[dict[str, Any]]:
    """Conversations of which no two are equal."""
    return [
        {"messages": [{"role": "user", "content": str(i)}, *CONVERSATIONS[i % 3]]}
        for i in range(count)
    ]


def test_each_sample_holds_whole_conversations_with_their_labels(
    tmp_path: Path, encoder: ChatEncoder
) -> None:
    records = chats(40)
    done = prepare(tmp_path, encoder, records, file_bytes=600)
    assert done.manifest.documents == 40 and done.unreadable == ()
    assert verify(tmp_path / "corpus").checksums
    rendered = [encoder.render(each["messages"]) for each in records]
    expected = sorted((c.tokens.tolist(), c.labels.tolist()) for c in encoder.encode(rendered))
    found = []
    with Feed(settings(tmp_path), VOCAB, done.samples, 1, 0, 1) as feed:
        assert feed.samples == done.samples
        step = feed.next(feed.start())
    for batch in step.micro_batches:
        assert batch.documents is not None
        (tokens,), (labels,), (documents,) = batch.tokens, batch.labels, batch.documents
        for number in range(documents.max() + 1):
            (at,) = np.nonzero(documents == number)
            assert np.array_equal(at, np.arange(at[0], at[-1] + 1))
            # The label of a position is its successor: those of a document stay inside of it.
            counted = labels[at] != WEIGHTLESS
            assert not counted[-1]
            assert np.array_equal(labels[at[counted]], tokens[at[counted] + 1])
            found.append((tokens[at].tolist(), [False, *counted[:-1].tolist()]))
    unpadded = [_without_padding(*each, encoder.end_token) for each in found]
    assert sorted(unpadded) == expected
    assert step.real_tokens == done.labels


def _without_padding(
    tokens: list[int], labels: list[bool], padding: int
) -> tuple[list[int], list[bool]]:
    while tokens[-2:] == [padding, padding] or (tokens[-1] == padding and not labels[-1]):
        tokens, labels = tokens[:-1], labels[:-1]
    return tokens, labels


def test_preparing_twice_gives_the_same_bytes(tmp_path: Path, encoder: ChatEncoder) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        prepare(tmp_path / name, encoder, chats(30), inputs=())
    files = sorted(path.name for path in (tmp_path / "a" / "corpus").iterdir())
    assert "chat_template.jinja" in files and "tokenizer_config.json" in files
    for name in files:
        left, right = ((tmp_path / side / "corpus" / name).read_bytes() for side in ("a", "b"))
        assert left == right, name


def test_held_out_samples_are_whole_ones(tmp_path: Path, encoder: ChatEncoder) -> None:
    done = prepare(tmp_path, encoder, chats(60))
    sides = {}
    for split in ("train", "validation"):
        data = settings(tmp_path, validation_fraction=0.3)
        (source,) = open_sources(data, VOCAB, split).values()  # type: ignore[arg-type]
        rows = np.empty((source.samples, SEQUENCE + 1), np.int64)
        source.read(range(source.samples), list(rows))
        sides[split] = {row[:-1].tobytes() for row in rows}
    (whole,) = open_sources(settings(tmp_path), VOCAB).values()
    rows = np.empty((whole.samples, SEQUENCE + 1), np.int64)
    whole.read(range(whole.samples), list(rows))
    assert whole.samples == done.samples
    assert all(sides.values()) and not sides["train"] & sides["validation"]
    assert sides["train"] | sides["validation"] == {row[:-1].tobytes() for row in rows}


def test_without_packing_a_sample_is_one_conversation(tmp_path: Path, encoder: ChatEncoder) -> None:
    done = prepare(tmp_path, encoder, chats(6), pack=False)
    assert done.samples == 6
    open_sources(settings(tmp_path, document_mask=False), VOCAB)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sequence": 64}, r"data\.sequence = 64.*samples of 128 tokens.*set it to 128"),
        ({"document_mask": False}, r"data\.document_mask.*several documents.*--no-pack"),
        ({"pairs": True}, r"data\.pairs = true.*not pairs of answers.*set it to false"),
    ],
)
def test_a_job_that_would_misread_the_samples_is_refused(
    tmp_path: Path, encoder: ChatEncoder, more: dict[str, Any], message: str
) -> None:
    prepare(tmp_path, encoder, chats(9))
    with pytest.raises(DataError, match=message):
        open_sources(settings(tmp_path, **more), VOCAB)


def test_lines_that_cannot_be_used_are_left_out_with_their_reason(
    tmp_path: Path, encoder: ChatEncoder
) -> None:
    long = [{"role": "user", "content": "z" * 200}, {"role": "assistant", "content": "ok"}]
    bad = [
        {"messages": CONVERSATIONS[0][:1]},
        {"chat": CONVERSATIONS[0]},
        {"messages": "hello"},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]},
        {"messages": long},
    ]
    done = prepare(tmp_path, encoder, [*bad, *chats(10)])
    assert done.manifest.source.unreadable == len(bad)
    reasons = [each.reason for each in done.unreadable]
    for reason, part in zip(
        reasons,
        (
            "says nothing",
            "no key `messages`, only `chat`",
            "no list of messages",
            "without a role",
            "template cannot render",
            "tokens, more than a sample of 128",
        ),
        strict=True,
    ):
        assert part in reason
    lines = (tmp_path / "corpus" / "unreadable.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in lines] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(DataError, match="6 of 7 records would be left out"):
        prepare(tmp_path, encoder, [*bad, *chats(1)], replace=True)
    with pytest.raises(DataError, match="holds no conversation"):
        prepare(tmp_path, encoder, [], replace=True)


PROMPT = [{"role": "user", "content": "hello"}]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("hello to you", "no"))
EARLIER = [*PROMPT, {"role": "assistant", "content": "yes"}, *PROMPT]


def test_of_a_pair_only_the_answers_are_labels(tmp_path: Path, encoder: ChatEncoder) -> None:
    records = [
        {"prompt": EARLIER, "chosen": GOOD, "rejected": BAD},
        {"chosen": [*PROMPT, *GOOD], "rejected": [*PROMPT, *BAD]},
    ]
    done = prepare(tmp_path, encoder, records * 3, pairs=True)
    assert read_manifest(tmp_path / "corpus").pairs and done.manifest.documents == 12
    data = settings(tmp_path, pairs=True)
    with Feed(data, VOCAB, done.samples, 1, 0, 1) as feed:
        step = feed.next(feed.start())
    answers = []
    for batch in step.micro_batches:
        assert batch.documents is not None
        for number in range(batch.documents.max() + 1):
            inside = batch.labels[batch.documents == number]
            answers.append(encoder.tokenizer.decode(inside[inside >= 0].tolist()))
    assert answers == ["hello to you", "no"] * 6
    assert step.real_tokens == 6  # pairs, not tokens


def test_labels_stand_in_brackets_when_a_corpus_is_looked_at(
    tmp_path: Path, encoder: ChatEncoder
) -> None:
    prepare(tmp_path, encoder, [{"messages": CONVERSATIONS[0]}])
    stream = open_stream(tmp_path / "corpus")
    (shown,) = sample_texts(stream, 1, 30, tmp_path / "corpus" / "tokenizer.json")
    expected = (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟦hello to you<|im_end|>⟧\n"
    )
    assert shown.startswith(expected)
