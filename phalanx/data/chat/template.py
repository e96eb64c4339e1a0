"""Chat templates of Hugging Face tokenizers: conversations as text, and who wrote which part.

A template says between ``{% generation %}`` and ``{% endgeneration %}`` what the assistant
generates. Templates are somebody else's code: they run in Jinja's sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phalanx.data.errors import DataError

CONFIG_NAME = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"
MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")

Message = Mapping[str, Any]
Span = tuple[int, int]  # first character, and the one past the last


class Rendered(NamedTuple):
    """A conversation as text, and the parts of it that the assistant generates."""

    text: str
    spans: list[Span]


class _GenerationTag(Extension):
    """Notes where the text between the markers lies while a template is rendered."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}
        self.characters = 0  # of the text so far
        self.noted: list[tuple[int, str]] = []  # first character, and what was generated

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.noted.append((self.characters, text))
        return text


class ChatTemplate:
    """Renders conversations as ``transformers`` does, but for the date of today.

    ``strftime_now`` is left undefined, so that the same conversations always make the same corpus;
    templates that ask for it have a date of their own.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self.text, self.special_tokens = text, dict(special_tokens)
        self.marked = MARKER.search(text) is not None
        self._template = environment.from_string(text)
        (self._tag,) = (e for e in environment.extensions.values() if isinstance(e, _GenerationTag))

    def render(
        self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False
    ) -> Rendered:
        """``prompt``: followed by what begins an answer. Raises jinja2's ``TemplateError``."""
        # A key without a value is one that is missing: templates test for that.
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        self._tag.characters, self._tag.noted = 0, []
        pieces = []
        variables = {"messages": given, "tools": tools, "documents": None}
        for piece in self._template.generate(
            **variables, add_generation_prompt=prompt, **self.special_tokens
        ):
            pieces.append(piece)
            self._tag.characters += len(piece)
        text, noted = "".join(pieces), self._tag.noted
        for first, generated in noted:
            if not text.startswith(generated, first):
                raise TemplateError("its markers stand in a macro or a captured block")
        return Rendered(text, [(first, first + len(part)) for first, part in noted])


def load_template(folder: Path, file: Path | None = None) -> ChatTemplate:
    """The template of a tokenizer's folder, or the one in ``file`` with that tokenizer's tokens."""
    try:
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        rule = f"has no {CONFIG_NAME}, which names its special tokens"
        fix = "give the folder of a Hugging Face tokenizer"
        raise DataError("tokenizer", folder, rule, fix) from None
    except ValueError as error:
        raise DataError(
            "tokenizer", folder / CONFIG_NAME, f"is no JSON ({error})", _RESTORE
        ) from None
    path = file or folder / TEMPLATE_NAME
    stored = config.get("chat_template")
    if isinstance(stored, list):  # several by name, as older tokenizers have them
        stored = {each["name"]: each["template"] for each in stored}.get("default")
    if path.exists():
        stored = path.read_text(encoding="utf-8")
    elif file is not None:
        raise DataError("template", file, "does not exist", "correct the path")
    if not isinstance(stored, str):
        rule = f"has no chat template, neither in {CONFIG_NAME} nor as {TEMPLATE_NAME}"
        raise DataError("tokenizer", folder, rule, "give one with --template FILE")
    tokens = {name: text for name in SPECIAL if (text := _token_text(config.get(name)))}
    try:
        return ChatTemplate(stored, tokens)
    except TemplateError as error:
        rule = f"is no template that Jinja can read ({error})"
        raise DataError(
            "template", path, rule, "correct it, or give another with --template"
        ) from None


_RESTORE = "restore the file from the model's folder"


def _token_text(token: Any) -> str:
    """Of a special token, which is a text or an object that has one."""
    found = token.get("content", "") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Without HTML's escapes, which Jinja's own filter has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    """What templates call where they cannot render a conversation."""
    raise TemplateError(message)
