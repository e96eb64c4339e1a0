"""What the ranks of a node were doing when their gang made no more steps.

Every rank that can is asked for the stacks of its threads and its flight recorder; of one that
does not answer, the kernel tells what it can. All of it is kept in the job's folder on the node.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec import structs

from phalanx.cluster.protocol.messages import InspectGang, Seen
from phalanx.control.agent.jobs.local_job import LocalJob
from phalanx.control.agent.safe_files import Owner, make_folder, open_regular, replace_at

ANSWER_SECONDS = 0.7
FILES = ("status", "wchan", "syscall", "stack")  # of a process, below /proc
STANDS_STILL = -1
FILE_KINDS = ("stacks", "process")  # of a rank, that people read
GENERATION = re.compile(r"generation-(\d{1,9})")
OF_RANK = re.compile(rf"rank-(\d{{1,7}})\.({'|'.join(FILE_KINDS)})")
MOST_SHOWN_BYTES = 64 << 10  # of one file
MOST_ANSWER_BYTES = 2 << 20

log = logging.getLogger("phalanx.agent")


class Evidence:
    """Looks at the workers of a node's jobs; ``send`` takes what was seen to the server."""

    def __init__(self, jobs: dict[int, LocalJob], send: Callable[[Seen], None]) -> None:
        self._jobs, self._send = jobs, send
        self._tasks: set[asyncio.Task[None]] = set()

    def look(self, order: InspectGang, node: int) -> None:
        """Look at a gang's ranks here, and say what was seen."""
        job = self._jobs.get(order.job)
        if job is not None and job.generation == order.generation:
            task = asyncio.ensure_future(self._look(job, order, node))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _look(self, job: LocalJob, order: InspectGang, node: int) -> None:
        folder = job.folder / "evidence" / f"generation-{order.generation}"
        opened = -1
        try:
            os.close(make_folder(folder.parent))
            opened = make_folder(folder, 0o700, job.owner)  # ranks write what they see themselves
        except OSError as error:
            log.error("job %d: no evidence can be kept: %s", job.number, error)
        try:
            ranks = await self._ask(job, order, folder, opened)
        finally:
            if opened >= 0:
                os.close(opened)
        log.warning("job %d makes no steps: see %s", job.number, folder)
        seen = Seen(
            node=node,
            job=job.number,
            generation=order.generation,
            ranks=ranks,
            folder=str(folder),
        )
        self._send(seen)

    async def _ask(
        self, job: LocalJob, order: InspectGang, folder: Path, opened: int
    ) -> dict[int, int]:
        """Have every rank here say what it does; how far each of them is."""
        processes = list(job.processes.values())
        for process in processes:
            process.looked = None
            process.say(structs.replace(order, folder=str(folder)))
        waited = 0.0
        while waited < ANSWER_SECONDS and not all(process.looked for process in processes):
            await asyncio.sleep(0.02)
            waited += 0.02
        ranks: dict[int, int] = {}
        for process in processes:
            if opened >= 0:
                write_process(opened, process.rank, process.pid, job.owner)
            found = process.looked
            # Whoever waits in a collective has come further than whom it waits for.
            ranks[process.rank] = 2 * found.step + found.waiting if found else STANDS_STILL
        return ranks


def seen_text(job: Path, generation: int, rank: int) -> bytes:
    """What was kept of ranks (-1: all) of a generation; 0: of the last one that was looked at."""
    kept = sorted(
        (int(named[1]), path)
        for path in (job / "evidence").glob("generation-*")
        if (named := GENERATION.fullmatch(path.name)) and generation in (0, int(named[1]))
    )
    if not kept:
        return b""
    number, folder = kept[-1]
    text, owner = f"generation {number}\n".encode(), folder.lstat().st_uid
    files = sorted(
        (int(named[1]), FILE_KINDS.index(named[2]), path)
        for path in folder.iterdir()
        if (named := OF_RANK.fullmatch(path.name)) and rank in (-1, int(named[1]))
    )
    for of, kind, path in files:
        with suppress(OSError):
            file = open_regular(path, owner=owner)
            try:
                data = os.read(file, MOST_SHOWN_BYTES)
            finally:
                os.close(file)
            text += f"\n== rank {of}: {FILE_KINDS[kind]}\n".encode() + data.rstrip() + b"\n"
        if len(text) > MOST_ANSWER_BYTES:
            return text + b"\n... more is left out: ask for one rank\n"
    return text


def write_process(folder: int, rank: int, pid: int, owner: Owner | None) -> None:
    """What the kernel knows of a process, also of one that is stopped."""
    lines = []
    for name in FILES:
        with suppress(OSError):
            lines.append(f"== {name}\n{Path(f'/proc/{pid}/{name}').read_text(errors='replace')}")
    with suppress(OSError):
        text = "\n".join(lines) or f"process {pid} is gone\n"
        replace_at(folder, f"rank-{rank}.process", text.encode(), owner)
