"""One writer a folder: two at once would mix their files under the same names."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.data.errors import DataError

# A file system that locks no folders (NFS) or nothing at all: nobody can be seen there.
LOCKS_NONE = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Refuse where another process writes into a folder; one that was killed holds nothing."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            rule = "another process is writing into it"
            raise DataError("out", folder, rule, "wait for it, or choose another folder") from None
        except OSError as error:
            if error.errno not in LOCKS_NONE:
                raise
        yield
    finally:
        os.close(descriptor)
