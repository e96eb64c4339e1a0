"""What checks of settings are decided on: files, programs, and what only the process itself knows.

Everything is read through a ``Reader``, so that a recorded folder can stand for a machine. What
cannot be read raises ``ReadError``, which makes a check's verdict "unknown".
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from importlib import metadata
from pathlib import Path
from xml.etree.ElementTree import Element

import msgspec
from msgspec import Struct

from phalanx.config import ConfigError
from phalanx.doctor.storage import unescape
from phalanx.doctor.system import KernelClock, read_clock
from phalanx.hardware.probe import nvidia_smi
from phalanx.hardware.probe.host import parse_memory
from phalanx.hardware.probe.reader import NotThereError, Reader, ReadError, listed, read

PROCESS_FILE = "process.json"  # of a recorded folder
# Variables that checks look at; no others are kept, they may hold secrets.
VARIABLES = re.compile(
    r"(OMP|MKL|OPENBLAS|NCCL|GLOO|TORCH_NCCL|UCX)_\w+|CUDA_(MPS|VISIBLE|DEVICE)\w*"
    r"|KUBERNETES_SERVICE_HOST|container|SLURM_CPUS_ON_NODE"
)
PACKAGES = re.compile(r"torch|nvidia-(nccl|cudnn|cublas|cuda-runtime)(-cu\d+)?")
# As torch's own metadata names what it was built with: "nvidia-nccl-cu12==2.27.5; platform_…".
PIN = re.compile(r"(nvidia-[\w-]+) ?\(?==([\w.+]+)\)?")


class ProcessFacts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What no file of the machine says."""

    environment: dict[str, str] = {}
    packages: dict[str, str] = {}  # versions that are installed, by name
    wanted: dict[str, str] = {}  # versions of them that torch was built with
    cpus: tuple[int, ...] = ()  # that the process may use
    root: bool = False
    clock: KernelClock | None = None
    folder: str = "/"  # where it would write
    addresses: tuple[str, ...] | None = None  # of the host's own name; None: it has none


def read_process(folder: Path, environment: Mapping[str, str]) -> ProcessFacts:
    """This process, with the environment that it was started with."""
    packages = {
        name: each.version
        for each in metadata.distributions()
        if (name := str(each.metadata["Name"]).lower()) and PACKAGES.fullmatch(name)
    }
    return ProcessFacts(
        environment={name: v for name, v in environment.items() if VARIABLES.fullmatch(name)},
        packages=packages,
        wanted=_wanted_libraries(),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        root=os.geteuid() == 0,
        clock=read_clock(),
        folder=str(folder),
        addresses=_own_addresses(),
    )


def _wanted_libraries() -> dict[str, str]:
    """Of torch's pins those that are looked at; none where it is not there, or built otherwise."""
    try:
        pins = [PIN.match(each) for each in metadata.requires("torch") or ()]
    except metadata.PackageNotFoundError:
        return {}
    return {pin[1]: pin[2] for pin in pins if pin and PACKAGES.fullmatch(pin[1])}


def _own_addresses() -> tuple[str, ...] | None:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return None
    return tuple(dict.fromkeys(str(each[4][0]) for each in found))


def recorded_process(folder: Path) -> ProcessFacts:
    """The process that a folder was recorded by; nothing is known where it was not."""
    try:
        return msgspec.json.decode((folder / PROCESS_FILE).read_bytes(), type=ProcessFacts)
    except FileNotFoundError:
        return ProcessFacts()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        path = str(folder / PROCESS_FILE)
        raise ConfigError("hardware", path, str(error), "record the machine again") from None


def one_of(text: str, known: tuple[str, ...], where: str) -> str:
    """A word that is understood; ReadError for any other."""
    if text not in known:
        raise ReadError(where, f"not understood: {text[:60]!r}")
    return text


class Mount(Struct, frozen=True):
    """A line of /proc/self/mountinfo."""

    device: str  # "254:0"
    folder: str
    kind: str
    source: str
    options: tuple[str, ...]


class NodeEvidence:
    """A machine's files and programs, each read once."""

    def __init__(self, reader: Reader, process: ProcessFacts) -> None:
        self.reader, self.process = reader, process
        self._texts: dict[str, str] = {}
        self._programs: dict[tuple[str, ...], Future[str]] = {}
        self._pool = ThreadPoolExecutor(max_workers=8)

    def start(self, commands: Iterable[tuple[str, ...]]) -> None:
        """Start programs side by side, before what they print is wanted."""
        for command in commands:
            if command not in self._programs:
                self._programs[command] = self._pool.submit(self.reader.run, *command)

    def run(self, *command: str) -> str:
        """What a program prints."""
        self.start([command])
        return self._programs[command].result()

    def text(self, path: str) -> str:
        """What a file has."""
        if path not in self._texts:
            self._texts[path] = self.reader.text(path)
        return self._texts[path]

    def number(self, path: str) -> int:
        """A file's number; ReadError where it is none."""
        try:
            return int(self.text(path).split()[0], 0)
        except (ValueError, IndexError):
            raise ReadError(path, f"no number: {self.text(path)[:40]!r}") from None

    def choice(self, path: str) -> str:
        """The word in brackets: "always [madvise] never"."""
        match = re.search(r"\[(\S+)\]", self.text(path))
        if match is None:
            raise ReadError(path, f"nothing is chosen in {self.text(path)[:60]!r}")
        return match[1]

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        """What a folder has; ReadError where that is nothing."""
        names = self.reader.names(folder, pattern)
        if not names:
            raise NotThereError(f"{folder}/{pattern}")
        return names

    def has(self, folder: str, pattern: str) -> bool:
        """Whether a folder has something of the name."""
        return bool(listed(self.reader, folder, pattern))

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        try:
            self.text(path)
        except ReadError:
            return False
        return True

    def optional(self, path: str) -> str:
        """What a file has; "" where it cannot be read."""
        return read(self.reader, path)

    @property
    def memory_bytes(self) -> int:
        """Of the machine."""
        found = parse_memory(self.text("/proc/meminfo"))
        if not found:
            raise ReadError("/proc/meminfo", "has no MemTotal")
        return found

    @property
    def has_gpus(self) -> bool:
        """Whether an NVIDIA GPU shows at all, by its device or its driver."""
        return self.has("/dev", "nvidia[0-9]*") or bool(self.optional(nvidia_smi.DRIVER))

    @property
    def has_rdma(self) -> bool:
        """Whether a card with RDMA shows."""
        return self.has("/sys/class/infiniband", "*")

    @cached_property
    def smi(self) -> Element:
        """The whole of ``nvidia-smi -q -x``."""
        return nvidia_smi.parse_root(self.run(*nvidia_smi.QUERY))

    @cached_property
    def gpus(self) -> list[Element]:
        """Each GPU of it; ReadError where there is none in it."""
        found = self.smi.findall("gpu")
        if not found:
            raise ReadError("nvidia-smi -q -x", "lists no GPU")
        return found

    @cached_property
    def mounts(self) -> list[Mount]:
        """All mounts, in order: the last one of a folder is what is seen."""
        mounts = []
        for line in self.text("/proc/self/mountinfo").splitlines():
            head, _, tail = line.partition(" - ")
            fields, rest = head.split(), tail.split()
            if len(fields) >= 6 and len(rest) >= 2:
                options = (*fields[5].split(","), *(rest[2].split(",") if len(rest) > 2 else ()))
                mounts.append(Mount(fields[2], unescape(fields[4]), rest[0], rest[1], options))
        if not mounts:
            raise ReadError("/proc/self/mountinfo", "has no mount")
        return mounts

    def mount_of(self, folder: str) -> Mount:
        """The mount that a folder lies on."""
        inside = [
            mount
            for mount in self.mounts
            if folder == mount.folder or folder.startswith(f"{mount.folder.rstrip('/')}/")
        ]
        if not inside:
            raise ReadError("/proc/self/mountinfo", f"has no mount of {folder}")
        longest = max(len(mount.folder) for mount in inside)
        return [mount for mount in inside if len(mount.folder) == longest][-1]

    def close(self) -> None:
        """Wait for no program that was started and not wanted."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> NodeEvidence:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):
            self.close()
