"""Tokens and labels of conversations are those of transformers, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError

from phalanx.data import DataError
from phalanx.data.chat.encode import AnswerRule, ChatEncoder, NotAppended
from tests.data.chat.chats import CHATML, CONVERSATIONS, TOOLS, UNMARKED, write_tokenizer

transformers = pytest.importorskip("transformers")

CALL = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "look", "arguments": {"a": 1}}]},
    {"role": "tool", "content": '{"sky": "\u00e9"}'},
    {"role": "assistant", "content": " it rains "},
]
LOOK = [{"type": "function", "function": {"name": "look", "parameters": {"a": "<int>"}}}]


def theirs(folder: Path, messages: list[dict[str, Any]], tools: Any = None) -> Any:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer.apply_chat_template(
        messages,
        tools=tools,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("tokenizers")
    templates = {"chatml": CHATML, "tools": TOOLS, "unmarked": UNMARKED}
    return {name: write_tokenizer(home / name, text) for name, text in templates.items()}


@pytest.mark.parametrize("template", ["chatml", "tools"])
@pytest.mark.parametrize("messages", [*CONVERSATIONS, CALL], ids=range(len(CONVERSATIONS) + 1))
def test_tokens_and_labels_are_those_of_transformers(
    folders: dict[str, Path], template: str, messages: list[dict[str, Any]]
) -> None:
    if template == "chatml" and messages is CALL:
        pytest.skip("the template has no tools")
    tools = LOOK if messages is CALL else None
    encoder = ChatEncoder(folders[template])
    (ours,) = encoder.encode([encoder.render(messages, tools)])
    expected = theirs(folders[template], messages, tools)
    assert ours.tokens.tolist() == expected["input_ids"]
    assert ours.labels.tolist() == [bool(mask) for mask in expected["assistant_masks"]]
    assert ours.labels.any() and not ours.labels.all()


def test_every_token_of_a_last_character_is_a_label(tmp_path: Path) -> None:
    """transformers leaves out all but the first token of a part's last character."""
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    folder = write_tokenizer(tmp_path, template)
    encoder = ChatEncoder(folder)
    messages = [{"role": "assistant", "content": "yes \U0001f642"}]
    (ours,) = encoder.encode([encoder.render(messages)])
    assert len(ours.tokens) > 4
    assert ours.labels.tolist() == [False] + [True] * (len(ours.tokens) - 1)  # nothing before it
    assert sum(theirs(folder, messages)["assistant_masks"]) < len(ours.tokens)


def test_a_template_without_markers_is_refused_with_the_fix(folders: dict[str, Path]) -> None:
    with pytest.raises(DataError, match=r"does not mark.*endgeneration.*--answers turns"):
        ChatEncoder(folders["unmarked"])


def test_turns_find_the_answers_of_a_template_without_markers(folders: dict[str, Path]) -> None:
    """What an answer adds is its text, its end and what the template writes after it."""
    encoder = ChatEncoder(folders["unmarked"], rule=AnswerRule.TURNS)
    rendered = encoder.render(CONVERSATIONS[1])
    parts = [rendered.text[first:past] for first, past in rendered.spans]
    assert parts == ["four<|im_end|>\n", f"{CONVERSATIONS[1][4]['content']}<|im_end|>\n"]
    (ours,) = encoder.encode([rendered])
    marked = ChatEncoder(folders["chatml"])
    (by_markers,) = marked.encode([marked.render(CONVERSATIONS[1])])
    assert np.array_equal(ours.tokens, by_markers.tokens)
    assert ours.labels[by_markers.labels].all()
    assert ours.labels.sum() == by_markers.labels.sum() + 2  # a line's end after each answer


def test_turns_refuse_a_template_that_rewrites_what_it_wrote(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: "
        "{{ m.content if loop.last else m.content | upper }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    encoder = ChatEncoder(write_tokenizer(tmp_path, template), rule=AnswerRule.TURNS)
    with pytest.raises(NotAppended, match="message 2 otherwise"):
        encoder.render(CONVERSATIONS[1])


def test_markers_in_a_macro_are_refused(tmp_path: Path) -> None:
    template = (
        "{% macro say(m) %}before {% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}"
    )
    encoder = ChatEncoder(write_tokenizer(tmp_path, template))
    with pytest.raises(TemplateError, match="in a macro"):
        encoder.render(CONVERSATIONS[0])
