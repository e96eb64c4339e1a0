"""Encode and decode text with the tokenizer that a model was trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from phalanx.checkpoint.tools.convert import FoundTokenizer, find_tokenizer
from phalanx.config import ConfigError
from phalanx.data.tokenize.vocabulary import end_of_document, load_tokenizer
from phalanx.model.hf.tokenizer import TOKENIZER_FILE


class TextCodec(NamedTuple):
    """A tokenizer with its BOS and EOS tokens."""

    tokenizer: Tokenizer
    end: int  # ends a document
    start: int  # stands before a text of which nothing is known
    path: Path

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Tokens of a text; ``special``: with those that the tokenizer puts around it."""
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: list[int], *, special: bool = False) -> str:
        """The text of tokens; ``special``: the names of special tokens are part of it."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=not special))


def open_codec(config: dict[str, Any], given: Path | None = None) -> TextCodec | None:
    """The given tokenizer, or that of a run with these settings; None if there is none here."""
    tokenizer = FoundTokenizer(given, None) if given is not None else find_tokenizer(config)
    if tokenizer is None:
        return None
    path = tokenizer.path / TOKENIZER_FILE if tokenizer.path.is_dir() else tokenizer.path
    loaded = load_tokenizer(path)
    settings = _settings(path.parent / "tokenizer_config.json")
    end = tokenizer.end
    if end is None:
        end = _number(loaded, settings.get("eos_token"))
    if end is None:
        end = end_of_document(loaded)
    start = _number(loaded, settings.get("bos_token"))
    return TextCodec(loaded, end, end if start is None else start, path)


def needed_codec(codec: TextCodec | None, why: str) -> TextCodec:
    """The tokenizer; an error with the fix if there is none."""
    if codec is None:
        rule = f"{why} needs the run's tokenizer, and its settings name none that can be read here"
        raise ConfigError("tokenizer", "", rule, "give --tokenizer, a tokenizer.json or its folder")
    return codec


def _settings(path: Path) -> dict[str, Any]:
    """The configuration files beside a Hugging Face tokenizer."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _number(tokenizer: Tokenizer, token: object) -> int | None:
    """The id of a token as such files give it."""
    name = token.get("content") if isinstance(token, dict) else token
    number = tokenizer.token_to_id(name) if isinstance(name, str) else None
    return None if number is None else int(number)
