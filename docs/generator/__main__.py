"""``python -m docs.generator`` rewrites stale pages; with ``--check`` it only names them."""

from __future__ import annotations

import sys

from docs.generator.pages import stale, write


def main() -> int:
    """The exit code: 1 where a page is stale and only the check was asked for."""
    check = "--check" in sys.argv[1:]
    for name in stale() if check else write():
        print(f"{'stale' if check else 'written'}: docs/reference/{name}")
    return 1 if check and stale() else 0


if __name__ == "__main__":
    sys.exit(main())
