"""The whole way from raw files to a corpus: phase by phase, each restartable."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import msgspec

from phalanx.data.corpus.manifest import MANIFEST_NAME
from phalanx.data.durable_files import write_atomically
from phalanx.data.errors import DataError
from phalanx.data.folder_lock import alone_in
from phalanx.data.prepare.classifier import load_classifier
from phalanx.data.prepare.counts import refuse_losses, total_counts
from phalanx.data.prepare.decontaminate import gather_ngrams
from phalanx.data.prepare.duplicates import find_duplicates
from phalanx.data.prepare.engine import LocalEngine, Progress, UnitEngine, run_phase
from phalanx.data.prepare.filter_files import read_counts
from phalanx.data.prepare.output.corpus import CorpusOutput
from phalanx.data.prepare.output.places import SourceFile
from phalanx.data.prepare.output.report import make_report, write_report
from phalanx.data.prepare.output.summary import EXACT, NEAR, REPORT_NAME, PrepareReport
from phalanx.data.prepare.read.inputs import InputFile, find_inputs, group_inputs
from phalanx.data.prepare.recipe import VERSION, PrepareRecipe, digest, filter_digest
from phalanx.data.prepare.units import SOURCES_NAME
from phalanx.data.prepare.work import (
    NGRAMS_FOLDER,
    FilterFiles,
    GroupLayout,
    IdentifyFiles,
    UnitPhase,
    WorkFolder,
    WorkUnit,
)

SMALL_DOCUMENTS = 100_000  # that are compared faster than processes start
STARTED_NAME = "prepare.json"  # whose corpus a folder holds, or will


class Prepared(msgspec.Struct, frozen=True):
    """Outcome of ``prepare``."""

    report: PrepareReport
    unchanged: bool  # the corpus was there already


def prepare(
    recipe: PrepareRecipe,
    recipe_folder: Path,
    engine: UnitEngine,
    progress: Progress = lambda phase, done, total: None,
    replace: bool = False,
) -> Prepared:
    """Make the corpus that a recipe describes; a run that was killed goes on where it was."""
    run = _Preparation(recipe, recipe_folder, engine, progress)
    with WorkFolder(recipe.work_folder).alone():
        return run.make(replace)


class _Preparation:
    """One run over all phases."""

    def __init__(
        self, recipe: PrepareRecipe, recipe_folder: Path, engine: UnitEngine, progress: Progress
    ) -> None:
        self._recipe, self._folder = recipe, recipe_folder
        self._engine, self._progress = engine, progress
        self._out = Path(recipe.out)
        self._work = WorkFolder(recipe.work_folder.absolute())

    def make(self, replace: bool) -> Prepared:
        """All phases; nothing where the corpus is there already."""
        recipe, work = self._recipe, self._work
        work.forget_failures()
        classifiers = [self._code_digest(each.function) for each in recipe.classifier]
        ngrams = self._evaluation_ngrams()
        files = find_inputs("read.inputs", recipe.read.inputs)
        groups = group_inputs(files, recipe.read.group_mb << 20)
        contents = self._identify(groups)
        sources = [source for group in contents for source in group]
        settings = filter_digest(recipe, classifiers, ngrams)
        key = digest(
            (VERSION, sources, settings, recipe.deduplicate, recipe.tokenize, self._given())
        )
        if (ready := self._ready(key, replace)) is not None:
            return Prepared(ready, unchanged=True)
        units = [
            _filter_unit(group, content, settings, ngrams)
            for group, content in zip(groups, contents, strict=True)
        ]
        self._run("filter", units)
        folders = [work.of(unit) for unit in units]
        each = [read_counts(folder) for folder in folders]
        paths = [unit.paths for unit in units]
        counts = total_counts(zip(paths, each, strict=True), recipe.examples)
        refuse_losses(counts, recipe)
        layout = tuple(
            GroupLayout(unit.key, len(unit.paths), part.kept)
            for unit, part in zip(units, each, strict=True)
        )
        removed = find_duplicates(
            work, layout, recipe.deduplicate, lambda name, some: self._compare(name, some, layout)
        )
        corpus = CorpusOutput(recipe, self._out, work, layout, sources)
        tokenized = corpus.tokenize(removed, self._run)
        # The report says that all is done: what it says ends before the corpus that it is about.
        with alone_in(self._out):  # whose work folder may be another
            (self._out / REPORT_NAME).unlink(missing_ok=True)
            write_atomically(self._out / STARTED_NAME, msgspec.json.encode({"key": key}))
            manifest, no_tokens = corpus.pack(tokenized, counts)
        examples = {
            name: [corpus.duplicate(*pair) for pair in removed.first(stored, recipe.examples)]
            for name, stored in ((EXACT, "exact"), (NEAR, "near"))
        }
        duplicates = {EXACT: removed.exact, NEAR: removed.near}
        report = make_report(key, recipe, counts, duplicates, examples, manifest, no_tokens)
        write_report(self._out, report)
        work.remove_drafts()
        return Prepared(report, unchanged=False)

    def _run(
        self,
        name: str,
        units: Sequence[WorkUnit],
        layout: tuple[GroupLayout, ...] = (),
        engine: UnitEngine | None = None,
    ) -> None:
        different = tuple({unit.key: unit for unit in units}.values())
        phase = UnitPhase(name, self._recipe, str(self._folder.absolute()), different, layout)
        run_phase(engine or self._engine, self._work, phase, self._progress)

    def _compare(self, name: str, units: list[WorkUnit], layout: tuple[GroupLayout, ...]) -> None:
        """A phase of deduplication; of a small corpus on one machine, by this process."""
        small = sum(group.documents for group in layout) <= SMALL_DOCUMENTS
        alone = small and isinstance(self._engine, LocalEngine)
        self._run(name, units, layout, LocalEngine(1) if alone else None)

    def _identify(self, groups: Sequence[Sequence[InputFile]]) -> list[list[SourceFile]]:
        folder = Path.cwd().as_posix()
        units = [
            IdentifyFiles(digest((folder, group)), tuple(file.path for file in group))
            for group in groups
        ]
        self._run("inputs", units)
        return [
            msgspec.json.decode(
                (self._work.of(unit) / SOURCES_NAME).read_bytes(), type=list[SourceFile]
            )
            for unit in units
        ]

    def _code_digest(self, reference: str) -> str:
        """Of the file that holds a classifier: another version judges otherwise."""
        load_classifier(reference, self._folder)
        file = getattr(sys.modules[reference.partition(":")[0]], "__file__", None)
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""

    def _evaluation_ngrams(self) -> str:
        """Have the n-grams of evaluation sets at hand for all workers; the name of their file."""
        settings = self._recipe.decontaminate
        if settings is None:
            return ""
        ngrams = gather_ngrams(
            settings.against, settings.text_key, settings.words, settings.least_words
        )
        folder = self._work.path / NGRAMS_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{ngrams.digest()}.npz"
        if not (folder / name).exists():
            ngrams.save(folder / name)
        return name

    def _given(self) -> str:
        """Of the tokenizer that the recipe names."""
        path = self._recipe.tokenize.tokenizer
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""

    def _ready(self, key: str, replace: bool) -> PrepareReport | None:
        """The report of this very corpus, if it is complete; refuses to replace another."""
        if not (self._out / MANIFEST_NAME).exists():
            return None
        try:
            report = msgspec.json.decode((self._out / REPORT_NAME).read_bytes(), type=PrepareReport)
            if report.key == key:
                return report
        except (OSError, msgspec.DecodeError):
            pass
        try:
            started = msgspec.json.decode((self._out / STARTED_NAME).read_bytes())["key"]
        except (OSError, msgspec.DecodeError, KeyError):
            started = ""
        if not replace and started != key:
            rule = "already holds a corpus, of another recipe or of other inputs"
            fix = "choose another folder, or replace it with --force"
            raise DataError("out", self._out, rule, fix)
        return None


def _filter_unit(
    group: Sequence[InputFile], sources: Sequence[SourceFile], settings: str, ngrams: str
) -> FilterFiles:
    # A name's ending says how a file is read; the rest of the name changes nothing.
    content = [
        ("".join(PurePosixPath(file.path).suffixes[-2:]), source.sha256 or (source.etag, file.path))
        for file, source in zip(group, sources, strict=True)
    ]
    paths, versions = (tuple(getattr(file, name) for file in group) for name in ("path", "version"))
    return FilterFiles(digest((content, settings)), paths, versions, ngrams)
