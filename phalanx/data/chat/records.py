"""Conversations and pairs of answers out of JSON lines; what cannot be used is noted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from phalanx.data.chat.template import Message
from phalanx.data.errors import DataError
from phalanx.data.tokenize.inputs import JSON_ERRORS, LINE_SUFFIXES, read_pieces
from phalanx.data.tokenize.records import Unreadable

CHAT_SUFFIXES = tuple(name + packed for name in LINE_SUFFIXES for packed in ("", ".gz", ".zst"))
PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"


class ChatRecord(NamedTuple):
    """Conversations of one line (a chat, or both sides of a pair), and where it stands."""

    file: int
    line: int
    conversations: list[list[Message]]
    shared: int  # leading messages that are no answer to learn from: a pair's prompt
    tools: Any


Record: TypeAlias = ChatRecord | Unreadable


class ChatRecordError(Exception):
    """A line that is no conversation, and why."""


def read_records(files: Sequence[Path], key: str, *, pairs: bool) -> Iterator[Record]:
    """Every line of JSON-lines files, in order."""
    for path in files:
        if not path.name.endswith(CHAT_SUFFIXES):
            rule = f"is no file of JSON lines ({', '.join(LINE_SUFFIXES)}, also packed)"
            raise DataError("input", path, rule, "give files with a conversation a line")
    for number, _, piece in read_pieces(files, key):
        if isinstance(piece.content, str):
            yield Unreadable(number, piece.line, piece.content)
            continue
        for at, line in enumerate(piece.content.split(b"\n")):
            if line.strip():
                yield _record(line, number, piece.line + at, key, pairs)


def _record(line: bytes, file: int, number: int, key: str, pairs: bool) -> Record:
    try:
        fields = msgspec.json.decode(line)
        if not isinstance(fields, dict):
            raise ChatRecordError("is no JSON object")
        if not pairs:
            return ChatRecord(file, number, [_messages(fields, key)], 0, fields.get("tools"))
        prompt = _messages(fields, PROMPT) if PROMPT in fields else []
        both = [prompt + _messages(fields, side) for side in (CHOSEN, REJECTED)]
        shared = len(prompt) or _equal_messages(*both)
        return ChatRecord(file, number, both, shared, fields.get("tools"))
    except (ChatRecordError, *JSON_ERRORS) as error:
        return Unreadable(file, number, str(error))


def _messages(fields: dict[str, Any], key: str) -> list[Message]:
    if key not in fields:
        keys = ", ".join(f"`{each}`" for each in list(fields)[:12]) or "none"
        raise ChatRecordError(f"has no key `{key}`, only {keys}")
    messages = fields[key]
    if not isinstance(messages, list) or not messages:
        raise ChatRecordError(f"`{key}` is no list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ChatRecordError(f"`{key}` holds a message without a role")
    return messages


def _equal_messages(left: list[Message], right: list[Message]) -> int:
    """How many messages both sides begin with; at least the last one of each is its answer."""
    most = min(len(left), len(right)) - 1
    return next((n for n in range(most) if left[n] != right[n]), most)
