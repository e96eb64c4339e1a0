"""What a Hugging Face folder has beside its weights: the tokenizer, and how to generate text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from phalanx.model.hf.files import HfError

TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"
# Of another model's folder: those that go with its tokenizer.
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def write_tokenizer(source: Path, folder: Path, end: int | None, context: int) -> None:
    """Put the tokenizer at ``source``, a file or a model's folder, beside exported weights.

    ``end`` is the token that ends documents; None: the tokenizer's own configuration says it.
    """
    if source.is_dir() and (source / "tokenizer_config.json").exists():
        for name in TOKENIZER_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, folder / name)
        if end is None and (source / GENERATION_FILE).exists():
            shutil.copyfile(source / GENERATION_FILE, folder / GENERATION_FILE)
        return
    path = source / TOKENIZER_FILE if source.is_dir() else source
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no tokenizer.json"
        raise HfError(path, f"cannot be used as a tokenizer: {reason}") from None
    shutil.copyfile(path, folder / TOKENIZER_FILE)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if context:
        settings["model_max_length"] = context
    if name := _name_of(content, end):
        settings |= {"eos_token": name, "bos_token": None, "pad_token": name}
    _write(folder / "tokenizer_config.json", settings)


def write_generation_config(folder: Path, end: int | None) -> None:
    """What ``generate`` goes by; it stops at the token that ends documents."""
    if (folder / GENERATION_FILE).exists():
        return
    ends = {} if end is None else {"eos_token_id": end, "pad_token_id": end}
    _write(folder / GENERATION_FILE, {"_from_model_config": False, **ends})


def set_end_of_text(folder: Path, end: int) -> None:
    """Have config.json name the token that ends documents."""
    path = folder / "config.json"
    _write(path, json.loads(path.read_text()) | {"eos_token_id": end, "bos_token_id": None})


def _name_of(content: dict[str, Any], number: int | None) -> str:
    """The text of a token of a tokenizer.json."""
    known = {each["id"]: each["content"] for each in content.get("added_tokens", [])}
    return str(known.get(number, ""))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
