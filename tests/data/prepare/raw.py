"""Raw text for tests: prose that passes every rule, and documents that resemble each other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from phalanx.data.prepare.recipe import PrepareRecipe, load_recipe

STOP_WORDS = ("the", "of", "and", "to", "in", "that", "with", "is", "was", "for")


def vocabulary(size: int = 4000) -> list[str]:
    """Made-up words of two to four syllables."""
    rng = random.Random(7)
    syllables = [first + second for first in "bdfgklmnprstv" for second in "aeiou"]
    return ["".join(rng.choices(syllables, k=rng.randint(2, 4))) for _ in range(size)]


WORDS = vocabulary()


def prose(seed: int, words: int = 120) -> str:
    """English-looking sentences, the same for the same seed."""
    rng = random.Random(seed)
    lines, sentence = [], list[str]()
    for at in range(words):
        sentence.append(rng.choice(STOP_WORDS) if at % 3 == 1 else rng.choice(WORDS))
        if len(sentence) == 15:
            lines.append(" ".join(sentence).capitalize() + ".")
            sentence = []
    if sentence:
        lines.append(" ".join(sentence).capitalize() + ".")
    return "\n".join(lines)


def changed(text: str, changes: int, seed: int = 0) -> str:
    """The text with so many of its words replaced, evenly spread."""
    rng = random.Random(f"{seed} {text[:40]}")
    words = text.split(" ")
    for at in range(changes):
        words[(at * len(words) + len(words) // 2) // max(1, changes) % len(words)] = (
            f"{rng.choice(WORDS)}{rng.choice(WORDS)}"
        )
    return " ".join(words)


def write_lines(path: Path, texts: list[str], name: str = "") -> None:
    """JSON lines with ids."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"text": text, "id": f"{name or path.stem}-{at}"} for at, text in enumerate(texts)]
    path.write_bytes(msgspec.json.Encoder().encode_lines(rows))


def write_raw(folder: Path) -> None:
    """Three files: prose, copies within and across files, near copies, noise, broken records."""
    texts = [prose(seed) for seed in range(40)]
    write_lines(folder / "a.jsonl", [*texts[:20], texts[3], changed(texts[5], 2)])
    write_lines(folder / "b.jsonl", [*texts[20:], texts[4], changed(texts[25], 1), "too short", ""])
    with (folder / "b.jsonl").open("ab") as file:
        file.write(b'{"text": 7}\nno json\n')
    mail = prose(99).replace(".", " to jo.doe@example.org or 8.8.4.4.", 1)
    (folder / "c.txt").write_text(mail)


def recipe_file(folder: Path, more: str = "") -> Path:
    """A recipe over ``folder``/raw that writes to ``folder``/out."""
    path = folder / "recipe.toml"
    path.write_text(
        f'out = "{folder / "out"}"\n[read]\ninputs = ["{folder / "raw"}"]\ngroup_mb = 0\n'
        f'[filter]\nrules = ["gopher"]\n[mask]\n[tokenize]\nvocab_size = 300\nshard_mb = 1\n{more}'
    )
    return path


def recipe(folder: Path, more: str = "", overrides: Sequence[str] = ()) -> PrepareRecipe:
    """The same, loaded."""
    return load_recipe(recipe_file(folder, more), overrides)
