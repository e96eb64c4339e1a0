"""Has the doctor look at this node: at the agent's start, and when the core asks for it.

The doctor works in a child of the zygote, which has torch already; its report stays in the
agent's state folder (``doctor.json``) for people.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from phalanx.cluster.causes import Cause
from phalanx.cluster.node import Node
from phalanx.cluster.protocol.commands import Check, Command
from phalanx.cluster.protocol.messages import THIS_NODE, CheckResult
from phalanx.control.agent.spawn.zygote_client import ZygoteClient, ZygoteError
from phalanx.control.wire.zygote_messages import Ended, Spawn
from phalanx.doctor import CheckOptions, NodeReport, check_node

KEY = "doctor"  # the zygote's name of the child
LIMIT_SECONDS = 120.0  # a device that hangs fails its check
REPORT, INJECT = "doctor.json", "doctor.inject"

log = logging.getLogger("phalanx.agent")


class NodeChecker:
    """Runs one check at a time and says what came of it."""

    def __init__(self, node: Node, state: Path, zygote: ZygoteClient) -> None:
        self._node, self._state, self._zygote = node, state, zygote
        self._ends: asyncio.Queue[Ended] = asyncio.Queue()
        self._one = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def later(
        self, command: Command, skew_ns: int, done: Callable[[CheckResult], None]
    ) -> asyncio.Task[None]:
        """Run a check that the core asked for, and say so when it is done."""
        assert isinstance(command.body, Check)
        depth = command.body.check

        async def work() -> None:
            found = await self.check(depth, -skew_ns / 1e9)
            done(msgspec.structs.replace(found, command=command.sequence))

        task = asyncio.ensure_future(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def check(
        self, depth: Literal["quick", "full"], skew_seconds: float | None = None
    ) -> CheckResult:
        """Examine the node now."""
        async with self._one:
            problem = await self._run(depth, skew_seconds)
            report = self._read() if not problem else None
        if report is None:
            problem = problem or "the check left no report"
            return CheckResult(
                node=THIS_NODE, check=depth, passed=False, cause=Cause.FAILED_CHECK, detail=problem
            )
        for finding in report.findings:
            if finding.verdict in ("warn", "fail"):
                level = logging.ERROR if finding.verdict == "fail" else logging.WARNING
                log.log(level, "check: %s; %s", finding, finding.suggestion)
        return CheckResult(
            node=THIS_NODE,
            check=depth,
            passed=report.passed,
            cause=report.cause,
            detail=report.detail,
        )

    async def _run(self, depth: str, skew_seconds: float | None) -> str:
        """What kept the doctor from its work; "" when it has written its report."""
        report = self._state / REPORT
        with suppress(OSError):
            report.unlink(missing_ok=True)
        try:
            options = CheckOptions(
                node=self._node.name,
                folder=self._state,
                quick=depth == "quick",
                gpus=self._expected_gpus(),
                skew_seconds=skew_seconds,
                inject=self._injected(),
            )
            order = Spawn(
                key=KEY,
                role="doctor",
                log=str(self._state / "doctor.log"),
                argv=(msgspec.json.encode(options, enc_hook=str).decode(), str(report)),
            )
            child = await self._zygote.spawn(order)
            async with asyncio.timeout(LIMIT_SECONDS):
                while (end := await self._ends.get()).pid != child.pid:
                    pass
        except TimeoutError:
            self._zygote.signal(KEY, signal.SIGKILL)
            return f"the check did not end within {LIMIT_SECONDS:.0f} s"
        except (ZygoteError, OSError) as error:  # a node without descriptors, say
            return str(error)
        return "" if end.status == 0 else f"the check ended with {end.status}"

    def _expected_gpus(self) -> int:
        """Nodes of a laptop offer ranks as GPUs: only real ones can be missing."""
        from phalanx.hardware import count_cuda

        return self._node.gpus if count_cuda() else 0

    def _injected(self) -> tuple[str, ...]:
        """Checks that somebody with access to the state folder wants to see fail."""
        with suppress(OSError):
            return tuple((self._state / INJECT).read_text().split())
        return ()

    def _read(self) -> NodeReport | None:
        with suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode((self._state / REPORT).read_bytes(), type=NodeReport)
        return None

    def ended(self, end: Ended) -> None:
        """The zygote says that a child is gone."""
        if end.key == KEY:
            self._ends.put_nowait(end)


def examine(options: str, report: str) -> None:
    """In the child: look, and write down what was found."""
    who = msgspec.json.decode(options, type=CheckOptions, dec_hook=lambda kind, value: kind(value))
    found = check_node(who)
    draft = Path(report).with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(found))
    draft.rename(report)
