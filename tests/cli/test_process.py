"""What a command does to its own process."""

from __future__ import annotations

import subprocess
import sys

IMPORT = """
from phalanx.cli.process import collection_paused
with collection_paused():
    import triton._C.libtriton
"""


def test_nothing_is_said_of_leaks_at_the_end_of_a_process_that_imported_fast() -> None:
    """Triton's extension counts at the interpreter's end what was never collected."""
    ended = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
