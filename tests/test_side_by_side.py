"""Files that run side by side are told of as if one process had run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.run import cpu_by_room

FILES = {
    "test_a.py": """
import os, threading, warnings, pytest
@pytest.fixture(scope="module")
def thing(tmp_path_factory):
    yield tmp_path_factory.mktemp("thing")
    print("torn down")
    open("torn-down", "w").close()
def test_good(thing):
    assert thing.exists() and threading.active_count() == 1
    warnings.warn("mind this")
def test_bad(thing):
    print("said before")
    assert 1 == 2
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
""",
    "test_b.py": """
import os, signal
def test_first(): pass
def test_killed(): os.kill(os.getpid(), signal.SIGKILL)
def test_after(): pass
""",
    "test_c.py": """
import os, warnings
def test_own_process(): assert os.getpid() != int(os.environ["STARTER"])
def test_warned(): warnings.warn("this too")
""",
}
START = """
import json, os, sys, pytest
from tests.side_by_side import SideBySide
os.chdir(sys.argv[1])
os.environ["STARTER"] = str(os.getpid())
again = int(os.environ.get("AGAIN", "0"))
plugin = SideBySide(int(sys.argv[2]), {"test_c.py": 9.0, "test_b.py": 1.0}, most_again=again)
code = pytest.main(["--rootdir=.", "-p", "no:cacheprovider", *sys.argv[3:]], plugins=[plugin])
print("measured", list(plugin.measured))
print("cpu", json.dumps(plugin.cpu))
sys.exit(code)
"""


def run(folder: Path, processes: int, *options: str, again: int = 0) -> tuple[int, str]:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-c", START, str(folder), str(processes), *options]
    (temporary := folder / "tmp").mkdir()
    done = subprocess.run(
        command,
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"TMPDIR": str(temporary), "AGAIN": str(again)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_reports_of_all_files_come_to_one_summary(tmp_path: Path) -> None:
    code, output = run(tmp_path, 2, "-rs", "--durations=3")
    assert code == 1
    assert "3 failed, 4 passed, 1 skipped, 2 warnings" in output
    assert "assert 1 == 2" in output and "said before" in output
    assert "mind this" in output and "not here" in output
    assert "slowest 3 durations" in output
    assert (tmp_path / "torn-down").exists()


def test_what_a_killed_process_did_not_run_has_failed(tmp_path: Path) -> None:
    code, output = run(tmp_path, 2, "test_b.py")
    assert code == 1 and "2 failed, 1 passed" in output
    for name in ("test_killed", "test_after"):
        assert f"FAILED test_b.py::{name} - the process of its file ended (SIGKILL)" in output


def test_a_test_that_ends_its_process_as_if_all_were_well_has_failed(tmp_path: Path) -> None:
    (tmp_path / "test_d.py").write_text("import os\ndef test_leaves(): os._exit(0)\n")
    code, output = run(tmp_path, 2, "test_d.py")
    assert code == 1 and "1 failed" in output
    assert "FAILED test_d.py::test_leaves - the process of its file ended (exit code 0)" in output


def test_the_longest_file_is_started_first(tmp_path: Path) -> None:
    _, output = run(tmp_path, 1)
    assert "2 warnings" in output  # whatever runs after it
    assert "measured ['test_c.py', 'test_b.py', 'test_a.py']" in output


def test_after_the_first_failure_no_file_is_started_where_that_is_wanted(tmp_path: Path) -> None:
    code, output = run(tmp_path, 1, "-x")
    assert code == 1
    assert "measured ['test_c.py', 'test_b.py']" in output and "stopping after 2 failures" in output


def test_the_folders_of_what_failed_are_kept(tmp_path: Path) -> None:
    _, output = run(tmp_path, 2, "test_a.py", "test_c.py", "-x")
    (line,) = [line for line in output.splitlines() if line.startswith("files of what failed: ")]
    kept = Path(line.removeprefix("files of what failed: "))
    assert [path.name for path in kept.glob("*/*") if path.is_dir()] == ["thing0"]


def test_the_cpu_time_of_a_file_counts_the_processes_it_waited_for(tmp_path: Path) -> None:
    (tmp_path / "test_busy.py").write_text(
        "import subprocess, sys, time\n"
        "BUSY = 'import time\\nwhile time.process_time() < 0.5: pass'\n"
        "def test_busy(): subprocess.run([sys.executable, '-c', BUSY], check=True)\n"
    )
    (tmp_path / "test_idle.py").write_text("import time\ndef test_idle(): time.sleep(0.5)\n")
    code, output = run(tmp_path, 2, "test_busy.py", "test_idle.py")
    assert code == 0
    (line,) = [line for line in output.splitlines() if line.startswith("cpu ")]
    seconds = json.loads(line.removeprefix("cpu "))
    assert seconds["test_busy.py"] >= 0.5 > seconds["test_idle.py"]


UNSTEADY = """
from pathlib import Path
def test_steady(): pass
def test_unsteady():
    print("said at first")
    tried = Path("tried")
    if not tried.exists():
        tried.touch()
        raise AssertionError("the first time")
"""


def test_what_passes_alone_is_named_and_does_not_fail_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_d.py").write_text(UNSTEADY)
    code, output = run(tmp_path, 2, "test_d.py", "test_c.py", again=1)
    assert code == 0 and "4 passed" in output
    assert "UNSTEADY test_d.py::test_unsteady" in output and "the first time" in output


def test_what_fails_twice_has_failed_and_is_counted_once(tmp_path: Path) -> None:
    code, output = run(tmp_path, 2, "test_a.py", "test_c.py", again=3)
    assert code == 1 and "1 failed, 3 passed, 1 skipped" in output
    assert "assert 1 == 2" in output and "UNSTEADY" not in output


def test_many_failures_are_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "test_d.py").write_text(UNSTEADY)
    code, output = run(tmp_path, 2, again=3)
    assert code == 1 and "4 failed" in output and "UNSTEADY" not in output
    assert (tmp_path / "tried").exists()


def test_without_a_second_try_an_unsteady_test_has_failed(tmp_path: Path) -> None:
    (tmp_path / "test_d.py").write_text(UNSTEADY)
    code, output = run(tmp_path, 2, "test_d.py")
    assert code == 1 and "1 failed, 1 passed" in output


def test_cpu_time_is_told_by_room() -> None:
    seconds = {"tests/a/test_x.py": 3.0, "tests/b/c/test_y.py": 8.0, "tests/test_z.py": 1.0}
    told = cpu_by_room(seconds | {"tests/a/d/test_x.py": 4.0}, 20.0)
    assert told == "20 s of CPU: b 8, a 7, tests 1, shared 4"


def test_what_failed_before_an_interrupt_has_failed(tmp_path: Path) -> None:
    """It was to be tried again at the end, which never came."""
    (tmp_path / "test_d.py").write_text(
        "import os, signal, time\n"
        "def test_interrupts():\n"
        "    while not os.path.exists('torn-down'): time.sleep(0.05)\n"
        "    time.sleep(1)\n"
        "    os.kill(int(os.environ['STARTER']), signal.SIGINT)\n"
    )
    code, output = run(tmp_path, 4, again=3)
    assert code == 2 and "KeyboardInterrupt" in output
    assert "FAILED test_a.py::test_bad - assert 1 == 2" in output
