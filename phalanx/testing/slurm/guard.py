"""Ends a private Slurm when the process that owned it is gone, killed or not.

Its daemons leave their parent behind, so the kernel does not tell them.
"""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from pathlib import Path

from phalanx.testing.slurm.sandbox import Sandbox, SandboxError


def main() -> None:
    """The owner holds the other end of our input; it closes with it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    with suppress(SandboxError):  # it has been ended in order
        Sandbox.at(Path(sys.argv[1])).down()


if __name__ == "__main__":
    main()
