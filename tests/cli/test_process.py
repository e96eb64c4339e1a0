"""What the command line does to its own process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """\
import atexit, gc
from phalanx.cli.process import collection_paused
atexit.register(lambda: print(gc.get_freeze_count()))
with collection_paused():
    import json
assert gc.get_freeze_count()
"""


def test_what_an_import_made_is_collected_at_the_end() -> None:
    """Else triton's bindings print every object of theirs as a leak after each command."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.stdout == "0\n", done.stderr
