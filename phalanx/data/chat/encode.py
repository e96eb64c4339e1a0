"""Conversations as tokens, of which those that the assistant generates are labels."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from phalanx.data.chat.template import ChatTemplate, Message, Rendered, load_template
from phalanx.data.corpus.manifest import TOKENIZER_NAME
from phalanx.data.errors import DataError
from phalanx.data.tokenize.vocabulary import end_of_document, load_tokenizer

ASSISTANT = "assistant"


class AnswerRule(StrEnum):
    """How the assistant's part of a rendered conversation is found."""

    MARKERS = "markers"  # as the template marks it
    TURNS = "turns"  # what an assistant's message adds to the text of those before it


class Conversation(NamedTuple):
    """One document: tokens, and which of them are labels."""

    tokens: NDArray[np.uint32]
    labels: NDArray[np.bool_]


class NotAppended(Exception):  # noqa: N818 - a property of the record
    """A template writes earlier messages otherwise once later ones follow."""


class ChatEncoder:
    """A tokenizer's folder with its template."""

    def __init__(
        self, folder: Path, template: Path | None = None, rule: AnswerRule = AnswerRule.MARKERS
    ) -> None:
        self.folder, self.rule = folder, rule
        self.template = load_template(folder, template)
        if rule is AnswerRule.MARKERS and not self.template.marked:
            raise _unmarked(template or folder)
        self.tokenizer: Tokenizer = load_tokenizer(folder / TOKENIZER_NAME)
        self.tokenizer_text = self.tokenizer.to_str(pretty=False)
        self.vocab = max(self.tokenizer.get_vocab().values()) + 1  # ids may have gaps
        name = self.template.special_tokens.get("eos_token", "")
        self.end_token = end_of_document(self.tokenizer, name)

    def render(self, messages: Sequence[Message], tools: Any = None) -> Rendered:
        """Text and the assistant's parts of it; ``TemplateError`` or ``NotAppended``."""
        if self.rule is AnswerRule.MARKERS:
            return self.template.render(messages, tools)
        return rendered_by_turns(self.template, messages, tools)

    def encode(self, rendered: Sequence[Rendered]) -> list[Conversation]:
        """Tokens of texts, and which are labels."""
        texts = [each.text for each in rendered]
        # Special tokens that a template writes are those tokens, as transformers has it.
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            Conversation(np.array(found.ids, np.uint32), labels_of(found.offsets, each))
            for found, each in zip(encodings, rendered, strict=True)
        ]


def labels_of(offsets: Sequence[tuple[int, int]], rendered: Rendered) -> NDArray[np.bool_]:
    """Tokens that hold a character of the assistant's; the first follows on nothing.

    ``offsets``: of each token, its first character and the one past its last.
    """
    places = np.array(offsets, np.int64).reshape(-1, 2)
    labels = np.zeros(len(places), np.bool_)
    for first, past in rendered.spans:
        labels |= (places[:, 0] < past) & (places[:, 1] > first)
    labels[:1] = False
    return labels


def rendered_by_turns(template: ChatTemplate, messages: Sequence[Message], tools: Any) -> Rendered:
    """Without markers: an answer is what its message adds to the text that asks for one."""
    whole = template.render(messages, tools).text
    spans = []
    for number, message in enumerate(messages):
        if message.get("role") != ASSISTANT:
            continue
        before = template.render(messages[:number], tools, prompt=True).text
        through = template.render(messages[: number + 1], tools).text
        if not (through.startswith(before) and whole.startswith(through)):
            raise NotAppended(
                f"the template writes message {number} otherwise once others follow, or does not "
                "begin it as it asks for an answer: it needs markers"
            )
        spans.append((len(before), len(through)))
    return Rendered(whole, spans)


def _unmarked(where: Path) -> DataError:
    rule = "its template does not mark what the assistant generates, so that no token is a label"
    fix = (
        "give a copy of it with {% generation %} ... {% endgeneration %} around the assistant's "
        "text (--template FILE), or take what each answer adds to the text (--answers turns)"
    )
    return DataError("tokenizer", where, rule, fix)
