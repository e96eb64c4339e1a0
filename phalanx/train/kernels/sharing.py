"""Has compilers use this node's folder of kernels, and keeps their work for the next start."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.config import Job
from phalanx.train.callback import Callback, TrainingRun
from phalanx.train.kernels.place import key_of, versions
from phalanx.train.kernels.store import KernelStore
from phalanx.train.kernels.workspace import KernelWorkspace, find_base

if TYPE_CHECKING:
    from phalanx.parallel import Mesh
    from phalanx.train.trainer import StepOutcome

SHARED_AFTER = (3, 30)  # steps of a start: by then most is compiled
BESIDE_RUNS = ".kernels"
VARIABLES = {  # and the place inside
    "TORCHINDUCTOR_CACHE_DIR": "",
    "TRITON_CACHE_DIR": "triton",
    "PHALANX_MATMULS": "matmuls",  # phalanx/model/cuda/cublaslt.py, which needs CUDA
}

log = logging.getLogger(__name__)

_open: KernelWorkspace | None = None  # of this process, for all its generations


class KernelSharing(Callback):
    """From the store to this node before the first step; what is new goes back soon after it."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        self.job, self.mesh = job, mesh
        self._workspace: KernelWorkspace | None = None
        self._sharing: threading.Thread | None = None

    def begin(self, run: TrainingRun) -> None:
        if _open is not None or not own_folders():
            self._workspace = workspace(self.job, self.mesh)

    def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
        if run.step + 1 - run.first_step in SHARED_AFTER and self._shares():
            self._join()
            self._sharing = threading.Thread(target=self._share, name="kernels", daemon=True)
            self._sharing.start()

    def end(self, run: TrainingRun, error: BaseException | None) -> None:
        self._join()
        if error is None and self._shares():
            self._share()

    def _shares(self) -> bool:
        """One rank a stage: the others compile the same."""
        axes = self.mesh.coordinates.items()
        first = all(index == 0 for axis, index in axes if axis != "pipeline")
        return self._workspace is not None and first

    def _share(self) -> None:
        assert self._workspace is not None
        try:
            if size := self._workspace.share():
                log.info("kernels: %.1f MB kept for the next start", size / 1e6)
        except OSError as error:  # a full disk, above all
            log.warning("what was compiled is not kept for the next start: %s", error)

    def _join(self) -> None:
        if self._sharing is not None:
            self._sharing.join()
            self._sharing = None


def kernel_sharing(job: Job, mesh: Mesh) -> list[Callback]:
    """What a run attaches that compiles anything, unless its job keeps nothing."""
    compiles = mesh.device.type == "cuda" or job.train.compile == "on"
    return [KernelSharing(job, mesh)] if compiles and job.train.kernel_cache != "off" else []


def own_folders() -> list[str]:
    """Variables by which somebody said where kernels go."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch itself names its usual folder in the environment.
    return [name for name in VARIABLES if os.environ.get(name) not in (None, default_cache_dir())]


def workspace(job: Job, mesh: Mesh) -> KernelWorkspace | None:
    """This process's folder of kernels, filled when it is asked for first; None: it has none."""
    global _open
    if _open is None:
        began = time.monotonic()
        found = versions(mesh.device)
        limit = int(job.train.kernel_cache_gb * 1e9)
        opened = KernelWorkspace(
            find_base(), key_of(found), KernelStore(store_root(job), key_of(found), limit)
        )
        try:
            opened.store.open()
            count = opened.open()
        except OSError as error:
            log.warning("kernels are compiled anew at every start: %s", error)
            return None
        for name, inside in VARIABLES.items():
            os.environ[name] = str(opened.folder / inside)
        _leave_headers_alone()
        seconds = time.monotonic() - began
        log.info("kernels: %d files of earlier starts, in %.1f s", count, seconds)
        _open = opened
    return _open


def _leave_headers_alone() -> None:
    """C++ kernels are named by the place of precompiled headers, which differs from node to node,
    and torch keeps those elsewhere."""
    from torch._inductor import config

    with suppress(AttributeError):  # of a torch that has none
        config.cpp_cache_precompile_headers = False


def store_root(job: Job) -> Path:
    """Where bundles of all versions lie."""
    folder = job.train.kernel_cache
    if folder == "auto":
        return Path(job.runs).absolute() / BESIDE_RUNS
    return Path(os.path.expandvars(folder)).expanduser().absolute()
