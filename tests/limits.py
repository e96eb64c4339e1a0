"""Limits that stand in for exhausted resources."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def file_size_limit(count: int) -> Iterator[None]:
    """No file of this process can grow beyond ``count`` bytes, which fails much like a full disk.

    Only around what is tested: the test runner itself may be writing to a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
