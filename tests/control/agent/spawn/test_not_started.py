"""Why a program cannot begin, in words that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.control.agent.spawn.not_started import CannotStartError, enter, execute


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (b"#!/no/such/interpreter -u\n", 0o755, "its first line names /no/such/interpreter"),
        (b"#!/no/such/sh\r\necho x\r\n", 0o755, "its lines end as on Windows"),
        (b"echo x\n", 0o755, "has no first line like #!/bin/sh"),
        (b"#!\n", 0o755, "has no first line like #!/bin/sh"),
        (b"#!/bin/sh\n", 0o644, "it may not be executed (chmod +x"),
        (b"\x7fELF of another machine", 0o755, "Exec format error"),
    ],
)
def test_a_file_that_cannot_be_executed_is_described(
    tmp_path: Path, content: bytes, mode: int, said: str
) -> None:
    program = tmp_path / "program"
    program.write_bytes(content)
    program.chmod(mode)
    with pytest.raises(CannotStartError) as raised:
        execute((str(program), "word"))
    assert str(raised.value).startswith(f"cannot start {program}: ") and said in str(raised.value)


def test_what_is_no_file_is_described(tmp_path: Path) -> None:
    for program, said in (
        (str(tmp_path), "it is a folder"),
        (str(tmp_path / "nothing"), "No such file or directory"),
        ("no-such-program-anywhere", "No such file or directory"),
        ("sh\0", "embedded null"),
    ):
        with pytest.raises(CannotStartError, match=said):
            execute((program,))
    with pytest.raises(CannotStartError, match="cannot enter the folder"):
        enter(str(tmp_path / "nowhere"))


def test_a_script_on_the_path_is_found_as_the_system_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tool").write_text("#!/no/such/python\n")
    (tmp_path / "tool").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotStartError, match="names /no/such/python"):
        execute(("tool",))
