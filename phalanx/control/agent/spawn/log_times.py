"""When workers' logs had which size: so that the end of a log can be asked for since a time.

Workers write their logs themselves, without a clock. The agent looks at the sizes now and then and
notes those that changed, beside a job's folder, which belongs to the job's user.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

MARK_SECONDS = 1.0  # between two marks of a log
MOST_BYTES = 512 << 10  # of a job's marks; then every second one goes
_MARK = struct.Struct("<IQd")  # worker, bytes, seconds since 1970
Mark = tuple[int, int, float]


def marks_path(folder: Path) -> Path:
    """Where the marks of a job's logs lie."""
    return folder.with_name(f"{folder.name}.times")


class LogTimes:
    """What is noted by one agent; ``look`` is called for every log, again and again."""

    def __init__(self) -> None:
        self._last: dict[Path, tuple[int, float]] = {}

    def look(self, path: Path, worker: int, now: float) -> None:
        """Notes the size of a log if it has changed."""
        size, marked = path.lstat().st_size, self._last.get(path)
        if marked is not None and (size == marked[0] or now - marked[1] < MARK_SECONDS):
            return
        if marked is None and size == _newest(read_marks(path.parent), worker):
            self._last[path] = size, now  # an agent that was restarted
            return
        self._last[path] = size, now
        with suppress(OSError):  # a full disk: the log goes on, and is read without this mark
            with marks_path(path.parent).open("ab") as file:
                if half := file.tell() % _MARK.size:  # a full disk took no more of the last one
                    file.truncate(file.tell() - half)
                file.write(_MARK.pack(worker, size, now))
                written = file.tell()
            if written > MOST_BYTES:
                _thin(path.parent)

    def forget_others(self, paths: Collection[Path]) -> None:
        """Logs that are gone are not looked at again."""
        self._last = {path: self._last[path] for path in paths if path in self._last}


def read_marks(folder: Path) -> list[Mark]:
    """What was noted of a job's logs, in the order of time; one that was half written is none."""
    try:
        data = marks_path(folder).read_bytes()
    except OSError:
        return []
    return list(_MARK.iter_unpack(data[: len(data) // _MARK.size * _MARK.size]))


def bytes_since(marks: list[Mark], worker: int, since: float, size: int | None = None) -> int:
    """How much of a log's end was written since a time; ``size`` None: it ended as last noted."""
    own = [(bytes_, at) for index, bytes_, at in marks if index == worker]
    if size is None:
        size = own[-1][0] if own else 0
    after = size
    for bytes_, at in reversed(own):
        if bytes_ > after:  # it was emptied meanwhile, and began anew
            return size
        if at <= since:
            return size - bytes_
        after = bytes_
    return size


def _newest(marks: list[Mark], worker: int) -> int | None:
    return next((bytes_ for index, bytes_, _ in reversed(marks) if index == worker), None)


def _thin(folder: Path) -> None:
    path = marks_path(folder)
    kept = [_MARK.pack(*mark) for mark in read_marks(folder)[::-2][::-1]]
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_bytes(b"".join(kept))
    draft.rename(path)
