"""A job onto Slurm: facts of the site, the script, sbatch."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from phalanx.config import Backend, ConfigError, to_toml
from phalanx.control.backends.need import Need, need_of
from phalanx.control.backends.requested import environment_file, lead_words
from phalanx.control.backends.slurm.directives import ScriptOptions, refuse_short
from phalanx.control.backends.slurm.facts import (
    expand,
    leaves_needed,
    longest_hours,
    topology,
)
from phalanx.control.backends.slurm.programs import SlurmCommands, SlurmError, require
from phalanx.control.backends.slurm.script import render
from phalanx.control.server.http.submission import RequestedWork

log = logging.getLogger("phalanx.slurm")
UNCLEAR = re.compile(r"""[\s%"'\\]""")


class Submitted(Struct, frozen=True, kw_only=True):
    """What became of a submission."""

    job: int
    run: str  # folder of the run
    output: str


class SlurmBackend:
    """Renders and submits; nothing is left behind where Slurm refuses."""

    def __init__(self, programs: SlurmCommands | None = None) -> None:
        self.programs = programs or SlurmCommands()

    def script(
        self, wanted: RequestedWork, *, comments: bool, server: str = "", policy: str = ""
    ) -> str:
        """The script of a job."""
        return render(self.options(wanted, server, policy), comments)

    def submit(self, wanted: RequestedWork, *, server: str = "", policy: str = "") -> Submitted:
        """Hand it to sbatch; SlurmError in Slurm's words, and what to change."""
        require("sbatch")
        options = self.options(wanted, server, policy)
        options.runs.mkdir(parents=True, exist_ok=True)
        before = {path.name for path in options.runs.iterdir()}
        said = self.programs.run("sbatch", "--parsable", text=render(options, comments=False))
        number = int(said.strip().partition(";")[0])
        return Submitted(
            job=number,
            run=str(options.runs / run_folder(number, before)),
            output=str(options.runs / f"slurm-{number}.out"),
        )

    def options(self, wanted: RequestedWork, server: str = "", policy: str = "") -> ScriptOptions:
        """What a script, or an allocation, is made of."""
        job = wanted.job
        backend = wanted.backend
        refuse_short(backend)
        _refuse_missing(backend)
        need = need_of(wanted)
        bad = quarantined()
        given = _excluded(backend.slurm.exclude)
        folder = wanted.folder or str(Path.cwd())
        runs = Path(folder, job.runs if job is not None else "runs", wanted.title)
        _refuse_unclear(wanted.title, runs)
        return ScriptOptions(
            name=wanted.title,
            backend=backend,
            need=need,
            python=sys.executable,
            folder=folder,
            runs=runs,
            job_toml=to_toml(job) if job is not None else "",
            argv=wanted.argv,
            environment=environment_file(backend) if job is None else "",
            slot_cpus=wanted.slot_cpus,
            longest_hours=self._longest_hours(backend, need),
            lead=lead_words(wanted),
            switches=self._switches(backend, need),
            segment=self._has_segment(),
            exclude=tuple(dict.fromkeys((*given, *bad))),
            quarantined=len(bad),
            server=server,
            policy=policy,
        )

    def _switches(self, backend: Backend, need: Need) -> int:
        if backend.slurm.switches:
            return max(0, backend.slurm.switches)
        with suppress(SlurmError):
            return leaves_needed(
                topology(self.programs.remembered("scontrol", "show", "topology")), need.nodes
            )
        return 0

    def _longest_hours(self, backend: Backend, need: Need) -> float:
        """What the partitions give at most, asked where nothing says how long; 0: no limit."""
        if need.hours:
            return 0.0
        with suppress(SlurmError):
            shown = self.programs.remembered("scontrol", "--oneliner", "show", "partition")
            return longest_hours(shown, backend.slurm.partition)
        return 0.0

    def _has_segment(self) -> bool:
        with suppress(SlurmError, ValueError):
            version = self.programs.run("sbatch", "--version", asks_controller=False).split()[-1]
            return tuple(map(int, version.split(".")[:2])) >= (23, 11)
        return True


def run_folder(number: int, there: Collection[str]) -> str:
    """The folder of a new job: one of its own, where Slurm gave the number before."""
    names = (f"slurm-{number}" + (f".{n}" if n > 1 else "") for n in itertools.count(1))
    return next(name for name in names if name not in there)


def latest_run(first: Path) -> Path:
    """The folder of the last job that had the number of this one."""
    there = {path.name for path in first.parent.iterdir()} if first.parent.exists() else ()
    latest, number = first, 2
    while first.name in there and f"{first.name}.{number}" in there:
        latest, number = first.with_name(f"{first.name}.{number}"), number + 1
    return latest


def _excluded(text: str) -> tuple[str, ...]:
    try:
        return expand(text)
    except SlurmError as error:
        rule, fix = f"is no list of nodes: {error}", 'e.g. "n[1-3,7],m5"'
        raise ConfigError("backend.slurm.exclude", f'"{text}"', rule, fix) from None


def _refuse_missing(backend: Backend) -> None:
    """An image in a file, where this machine sees its folder and no such file."""
    path = Path(backend.image.rpartition("@sha256:")[0])
    used = backend.slurm.container != "none" and path.is_absolute()
    if used and path.parent.is_dir() and not path.is_file():
        rule, fix = f"{path.parent} has no such file", "name one that is there"
        raise ConfigError("backend.image", f'"{backend.image}"', rule, fix)


def _refuse_unclear(name: str, runs: Path) -> None:
    """Slurm splits a line of #SBATCH at blanks, and replaces what follows a %."""
    for key, text in (("name", name), ("runs", str(runs))):
        if found := UNCLEAR.search(text):
            rule = f"has {json.dumps(found[0])}, which means something else in a line of #SBATCH"
            fix = f"nearest: {json.dumps(UNCLEAR.sub('-', text))}"
            raise ConfigError(key, json.dumps(text), rule, fix)


def memory_file() -> Path:
    """Where quarantined nodes of this Slurm are remembered between jobs."""
    conf = os.environ.get("SLURM_CONF", "default").replace("/", "_").strip("_")
    return Path.home() / ".phalanx" / "slurm" / f"{conf}.json"


def quarantined() -> tuple[str, ...]:
    """Nodes that earlier jobs found to do harm, until somebody repairs them."""
    with suppress(OSError, ValueError):
        found = json.loads(memory_file().read_text())
        if isinstance(found, list) and all(isinstance(name, str) for name in found):
            return tuple(found)
        log.warning("%s is damaged, and nobody is excluded by it", memory_file())
    return ()


def remember_quarantined(names: list[str]) -> None:
    """Add nodes to the memory, for the next submission's --exclude."""
    if not set(names) - set(quarantined()):
        return
    path = memory_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(sorted({*quarantined(), *names})))
    draft.rename(path)
