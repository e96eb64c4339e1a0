"""A second start of a job compiles nothing, here and on a node that replaces this one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COUNTED = """
import json, os
from pathlib import Path
from phalanx.train.callback import Callback

class Counted(Callback):
    def end(self, run, error):
        from torch._dynamo.utils import counters
        text = json.dumps({name: dict(found) for name, found in counters.items()})
        Path(os.environ["COUNTED"]).write_text(text)
"""
JOB = """
name = "warm"
model = { dim = 16, layers = 2, heads = 2, ffn = 32, vocab = 64 }
data = { sequence = 16 }
precision = { compute = "float32" }
train = { steps = 4, global_batch = 2, device = "cpu", compile = "on" }
checkpoint = { at_end = false }
code = { files = ["counted.py"], callbacks = ["counted:Counted"] }
"""
COMPILER = """#!/bin/sh
case " $* " in *" -o "*) echo "$*" >> "$COMPILED";; esac
exec {real} "$@"
"""


class Starts:
    """Starts of one job, whose calls of the C++ compiler are counted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "counted.py").write_text(COUNTED)
        (folder / "job.toml").write_text(JOB)
        (folder / "bin").mkdir()
        real = shutil.which("g++")
        assert real is not None
        (folder / "bin/g++").write_text(COMPILER.format(real=real))
        (folder / "bin/g++").chmod(0o755)

    def start(self, node: str) -> tuple[dict[str, Any], list[str]]:
        """The compiler's counters, and what the C++ compiler was called with."""
        (self.folder / node).mkdir(exist_ok=True)
        counted, compiled = self.folder / "counted.json", self.folder / "compiled"
        compiled.write_text("")
        own = {"TMPDIR": str(self.folder / node), "COUNTED": str(counted)}
        own |= {"COMPILED": str(compiled), "OMP_NUM_THREADS": "1"}
        own |= {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        command = [sys.executable, "-m", "phalanx", "train", "job.toml"]
        subprocess.run(command, cwd=self.folder, env={**os.environ, **own}, check=True)
        return json.loads(counted.read_text()), compiled.read_text().splitlines()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_only_the_first_start_compiles(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    counts, compiled = starts.start("node-1")
    assert counts["inductor"]["fxgraph_cache_miss"] and compiled
    for node in ("node-1", "node-2"):
        counts, compiled = starts.start(node)
        assert "fxgraph_cache_miss" not in counts["inductor"], node
        assert counts["inductor"]["fxgraph_cache_hit"] == 2, node
        assert counts["aot_autograd"] == {"total": 1, "autograd_cache_hit": 1, "ok": 1}, node
        assert compiled == [], node
    for bundle in tmp_path.glob("runs/.kernels/*/*.tar.gz"):  # half-written by whatever
        bundle.write_bytes(bundle.read_bytes()[: bundle.stat().st_size // 2])
    counts, compiled = starts.start("node-1")
    assert counts["inductor"]["fxgraph_cache_miss"] and compiled
