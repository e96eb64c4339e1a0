"""``python -m docs.generator`` rewrites stale pages; with ``--check`` it only names them.

And, without it, what ``--help`` prints (``tests/cli/help.txt``) and the demo's job among the
examples: a wheel has it inside the package.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from docs.generator import help_text
from docs.generator.pages import stale, write

ROOT = Path(__file__).parents[2]
PACKED_DEMO, DEMO = ROOT / "phalanx/cli/train/demo.toml", ROOT / "examples/demo.toml"


def main() -> int:
    """The exit code: 1 where a page is stale and only the check was asked for."""
    check = "--check" in sys.argv[1:]
    for name in stale() if check else write():
        print(f"{'stale' if check else 'written'}: docs/reference/{name}")
    if not check:
        help_text.FILE.write_text("\n".join(help_text.lines()) + "\n", encoding="utf-8")
        shutil.copyfile(PACKED_DEMO, DEMO)
    return 1 if check and stale() else 0


if __name__ == "__main__":
    sys.exit(main())
