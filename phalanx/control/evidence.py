"""What the ranks of a node were doing when their gang made no more steps.

Every rank that can is asked for the stacks of its threads and its flight recorder; of one that
does not answer, the kernel tells what it can. All of it is kept in the job's folder on the node.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from phalanx.control.hands import Here
from phalanx.control.wire import LookAt, Seen
from phalanx.control.worker_link import Look

ANSWER_SECONDS = 0.7
FILES = ("status", "wchan", "syscall", "stack")  # of a process, below /proc
STANDS_STILL = -1

log = logging.getLogger("phalanx.agent")


class Evidence:
    """Looks at the workers of a node's jobs; ``send`` takes what was seen to the server."""

    def __init__(self, jobs: dict[int, Here], send: Callable[[Seen], None]) -> None:
        self._jobs, self._send = jobs, send
        self._tasks: set[asyncio.Task[None]] = set()

    def look(self, order: LookAt, node: int) -> None:
        """Look at a gang's ranks here, and say what was seen."""
        here = self._jobs.get(order.job)
        if here is not None and here.generation == order.generation:
            task = asyncio.ensure_future(self._look(here, order, node))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _look(self, here: Here, order: LookAt, node: int) -> None:
        folder = here.folder / "evidence" / f"generation-{order.generation}"
        folder.mkdir(parents=True, exist_ok=True)
        if here.work is not None and here.work.user and os.getuid() == 0:
            with suppress(KeyError, OSError):
                entry = pwd.getpwnam(here.work.user)
                os.chown(folder, entry.pw_uid, entry.pw_gid)
        hands = list(here.hands.values())
        for hand in hands:
            hand.looked = None
            hand.say(Look(job=here.job, generation=order.generation, folder=str(folder)))
        waited = 0.0
        while waited < ANSWER_SECONDS and not all(hand.looked for hand in hands):
            await asyncio.sleep(0.02)
            waited += 0.02
        ranks: dict[int, int] = {}
        for hand in hands:
            write_process(folder / f"rank-{hand.rank}.process", hand.pid)
            found = hand.looked
            # Whoever waits in a collective has come further than whom it waits for.
            ranks[hand.rank] = 2 * found.step + found.waiting if found else STANDS_STILL
        log.warning("job %d makes no steps: see %s", here.job, folder)
        seen = Seen(
            node=node,
            job=here.job,
            generation=order.generation,
            ranks=ranks,
            folder=str(folder),
        )
        self._send(seen)


def write_process(path: Path, pid: int) -> None:
    """What the kernel knows of a process, also of one that is stopped."""
    found = []
    for name in FILES:
        with suppress(OSError):
            found.append(f"== {name}\n{Path(f'/proc/{pid}/{name}').read_text(errors='replace')}")
    with suppress(OSError):
        path.write_text("\n".join(found) or f"process {pid} is gone\n")
