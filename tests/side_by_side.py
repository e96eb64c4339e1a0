"""A plugin of pytest that runs the files of tests side by side, each in a forked process.

This process collects all tests, and so imports everything once; a child then starts in
milliseconds, has one thread (as tests that fork ranks need) and leaves nothing behind for the next
file. A child writes its reports to a file; they are replayed here when it ends, so that pytest's
summary, its slowest tests and `-x` are those of one process.

A few tests that failed beside others may be tried once more, alone, at the end: one that passes
then is unsteady. It fails nothing, and the summary names it with what went wrong at first.
"""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import pytest

from tests.huge_pages import use_huge_pages
from tests.idle_cores import IdleCores

POLL_SECONDS = 0.05  # for a file that has ended
END = {"end": True}  # what a child writes last
Reports = list[pytest.TestReport]  # of one test: its setup, call and teardown


@dataclass
class File:
    """The tests of one file, and the process that runs them."""

    path: Path
    items: list[pytest.Item]
    folder: Path  # of its temporary files
    reports: Path = field(init=False)

    def __post_init__(self) -> None:
        self.reports = self.folder.with_suffix(".reports")


class SideBySide:
    """Runs the files that take longest first, ``processes`` at a time.

    While those mostly wait, and so leave cores idle, up to ``most`` run. Where no more than
    ``most_again`` tests fail, they are tried again.
    """

    def __init__(
        self, processes: int, seconds: dict[str, float], most: int = 0, most_again: int = 0
    ) -> None:
        self.processes, self.most, self.most_again = processes, most, most_again
        self.unsteady: dict[str, str] = {}  # what went wrong at first, by test
        self._set_aside: dict[str, Reports] = {}  # of tests that failed, until all have run
        self.expected = seconds  # by the path of a file from the root
        self.measured: dict[str, float] = {}
        self.cpu: dict[str, float] = {}  # seconds, with all processes that its tests waited for

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed:
            return None  # pytest's own loop runs no test then
        with tempfile.TemporaryDirectory(prefix="phx-") as root:  # short, as names of sockets are
            failed: list[Path] = []
            try:
                self._run(session, self._files(session, Path(root)), failed)
                self._try_again(session, Path(root) / "again")
            finally:
                for reports in self._set_aside.values():  # interrupted: they have failed once
                    _tell(session, reports)
                if failed:
                    kept = Path(tempfile.mkdtemp(prefix="phx-failed-"))
                    for folder in failed:
                        shutil.move(folder, kept)
                    session.config.get_terminal_writer().line(f"\nfiles of what failed: {kept}")
        return True

    def _files(self, session: pytest.Session, root: Path) -> list[File]:
        """Longest first; the next one to run stands at the end."""
        by_path: dict[Path, list[pytest.Item]] = {}
        for item in session.items:
            by_path.setdefault(item.path, []).append(item)
        files = [
            File(path, items, root / str(number))
            for number, (path, items) in enumerate(by_path.items())
        ]
        start = session.config.rootpath
        return sorted(
            files, key=lambda file: self.expected.get(str(file.path.relative_to(start)), 0.0)
        )

    def _run(self, session: pytest.Session, waiting: list[File], failed: list[Path]) -> None:
        """Run all; ``failed`` becomes the folders of files with tests that failed."""
        running: dict[int, File] = {}
        idle = IdleCores()
        gc.collect()
        gc.freeze()  # what all children share is not looked at, and so not copied, in each
        use_huge_pages()
        try:
            while waiting or running:
                while waiting and not session.shouldfail:
                    few = len(running) < self.processes
                    if not few and not (len(running) < self.most and idle.left()):
                        break
                    file = waiting.pop()
                    running[_fork(session, file)] = file
                if session.shouldfail and not running:
                    raise session.Failed(session.shouldfail)
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid not in running:
                    if not pid:
                        time.sleep(POLL_SECONDS)
                    continue
                file = running.pop(pid)
                name = str(file.path.relative_to(session.config.rootpath))
                self.cpu[name] = usage.ru_utime + usage.ru_stime
                passed = self._replay(session, file, os.waitstatus_to_exitcode(status))
                if not passed and file.folder.exists():
                    failed.append(file.folder)
                else:
                    shutil.rmtree(file.folder, ignore_errors=True)
        finally:  # the terminal's interrupt has reached them too, and they tear down
            for pid in running:
                os.waitpid(pid, 0)

    def _replay(self, session: pytest.Session, file: File, code: int) -> bool:
        """Tell pytest of the reports of a file as if the tests had run here.

        Whether all passed; the reports of those that did not may be set aside.
        """
        name = str(file.path.relative_to(session.config.rootpath))
        by_test = self._reports(session, file, code)
        self.measured[name] = sum(each.duration for told in by_test.values() for each in told)
        passed = True
        for test, reports in by_test.items():
            if any(report.failed for report in reports):
                passed = False
                if self.most_again and not session.config.option.maxfail:
                    self._set_aside[test] = reports
                    continue
            _tell(session, reports)
        return passed

    def _reports(self, session: pytest.Session, file: File, code: int) -> dict[str, Reports]:
        """What a file's process reported, by test; warnings are passed on at once."""
        hook = session.config.hook
        by_test: dict[str, Reports] = {}
        whole = False
        for entry in _entries(file.reports):
            whole = entry == END
            if "warning" in entry:
                hook.pytest_warning_recorded.call_historic(kwargs=_warning(entry["warning"]))
            elif not whole:
                report = hook.pytest_report_from_serializable(config=session.config, data=entry)
                by_test.setdefault(report.nodeid, []).append(report)
        if not whole:
            ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            output = file.reports.with_suffix(".err")
            said = output.read_text() if output.exists() else ""
            words = f"the process of its file ended ({ending}) before its end\n{said}"
            for item in file.items:
                reports = by_test.setdefault(item.nodeid, [])
                if not reports or reports[-1].when != "teardown":
                    reports.append(_lost(item, words))
        return by_test

    def _try_again(self, session: pytest.Session, folder: Path) -> None:
        """Whatever failed beside others, if it is little, is run alone, each in its own process."""
        again = len(self._set_aside) <= self.most_again
        items = {item.nodeid: item for item in session.items}
        folder.mkdir()
        for number, (test, first) in enumerate(list(self._set_aside.items())):
            reports = first
            if again:
                file = File(items[test].path, [items[test]], folder / str(number))
                _, status = os.waitpid(_fork(session, file), 0)
                second = self._reports(session, file, os.waitstatus_to_exitcode(status))[test]
                if not any(report.failed for report in second):
                    reports = second
                    self.unsteady[test] = "\n".join(
                        report.longreprtext for report in first if report.failed
                    )
            del self._set_aside[test]
            _tell(session, reports)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Names the tests that failed at first, with what went wrong."""
        if not self.unsteady:
            return
        terminalreporter.section("unsteady: failed beside others, passed alone", yellow=True)
        for test, problem in self.unsteady.items():
            terminalreporter.line(f"{problem}\nUNSTEADY {test}")


def _tell(session: pytest.Session, reports: Reports) -> None:
    """Tell pytest what became of one test."""
    hook, first = session.config.hook, reports[0]
    if first.when == "setup":
        hook.pytest_runtest_logstart(nodeid=first.nodeid, location=first.location)
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    if reports[-1].when == "teardown":
        hook.pytest_runtest_logfinish(nodeid=first.nodeid, location=first.location)


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """What a child wrote; the last one may be cut off."""
    with path.open("rb") as stream, suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(stream)


def _lost(item: pytest.Item, words: str) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", words, "call")


def _fork(session: pytest.Session, file: File) -> int:
    """Start the process of a file."""
    file.folder.mkdir(mode=0o700)
    file.reports.touch()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _child(session, file)
        code = 0
    except BaseException:
        file.reports.with_suffix(".err").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _child(session: pytest.Session, file: File) -> None:
    sys.modules["__main__"] = ModuleType("__main__")  # or spawned processes would import the runner
    config = session.config
    config._tmp_path_factory._basetemp = file.folder  # type: ignore[attr-defined]
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are shared with the other children
    capture.start_global_capturing()
    reporter = config.pluginmanager.getplugin("terminalreporter")
    with Path(os.devnull).open("w") as nowhere, file.reports.open("wb") as out:
        reporter._tw._file = nowhere
        config.pluginmanager.register(recorder := _Recorder(config, out))
        recorder.starts = True
        try:
            for item, following in zip_longest(file.items, file.items[1:]):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldfail:
                    break
        finally:  # where it was cut off
            session._setupstate.teardown_exact(None)
        recorder.write(END)


class _Recorder:
    """Writes what happens in a child."""

    def __init__(self, config: pytest.Config, out: BinaryIO) -> None:
        self._config, self._out = config, out
        self.starts = False

    def write(self, entry: dict[str, Any]) -> None:
        pickle.dump(entry, self._out)
        self._out.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self.write(hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        if not self.starts:  # pytest tells a new plugin of all that there were
            return
        message = warning_message
        words = [str(message.message), message.category.__name__, message.filename, message.lineno]
        self.write({"warning": [words, when, nodeid, location]})


def _warning(entry: list[Any]) -> dict[str, Any]:
    (words, category, filename, line), when, nodeid, location = entry
    kind = type(category, (Warning,), {})
    message = warnings.WarningMessage(kind(words), kind, filename, line)
    return {"warning_message": message, "when": when, "nodeid": nodeid, "location": location}
