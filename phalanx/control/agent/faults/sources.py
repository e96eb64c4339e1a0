"""Runs all sources of a node and hands their facts to the agent, each once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from phalanx.cluster.protocol.messages import DeviceError, LocalFact, NodeNotice
from phalanx.control.agent.config import FaultOptions
from phalanx.control.agent.faults.gpu_watch import GpuMonitor, NvmlEvents
from phalanx.control.agent.faults.host import CgroupMonitor, MountMonitor, NoticeSource
from phalanx.control.agent.faults.kernel_log import KernelLog, OomKill, pci_address
from phalanx.control.agent.faults.links import LinkMonitor
from phalanx.hardware import count_cuda

SAME_SECONDS = 60.0  # a fault that is said again within this time is the same one
GPU_SECONDS = 30.0
SOONER_NS = 1_000_000_000  # a notice that comes this much nearer is another one
TAIL_SECONDS = 0.2  # between looks at a log that is a plain file

log = logging.getLogger("phalanx.agent")


class FaultSources:
    """``fact`` takes what is found; without ``links`` network cards are left out."""

    def __init__(
        self, options: FaultOptions, fact: Callable[[LocalFact], None], *, links: bool
    ) -> None:
        self.options = options
        self._fact, self._links = fact, links
        self._kernel: KernelLog | None = None
        self._nvml: NvmlEvents | None = None
        self._group = CgroupMonitor(Path(options.cgroup))
        self._tasks: list[asyncio.Task[None]] = []
        self._said: dict[tuple[str, int, int, str], float] = {}
        self._notice: NodeNotice | None = None  # as it was told
        self.rails: Callable[[], Mapping[str, int]] = dict  # of ports by name; none: one a port

    async def start(self) -> None:
        """Begin to listen; what is not there is left out."""
        self._open_kernel_log()
        poll = self.options.poll_seconds
        if count_cuda():
            loop = asyncio.get_running_loop()
            self._nvml = NvmlEvents(lambda f: loop.call_soon_threadsafe(self.report, f))
            if not self._nvml.start():
                log.info("no NVML events (pip install nvidia-ml-py): GPUs are looked at instead")
            self._often(GPU_SECONDS, (await asyncio.to_thread(GpuMonitor)).look)
        if self._links:
            self._often(poll, LinkMonitor(Path(self.options.sysfs), self.rails).look)
        self._often(poll, MountMonitor(self.options.mounts).look)
        self._often(poll, self._group.look)
        source = NoticeSource(
            file=self.options.notice_file,
            command=self.options.notice_command,
            url=self.options.notice_url,
        )
        if source != NoticeSource():
            self._often(poll, source.look)

    def close(self) -> None:
        """Listen no more."""
        for task in self._tasks:
            task.cancel()
        if self._nvml is not None:
            self._nvml.close()
        if self._kernel is not None:
            asyncio.get_running_loop().remove_reader(self._kernel.file)
            self._kernel.close()
            self._kernel = None

    def ran_out_of_memory(self, pid: int) -> str:
        """Why a process was killed, where it was for its memory; "" if it was not."""
        if self._kernel is not None:
            self._kernel.read()  # the kernel wrote it before the process ended
            if text := self._kernel.killed.pop(pid, ""):
                return text
        return "the node's control group ran out of memory" if self._group.kills() else ""

    def report(self, seen: DeviceError | NodeNotice | OomKill) -> None:
        """Hand it on, unless it was just said."""
        if isinstance(seen, OomKill):
            return  # told with the end of the process, if it is one of ours
        if isinstance(seen, NodeNotice):
            told = self._notice
            if told is None or seen.deadline_ns < told.deadline_ns - SOONER_NS:
                log.warning("the site takes this node away: %s", seen)
                self._fact(seen)
                self._notice = seen
            return
        now = time.monotonic()
        key = seen.cause, seen.gpu, seen.rail, seen.detail.partition(":")[0]
        if now - self._said.get(key, -SAME_SECONDS) >= SAME_SECONDS:
            self._said[key] = now
            log.error("fault: %s", seen)
            self._fact(seen)

    def _open_kernel_log(self) -> None:
        if not self.options.kernel_log:
            return
        try:
            kernel = KernelLog(Path(self.options.kernel_log), _gpu_addresses(), self.report)
        except OSError as error:
            log.warning("no kernel log: %s", error)
            return
        self._kernel = kernel
        try:
            asyncio.get_running_loop().add_reader(kernel.file, kernel.read)
        except OSError:  # a plain file cannot be waited for
            self._often(TAIL_SECONDS, kernel.read, in_thread=False)

    def _often(self, seconds: float, look: Callable[[], object], *, in_thread: bool = True) -> None:
        """Look again and again, and report what is found; a look that fails is not the last."""

        async def work() -> None:
            while True:
                await asyncio.sleep(seconds)
                try:
                    found = await asyncio.to_thread(look) if in_thread else look()
                except Exception as error:
                    log.warning("a source of faults: %s", error)
                    continue
                for each in found if isinstance(found, list) else ():
                    self.report(each)

        self._tasks.append(asyncio.ensure_future(work()))


def _gpu_addresses() -> dict[str, int]:
    """The index of each GPU by its PCI address, as the kernel orders them."""
    folder = Path("/proc/driver/nvidia/gpus")
    if not folder.is_dir():
        return {}
    return {pci_address(path.name): index for index, path in enumerate(sorted(folder.iterdir()))}
