"""The whole suite, its files side by side: tests that wait share the cores with others.

    python -m tests.run [--processes N] [--store] [--strict] [--soaks] [OPTION OF PYTEST …]

`--store` writes down how long each file took, from which the next run knows what to start first.
The seconds of CPU that it tells at its end hardly depend on what else the machine does.

Up to three tests that failed are tried once more, alone: of what passes then the summary says that
it is unsteady, and how it failed. That is a fault to mend; with `--strict` it fails the run.

`--soaks` adds the commit's share of the soak tests (`tests/soak_share.py`), `--soak-share N`
another one.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from phalanx.config import job_from_table, resolve
from phalanx.testing.fork_server import fork_server
from phalanx.train.rank.threads import require_single_thread
from tests.forked_programs import let_zygotes_run_programs
from tests.huge_pages import use_huge_pages
from tests.shared_folder import VARIABLE
from tests.side_by_side import SideBySide
from tests.soak_seconds import stored_soaks
from tests.soak_share import SoakShare

ROOT = Path(__file__).parent.parent
SECONDS = Path(__file__).parent / "seconds.toml"
MOST_AGAIN = 3  # more than so many failures are no accident
STORED_FROM = 3  # seconds: in which order shorter ones run makes no difference
HEAD = "# How long files of tests take, in seconds: `python -m tests.run --store` writes it.\n"


def stored_seconds() -> dict[str, float]:
    """By the path of a file from the root."""
    return tomllib.loads(SECONDS.read_text())


def store(seconds: dict[str, float]) -> None:
    longest = sorted(seconds.items(), key=lambda entry: (-round(entry[1]), entry[0]))
    rows = [f'"{path}" = {round(took)}\n' for path, took in longest if took >= STORED_FROM]
    SECONDS.write_text(HEAD + "".join(rows))


def cpu_by_room(by_file: dict[str, float], total: float) -> str:
    """Where the CPU time went; the rest is what files share: collection and zygotes."""
    rooms: Counter[str] = Counter()
    for path, seconds in by_file.items():
        parts = Path(path).parts
        rooms[parts[1] if len(parts) > 2 else parts[0]] += seconds
    named = ", ".join(f"{room} {seconds:,.0f}" for room, seconds in rooms.most_common())
    return f"{total:,.0f} s of CPU: {named}, shared {total - rooms.total():,.0f}"


def cpu_of_files(by_file: dict[str, float], count: int = 15) -> str:
    """Which files used most; of the ranks of clusters only the total knows."""
    most = sorted(by_file.items(), key=lambda entry: -entry[1])[:count]
    return "\n".join(f"{seconds:6.1f} s of CPU {path}" for path, seconds in most if seconds >= 1)


def own_cpu_seconds() -> float:
    """Of this process and of all that it waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def warm_up() -> None:
    """Train for two steps here: what torch prepares on first use, ranks of all tests inherit.

    Not where there are GPUs: autograd would start threads for them, which no fork survives.
    """
    import torch

    from phalanx.train.parity.prove import train

    if torch.cuda.device_count():
        return
    table = {
        "model": {"dim": 16, "layers": 2, "heads": 2, "ffn": 32, "vocab": 64},
        "data": {"sequence": 16, "prefetch": 0},
        "precision": {"compute": "float32"},
        "train": {"steps": 2, "global_batch": 2, "device": "cpu"},
    }
    train(resolve(job_from_table(table), 1))
    require_single_thread()
    os.register_at_fork(after_in_child=remake_thread_pool)


def remake_thread_pool() -> None:
    """Torch's own, in a forked child: threads that are the first to need it break it together."""
    import torch

    torch.set_num_threads(torch.get_num_threads())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=(os.cpu_count() or 1) + 2)
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--soaks", action="store_true")
    parser.add_argument("--soak-share", type=int, metavar="N")
    own, options = parser.parse_known_args(arguments)
    os.chdir(ROOT)
    # Hundreds of processes are started: without stored bytecode each would compile Phalanx again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    began = time.monotonic()
    again = 0 if own.strict else MOST_AGAIN
    expected, plugins = Counter[str](stored_seconds()), list[object]()
    if own.soak_share or (own.soaks and not own.store):
        share = SoakShare(stored_soaks(), own.soak_share)
        expected.update(share.by_file)
        plugins.append(share)
    plugin = SideBySide(own.processes, dict(expected), 2 * own.processes, again)
    let_zygotes_run_programs()
    warm_up()
    use_huge_pages()  # the fork server has them too
    with tempfile.TemporaryDirectory(prefix="phx-") as folder, fork_server(Path(folder)):
        os.environ[VARIABLE] = folder
        code = pytest.main(options, plugins=[plugin, *plugins])
    if own.store:
        store(plugin.measured)
    spent = sum(plugin.measured.values())
    print(
        f"{spent:,.0f} s of tests in {time.monotonic() - began:,.0f} s, "
        f"{own.processes} files at a time, more where cores were idle"
    )
    print(cpu_of_files(plugin.cpu))
    print(cpu_by_room(plugin.cpu, own_cpu_seconds()))
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
