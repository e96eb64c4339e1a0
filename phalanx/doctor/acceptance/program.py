"""A burn-in in a process of its own, as agents start it.

``python -m phalanx.doctor.acceptance.program REQUEST`` prints progress, and what was measured as
one line of JSON; with ``--setup FOLDER [RECORDED]`` only versions and settings. It ends early, with
what it has, when its parent ends or it is told to (SIGTERM, SIGINT).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from phalanx.train.rank.threads import keep_single_threaded

if __name__ == "__main__":
    keep_single_threaded()  # before numpy and torch are loaded: loads are forked

import msgspec
from msgspec import Struct

from phalanx.doctor.acceptance.report import AcceptanceReport, AcceptanceRequest
from phalanx.doctor.setup import NodeSetup, read_setup

NICENESS = 5  # an agent on the same cores still tells that it lives
MARK = "phalanx-acceptance "  # before the line that is the result


class BurnInResult(Struct, frozen=True, kw_only=True):
    """What the program prints at its end."""

    report: AcceptanceReport
    setup: NodeSetup


def find_measured(output: bytes) -> BurnInResult | None:
    """The result in the program's output; None where it did not come to it."""
    for line in reversed(output.split(b"\n")):
        if line.startswith(MARK.encode()):
            return msgspec.json.decode(line[len(MARK) :], type=BurnInResult)
    return None


def measure(request: AcceptanceRequest) -> BurnInResult:
    """Load the machine, then read how it is set up: reading makes threads, loads are forked."""
    from phalanx.doctor.acceptance.burn_in import burn_in

    report = burn_in(request, _print)
    return BurnInResult(report=report, setup=read_setup(Path(request.folder)))


def main(argv: list[str]) -> None:
    """One of the two things that it does."""
    if argv[0] == "--setup":
        recorded = Path(argv[2]) if len(argv) > 2 else None
        _print(msgspec.json.encode(read_setup(Path(argv[1]), recorded)).decode())
        return
    os.nice(NICENESS)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    measured = measure(msgspec.json.decode(argv[0], type=AcceptanceRequest))
    _print(MARK + msgspec.json.encode(measured).decode())


def _print(line: str) -> None:
    try:
        sys.stdout.write(f"{line}\n")  # its output is its result
        sys.stdout.flush()
    except BrokenPipeError:  # whoever wanted to know is gone
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
