"""Programs of the site around a job on a node: a prolog before its workers, an epilog after them.

They run as the agent's user, never through a shell, and end with their time limit.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from phalanx.control.agent.safe_files import open_log, read_regular
from phalanx.control.host.plain_text import one_line

PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "HOME")  # of the agent's own environment
TAIL_BYTES = 400  # of its output, in the message that it failed


class Hook(Struct, frozen=True):
    """One program and its limit."""

    kind: str  # "prolog" or "epilog"
    argv: tuple[str, ...]
    seconds: float


async def run_hook(hook: Hook, output: Path, facts: dict[str, str]) -> str:
    """Run it; what went wrong, or "" where it ended with 0 (or there is none)."""
    if not hook.argv:
        return ""
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment |= facts | {"PHALANX_HOOK": hook.kind}
    try:
        with os.fdopen(open_log(output), "ab") as file:
            process = await asyncio.create_subprocess_exec(
                *hook.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                cwd=output.parent,
                start_new_session=True,
            )
    except OSError as error:
        return f"the {hook.kind} {hook.argv[0]} cannot be started: {error.strerror}"
    try:
        async with asyncio.timeout(hook.seconds):
            status = await process.wait()
    except TimeoutError:
        return f"the {hook.kind} {hook.argv[0]} did not end within {hook.seconds:g} s"
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # and whatever it left behind
        if process.returncode is None:
            await process.wait()
    if status == 0:
        return ""
    return f"the {hook.kind} {hook.argv[0]} ended with {status}: {_tail(output)}"


def _tail(output: Path) -> str:
    with suppress(OSError), read_regular(output) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        said = one_line(file.read().decode(errors="replace").strip())
        return said or "it printed nothing"
    return "its output is gone"


def told(
    job: int, generation: int, node: str, user: str, folder: Path, ranks: Sequence[int]
) -> dict[str, str]:
    """What a hook is told in its environment."""
    return {
        "PHALANX_JOB": str(job),
        "PHALANX_GENERATION": str(generation),
        "PHALANX_NODE": node,
        "PHALANX_USER": user,
        "PHALANX_FOLDER": str(folder),
        "PHALANX_RANKS": ",".join(str(rank) for rank in ranks),
    }
