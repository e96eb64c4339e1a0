"""Runs single units: what a worker does, on this machine or another."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import numpy as np

from phalanx.config import ConfigError
from phalanx.data.errors import DataError
from phalanx.data.prepare.dedup.buckets import (
    PAIRS_NAME,
    Pairs,
    equal_content,
    equal_keys,
    pairs_of,
    select_partition,
    unique_pairs,
)
from phalanx.data.prepare.dedup.clusters import in_range
from phalanx.data.prepare.dedup.verify import SketchFiles, similar_pairs
from phalanx.data.prepare.filter_files import (
    CONTENT_NAME,
    KEYS_NAME,
    SKETCH_ENDS_NAME,
    SKETCHES_NAME,
    filter_files,
    read_counts,
)
from phalanx.data.prepare.output.places import SourceFile
from phalanx.data.prepare.read.inputs import stat_input
from phalanx.data.prepare.recipe import PrepareRecipe
from phalanx.data.prepare.work import (
    NGRAMS_FOLDER,
    REMOVED_FOLDER,
    REMOVED_NAME,
    TOKENIZERS_FOLDER,
    FilterFiles,
    FindBuckets,
    IdentifyFiles,
    TokenizeFiles,
    UnitFailure,
    UnitPhase,
    VerifyPairs,
    WorkFolder,
    WorkUnit,
)

SOURCES_NAME = "sources.json"


def run_unit(work: WorkFolder, phase: UnitPhase, unit: WorkUnit) -> None:
    """Do a unit, unless it is done; a user's mistake is recorded for whoever waits for it."""
    if work.done(unit) or work.failure(unit) is not None:
        return
    try:
        with work.commit(work.of(unit)) as out:
            _do(work, phase, unit, out)
    except ConfigError as error:
        found = error.problems[0]
        work.record_failure(unit, UnitFailure(found.key, found.value, found.rule, found.fix))
    except OSError as error:
        rule = f"{unit.folder}: {error}"
        fix = "make it readable, or make space, and run the same command again"
        work.record_failure(unit, UnitFailure("work", str(work.path), rule, fix))


def run_task(phase_file: Path, task: int, tasks: int) -> None:
    """Every ``tasks``-th unit of a phase from number ``task`` on."""
    work, phase = WorkFolder.of_phase(phase_file)
    for unit in phase.units[task::tasks]:
        run_unit(work, phase, unit)


def _do(work: WorkFolder, phase: UnitPhase, unit: WorkUnit, out: Path) -> None:
    match unit:
        case IdentifyFiles():
            sources = [identify(path) for path in unit.paths]
            (out / SOURCES_NAME).write_bytes(msgspec.json.encode(sources))
        case FilterFiles():
            ngrams = work.path / NGRAMS_FOLDER / unit.ngrams if unit.ngrams else None
            filter_files(unit.paths, phase.recipe, Path(phase.recipe_folder), ngrams, out)
            _refuse_changed(unit)
        case FindBuckets(band=-1):
            _save_pairs(out, _exact_copies(work, phase, unit))
        case FindBuckets():
            _save_pairs(out, _candidates(work, phase, unit))
        case VerifyPairs():
            _save_pairs(out, _verified(work, phase, unit))
        case TokenizeFiles():
            _tokenize(work, phase.recipe, unit, out)


def _refuse_changed(unit: FilterFiles) -> None:
    for path, version in zip(unit.paths, unit.versions, strict=True):
        if stat_input(path).version != version:
            rule = "changed while it was read"
            raise DataError("read.inputs", path, rule, "run again when nothing writes to it")


def identify(path: str) -> SourceFile:
    """Identity of a file's content; a store knows that of its objects."""
    found = stat_input(path)
    if found.stored:
        return SourceFile(path, found.bytes, etag=found.version)
    with Path(path).open("rb") as file:
        return SourceFile(path, found.bytes, hashlib.file_digest(file, "sha256").hexdigest())


def _save_pairs(out: Path, pairs: Pairs) -> None:
    np.save(out / PAIRS_NAME, pairs)


def _exact_copies(work: WorkFolder, phase: UnitPhase, unit: FindBuckets) -> Pairs:
    firsts, seconds, numbers, start = [], [], [], 0
    for file in phase.layout:
        halves = np.load(
            work.result(FilterFiles.folder, file.key) / CONTENT_NAME,
            mmap_mode="r",
            allow_pickle=False,
        )
        chosen = select_partition(halves[0], unit.partition, unit.partitions)
        firsts.append(halves[0][chosen])
        seconds.append(halves[1][chosen])
        numbers.append(chosen + start)
        start += file.documents
    return equal_content(np.concatenate(firsts), np.concatenate(seconds), np.concatenate(numbers))


def _candidates(work: WorkFolder, phase: UnitPhase, unit: FindBuckets) -> Pairs:
    copied = np.zeros(sum(file.documents for file in phase.layout), bool)
    for key in unit.without:
        copied[
            np.load(work.result(FindBuckets.folder, key) / PAIRS_NAME, allow_pickle=False)[1]
        ] = True
    keys, numbers, start = [], [], 0
    for file in phase.layout:
        past = start + file.documents
        folder = work.result(FilterFiles.folder, file.key)
        band = np.load(folder / KEYS_NAME, mmap_mode="r", allow_pickle=False)[unit.band]
        chosen = select_partition(band, unit.partition, unit.partitions)
        chosen = chosen[~copied[start:past][chosen]]
        keys.append(band[chosen])
        numbers.append(chosen + start)
        start = past
    return equal_keys(np.concatenate(keys), np.concatenate(numbers))


def _verified(work: WorkFolder, phase: UnitPhase, unit: VerifyPairs) -> Pairs:
    folders = [work.result(FilterFiles.folder, file.key) for file in phase.layout]
    documents = [file.documents for file in phase.layout]
    sketches = SketchFiles(folders, documents, (SKETCHES_NAME, SKETCH_ENDS_NAME))
    found = [
        pairs_of(work.result(FindBuckets.folder, key), unit.first, unit.past)
        for key in unit.buckets
    ]
    return similar_pairs(unique_pairs(found), sketches, unit.jaccard)


def _tokenize(work: WorkFolder, recipe: PrepareRecipe, unit: TokenizeFiles, out: Path) -> None:
    # The tokenizers library loads only in workers that need it.
    from phalanx.data.prepare.output.tokenize_files import tokenize_files
    from phalanx.data.tokenize.encode import EncodeSettings

    filtered = work.result(FilterFiles.folder, unit.filtered)
    copies = np.load(
        work.result(REMOVED_FOLDER, unit.removed) / REMOVED_NAME, mmap_mode="r", allow_pickle=False
    )
    past = unit.first + read_counts(filtered).kept
    text = (work.path / TOKENIZERS_FOLDER / unit.tokenizer).read_text(encoding="utf-8")
    settings = EncodeSettings(text, unit.end_of_document, "text", unit.dtype)
    tokenize_files(filtered, in_range(copies[0], unit.first, past), settings, out)
