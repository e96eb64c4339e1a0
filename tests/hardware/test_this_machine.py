"""What this machine has, read from the files of a played kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.hardware import available_memory

GIB = 1 << 30


def played(root: Path, *, limit: str = "", used: int = 0, cache: int = 0) -> int:
    """Memory left on a machine with 8 GiB free, in a control group with a limit."""
    proc, group = root / "proc", root / "cgroup" / "job"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 * GIB >> 10} kB\n")
    (proc / "self/cgroup").write_text("0::/job\n")
    group.mkdir(parents=True)
    if limit:
        (group / "memory.max").write_text(limit + "\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    return available_memory(proc, root / "cgroup")


@pytest.mark.parametrize(
    ("limit", "used", "cache", "left"),
    [
        ("", 0, 0, 8 * GIB),  # no control group that says anything
        ("max", GIB, 0, 8 * GIB),
        (str(4 * GIB), 3 * GIB, 0, GIB),
        (str(4 * GIB), 3 * GIB, 2 * GIB, 3 * GIB),  # files that are only cached make room
        (str(100 * GIB), GIB, 0, 8 * GIB),
        (str(GIB), 2 * GIB, 0, 0),
    ],
)
def test_memory_left_is_the_least_that_anybody_allows(
    tmp_path: Path, limit: str, used: int, cache: int, left: int
) -> None:
    assert played(tmp_path, limit=limit, used=used, cache=cache) == left
