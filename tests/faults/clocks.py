"""Clocks of single processes that somebody sets, by hours and while they run."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define PIDS (1 << 22)
static int (*real)(clockid_t, struct timespec *);
static int64_t *seconds_by_pid;

__attribute__((constructor)) static void open_table(void) {
    real = dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("SET_CLOCKS");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(0, PIDS * sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) seconds_by_pid = found;
    close(file);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int result = real(id, now);
    if (!result && id == CLOCK_REALTIME && seconds_by_pid)
        now->tv_sec += seconds_by_pid[getpid() % PIDS];
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}
"""
PIDS = 1 << 22


class SetClocks:
    """Processes that are started from now on have clocks that can be set."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        compiler = shutil.which("gcc")
        if compiler is None:
            pytest.skip("there is no C compiler to make clocks with")
        source, library, table = (folder / f"clocks{end}" for end in (".c", ".so", ".table"))
        source.write_text(SOURCE)
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)
        table.touch()
        os.truncate(table, 8 * PIDS)
        with table.open("r+b") as file:
            self._table = mmap.mmap(file.fileno(), 8 * PIDS)
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("SET_CLOCKS", str(table))

    def set(self, pids: Iterable[int], seconds: int) -> None:
        """Set these processes' clocks so far ahead of the right time."""
        for pid in pids:
            struct.pack_into("=q", self._table, 8 * (pid % PIDS), seconds)
