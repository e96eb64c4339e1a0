"""The registry of models: a folder with one file per version, each written atomically."""

from __future__ import annotations

import fcntl
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, structs

from phalanx.config.errors import plain_reason
from phalanx.data.durable_files import create_once, write_atomically

ModelStage = Literal["candidate", "released", "archived"]
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_FILE = re.compile(r"(\d+)\.json")


class RegistryError(Exception):
    """A request to the registry cannot be carried out; the message says why."""


class ModelLineage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a model came from."""

    pipeline: str = ""
    manifest: str = ""  # of the pipeline's run: every input, command and hash
    inputs: dict[str, str] = {}  # hashes by name


class Promotion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change of stage."""

    time: str
    who: str
    stage: ModelStage
    reason: str = ""


class ModelVersion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One registered model."""

    format: int = 1
    name: str
    version: int
    stage: ModelStage = "candidate"
    checkpoint: str
    content: str = ""  # hash of its weights
    export: str = ""  # a folder that others load
    scores: dict[str, float] = {}
    lineage: ModelLineage = ModelLineage()
    registered: str
    who: str = ""
    history: tuple[Promotion, ...] = ()


class ModelRegistry:
    """Versions of models in a folder: ``NAME/VERSION.json``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def names(self) -> list[str]:
        """All models."""
        if not self.folder.is_dir():
            return []
        return sorted(path.name for path in self.folder.iterdir() if self._numbers(path.name))

    def versions(self, name: str) -> list[ModelVersion]:
        """Versions of a model, oldest first."""
        return [self._read(name, number) for number in self._numbers(name)]

    def get(self, name: str, version: int = 0) -> ModelVersion:
        """A version of a model; 0: the newest. RegistryError if there is none."""
        numbers = self._numbers(name)
        if not numbers:
            known = ", ".join(self.names()) or "none"
            raise RegistryError(f"{self.folder} has no model {name} (it has: {known})")
        if version and version not in numbers:
            have = ", ".join(map(str, numbers))
            raise RegistryError(f"{name} has no version {version} (it has: {have})")
        return self._read(name, version or numbers[-1])

    def released(self, name: str) -> ModelVersion | None:
        """The released version, if there is one."""
        of_stage = [each for each in self.versions(name) if each.stage == "released"]
        return max(of_stage, key=lambda each: each.history[-1].time, default=None)

    def register(self, model: ModelVersion) -> ModelVersion:
        """Register a model's next version; equal weights with equal scores keep theirs."""
        refuse_name(model.name)
        folder = self.folder / model.name
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            versions = self.versions(model.name)
            for known in versions:
                if model.content and _same(known, model):
                    return known
            number = versions[-1].version + 1 if versions else 1
            made = structs.replace(model, version=number)
            if create_once(folder / f"{number:04d}.json", _text(made), _draft()):
                return made

    def change_stage(self, model: ModelVersion, promotion: Promotion) -> ModelVersion:
        """Move a version to a stage; releasing one archives the version released before."""
        with self._alone(model.name):
            now = self._read(model.name, model.version)  # somebody may have moved it since
            made = structs.replace(now, stage=promotion.stage, history=(*now.history, promotion))
            self._write(made)
            if promotion.stage == "released":
                self._archive_others(made, promotion)
        return made

    def _archive_others(self, released: ModelVersion, promotion: Promotion) -> None:
        reason = f"replaced by {released.version}"
        left = structs.replace(promotion, stage="archived", reason=reason)
        for other in self.versions(released.name):
            if other.stage == "released" and other.version != released.version:
                history = (*other.history, left)
                self._write(structs.replace(other, stage="archived", history=history))

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Wait for others who move versions: two at once would archive each other's release."""
        with (self.folder / name / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _numbers(self, name: str) -> list[int]:
        refuse_name(name)
        folder = self.folder / name
        if not folder.is_dir():
            return []
        found = (_FILE.fullmatch(path.name) for path in folder.iterdir())
        return sorted(int(each[1]) for each in found if each is not None)

    def _read(self, name: str, number: int) -> ModelVersion:
        path = self.folder / name / f"{number:04d}.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=ModelVersion)
        except (OSError, msgspec.MsgspecError) as error:
            raise RegistryError(f"{path} cannot be read: {plain_reason(error)}") from None

    def _write(self, model: ModelVersion) -> None:
        path = self.folder / model.name / f"{model.version:04d}.json"
        write_atomically(path, _text(model), _draft())


def refuse_name(name: str) -> None:
    """Raise RegistryError for an invalid model name."""
    if not _NAME.fullmatch(name):
        raise RegistryError(f"{name!r} is not a valid model name: use letters, digits, . _ and -")


def _draft() -> str:
    """A temporary file name that no other writer uses."""
    return f"{secrets.token_hex(4)}.tmp"


def _same(known: ModelVersion, model: ModelVersion) -> bool:
    return (known.content, known.scores, known.export) == (
        model.content,
        model.scores,
        model.export,
    )


def _text(model: ModelVersion) -> bytes:
    return msgspec.json.format(msgspec.json.encode(model), indent=2) + b"\n"
