"""What ``phalanx data prepare`` is asked for: one TOML file, every key with its rule."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from phalanx.config import ConfigError
from phalanx.config.errors import ConfigProblem, problem
from phalanx.config.load import overridden, read_table
from phalanx.config.section import Count, Fraction, Natural, Section
from phalanx.config.tree import build, file_mistakes
from phalanx.data.prepare.rules import RULES
from phalanx.data.prepare.rules.registry import Threshold, wrong_rules

VERSION = 1  # of what units write: other code, other results

MaskName = Literal["email", "ip", "phone"]


class ReadSettings(Section, frozen=True, kw_only=True):
    """[read]: the raw files."""

    inputs: tuple[str, ...]  # files, folders or glob patterns
    text_key: str = "text"
    id_key: str = "id"
    most_unreadable: Fraction = 0.05  # share of the records; with more, nothing is completed
    group_mb: Natural = 8  # small files up to this size are one unit of work; 0: each is one


class FilterSettings(Section, frozen=True, kw_only=True):
    """[filter]: the rules that documents pass, in this order."""

    rules: tuple[str, ...] = ("gopher", "repetition", "fineweb")
    thresholds: dict[str, dict[str, Threshold]] = msgspec.field(default_factory=dict)


class ClassifierSettings(Section, frozen=True, kw_only=True):
    """[[classifier]]: a function of the user's own, asked after the rules."""

    function: str
    least: float = 0.5  # score of a document that is kept
    most_failed: Fraction = 0.01  # share of the documents asked about for which it may fail


class DeduplicateSettings(Section, frozen=True, kw_only=True):
    """[deduplicate]: documents that another one says already."""

    exact: bool = True
    near: bool = True
    jaccard: Annotated[float, msgspec.Meta(ge=0.3, le=0.99)] = 0.8  # of sets of word n-grams
    words: Annotated[int, msgspec.Meta(ge=1, le=20)] = 5  # of an n-gram
    recall: Annotated[float, msgspec.Meta(ge=0.5, le=0.999)] = 0.97  # at exactly that Jaccard


class DecontaminateSettings(Section, frozen=True, kw_only=True):
    """[decontaminate]: evaluation sets that must not be trained on."""

    against: tuple[str, ...]
    text_key: str = ""  # empty: every string of an example
    words: Annotated[int, msgspec.Meta(ge=3, le=50)] = 13
    least_words: Annotated[int, msgspec.Meta(ge=3, le=50)] = 8  # of an example that is looked for


class MaskSettings(Section, frozen=True, kw_only=True):
    """[mask]: what may name a person."""

    what: tuple[MaskName, ...] = ("email", "ip", "phone")


class TokenizeSettings(Section, frozen=True, kw_only=True):
    """[tokenize]: the tokenizer (one of the first two), and the size of a shard."""

    tokenizer: str = ""
    vocab_size: Natural = 0
    end_of_document: str = ""
    shard_mb: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 256


class SlurmSettings(Section, frozen=True, kw_only=True):
    """[slurm]: what each array task asks for."""

    partition: str = ""
    account: str = ""
    time: str = ""
    options: tuple[str, ...] = ()  # further options of sbatch


class PrepareRecipe(Section, frozen=True, kw_only=True):
    """A corpus to be made."""

    out: str
    work: str = ""  # default: "work" inside of out
    examples: Count = 5  # of dropped documents, kept for each reason
    read: ReadSettings
    filter: FilterSettings = FilterSettings()
    classifier: tuple[ClassifierSettings, ...] = ()
    deduplicate: DeduplicateSettings | None = DeduplicateSettings()
    decontaminate: DecontaminateSettings | None = None
    mask: MaskSettings | None = None
    tokenize: TokenizeSettings
    slurm: SlurmSettings = SlurmSettings()
    ray_address: str = "auto"

    @property
    def work_folder(self) -> Path:
        """Where finished units are kept."""
        return Path(self.work or Path(self.out, "work"))


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> PrepareRecipe:
    """The recipe in a TOML file; ``ConfigError`` with all mistakes at once."""
    merged, problems = overridden(read_table(path), overrides, PrepareRecipe)
    problems += file_mistakes(PrepareRecipe, merged)
    if problems:
        raise ConfigError.of(problems)
    recipe = build(PrepareRecipe, merged)
    if problems := [*_contradictions(recipe)]:
        raise ConfigError.of(problems)
    return recipe


def _contradictions(recipe: PrepareRecipe) -> list[ConfigProblem]:
    problems = wrong_rules(recipe.filter.rules, recipe.filter.thresholds)
    tokenize = recipe.tokenize
    if bool(tokenize.tokenizer) == bool(tokenize.vocab_size):
        rule = "give either tokenizer (a file) or vocab_size (train one)"
        problems.append(problem("tokenize", "", rule, "e.g. vocab_size = 32000"))
    elif tokenize.tokenizer and not Path(tokenize.tokenizer).is_file():
        fix = "correct the path, or give vocab_size to train one"
        problems.append(problem("tokenize.tokenizer", tokenize.tokenizer, "is no file", fix))
    if not recipe.read.inputs:
        problems.append(problem("read.inputs", "[]", "names nothing", "name files or folders"))
    check = recipe.decontaminate
    if check is not None and check.least_words > check.words:
        rule = f"is more than decontaminate.words = {check.words}"
        fix = f"use {check.words} or less"
        problems.append(problem("decontaminate.least_words", check.least_words, rule, fix))
    return problems


def filter_digest(recipe: PrepareRecipe, classifiers: Sequence[str], ngrams: str) -> str:
    """Identity of what is done to a single file: equal where it would give the same.

    ``classifiers``: digests of the users' modules; ``ngrams``: of the evaluation sets.
    """
    near = recipe.deduplicate
    settings = (
        *(VERSION, recipe.read.text_key, recipe.read.id_key, recipe.filter, recipe.classifier),
        *(near and (near.near, near.jaccard, near.words, near.recall), recipe.mask),
        *(recipe.decontaminate and recipe.decontaminate.words, recipe.examples),
        *(tuple(classifiers), ngrams, {name: rule.thresholds for name, rule in RULES.items()}),
    )
    return digest(settings)


def digest(content: Any) -> str:
    """Short identity of settings."""
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:24]
