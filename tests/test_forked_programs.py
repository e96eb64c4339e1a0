"""A program that a zygote runs itself is to its job what one that is executed would be."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from phalanx.control.agent.spawn.not_started import CannotStartError
from phalanx.testing.fork_server import VARIABLE
from tests.forked_programs import FORKED_PYTHON, execute_or_run, python

SHOWS = """
import atexit, os, signal, sys, threading, time
import beside
atexit.register(lambda: print("at the end"))
print(__name__, sys.argv, os.getcwd(), beside.WORD, os.environ["GIVEN"])
print(signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL, "torch" in sys.modules)
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
"""


def run(folder: Path, *argv: str) -> tuple[int, str]:
    """Exit code and output of what a zygote would do with a command."""
    out = folder / "out"
    sys.stdout.flush()
    if not (pid := os.fork()):
        try:
            file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1), os.dup2(file, 2)
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
            os.environ["GIVEN"] = "word"
            os.chdir(folder)
            execute_or_run(argv)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), out.read_text()


def test_a_script_has_its_arguments_folder_and_end(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'imported'")
    (tmp_path / "shows.py").write_text(SHOWS)
    with tempfile.TemporaryDirectory() as ours:
        code, told = run(tmp_path, FORKED_PYTHON, "shows.py", "one", "-m")
        assert Path(ours).exists()  # what this process removes at its end is not the program's
    first = f"__main__ ['shows.py', 'one', '-m'] {tmp_path} imported word"
    assert told.splitlines() == [first, "True True", "thread", "at the end"] and code == 0


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('gone')", 1, "gone\n"),
        ("import sys; sys.exit()", 0, ""),
        ("raise ValueError('bad')", 1, "ValueError: bad"),
    ],
)
def test_how_it_ends_is_told_by_its_exit_code(
    text: str, code: int, told: str, tmp_path: Path
) -> None:
    (tmp_path / "ends.py").write_text(text)
    for words in (("ends.py",), ("-m", "ends")):
        found, said = run(tmp_path, FORKED_PYTHON, *words)
        assert found == code and told in said


def test_every_other_command_is_executed(tmp_path: Path) -> None:
    assert run(tmp_path, "sh", "-c", "echo $GIVEN; exit 3") == (3, "word\n")
    with pytest.raises(CannotStartError, match="cannot start /no/such"):
        execute_or_run(("/no/such",))


def test_without_a_fork_server_programs_have_an_interpreter_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "somewhere")
    assert python() == FORKED_PYTHON
    monkeypatch.delenv(VARIABLE)
    assert python() == sys.executable
