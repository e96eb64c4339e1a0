"""The whole suite in two processes side by side: tests that wait share the cores with others.

    python -m tests.run [OPTION OF PYTEST …]

Rooms that fork ranks stay in a process of their own kind: forking needs one that has one thread,
so that a pool of workers (pytest-xdist) would not do.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
# Clusters, servers and browsers, which wait for each other most of the time; the other half is the
# rest, whatever it is.
WAITING = ("control", "faults", "observe")
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed|warnings?)")


def halves() -> dict[str, list[str]]:
    """Arguments of pytest, by the name of the half."""
    return {
        "waiting": [str(TESTS / room) for room in WAITING],
        "others": [str(TESTS), *(f"--ignore={TESTS / room}" for room in WAITING)],
    }


def follow(name: str, process: subprocess.Popen[str], lines: list[str]) -> None:
    """Show what a half prints, as it comes."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        print(f"{name:>7}  {lines[-1]}", flush=True)


def counted(lines: list[str]) -> Counter[str]:
    """How many tests passed, failed and so on, from the last line that says so."""
    said = next((line for line in reversed(lines) if COUNT.search(line)), "")
    return Counter({word: int(number) for number, word in COUNT.findall(said)})


def main(options: list[str]) -> int:
    printed: dict[str, list[str]] = {}
    running = []
    for name, arguments in halves().items():
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "pytest", *arguments, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=TESTS.parent,
        )
        lines = printed.setdefault(name, [])
        shown = threading.Thread(target=follow, args=(name, process, lines))
        shown.start()
        running.append((process, shown))
    codes = []
    for process, shown in running:
        while True:
            try:
                codes.append(process.wait())
                break
            except KeyboardInterrupt:  # which both halves have got, too, and end of
                continue
        shown.join()
    total: Counter[str] = Counter()
    for lines in printed.values():
        total += counted(lines)
        print("\n".join(line for line in lines if line.startswith(("FAILED ", "ERROR "))))
    print(", ".join(f"{number:,} {word}" for word, number in total.items()))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
