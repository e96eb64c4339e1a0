"""A job's own Python: what does not import is named with its fix, and nothing imports it early."""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from phalanx.config import ConfigError, check, job_from_table
from phalanx.config.own_code import (
    MOST_CODE_BYTES,
    code_versions,
    digest,
    import_code,
    load_class,
    place_code,
    read_code,
)
from phalanx.config.schema import OwnCode


@pytest.fixture(autouse=True)
def no_traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


def refusal(text: str, name: str = "own_thing.py") -> str:
    Path(name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        import_code(OwnCode(files=(name,)))
    return str(caught.value)


def test_a_file_is_imported_once_and_its_classes_are_found(tmp_path: Path) -> None:
    Path("own_thing.py").write_text("class Thing(dict):\n    pass\n", encoding="utf-8")
    import_code(OwnCode(files=("own_thing.py",)))
    first = sys.modules["own_thing"]
    import_code(OwnCode(files=("own_thing.py",)))
    assert sys.modules["own_thing"] is first
    assert load_class("model.module", "own_thing:Thing", dict) is first.Thing


def test_a_file_may_lie_where_python_looks_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("own_near.py").write_text("x = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    import_code(OwnCode(files=("own_near.py",)))
    assert sys.modules["own_near"].x == 1


def test_what_does_not_import_is_named_with_its_line() -> None:
    said = refusal("import math\nx = math.nothing\n")
    assert (
        "code.files" in said and "has no attribute 'nothing'" in said and "own_thing.py:2" in said
    )
    assert "own_thing" not in sys.modules
    assert "own_thing.py:1" in refusal("def broken(:\n")


def test_names_that_cannot_be_imported_are_refused() -> None:
    assert "is the name of another module" in refusal("", "json.py")
    assert "is the name of another module" in refusal("", "wave.py")
    assert "is no module's name" in refusal("", "my-model.py")
    with pytest.raises(ConfigError, match=r"every node needs it"):
        import_code(OwnCode(files=("own_absent.py",)))


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("own_absent:Thing", 'code.files = ["own_absent.py"]'),
        ("collections:OrderedDic", 'did you mean "OrderedDict"'),
        ("collections:deque", "derived from builtins.dict"),
        ("collections:namedtuple", "derived from builtins.dict"),
        ("own-plugin", "no installed package"),
    ],
)
def test_a_class_that_is_not_there_is_refused_with_the_fix(reference: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_class("model.module", reference, dict)
    assert "model.module" in str(caught.value) and said in str(caught.value)


def test_an_installed_plug_in_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = metadata.EntryPoint("ordered", "collections:OrderedDict", "phalanx.plugins")
    broken = metadata.EntryPoint("broken", "own_absent:Thing", "phalanx.plugins")
    found = metadata.EntryPoints((entry, broken))
    monkeypatch.setattr(metadata, "entry_points", lambda group: found.select(group=group))
    assert load_class("model.module", "ordered", dict) is OrderedDict
    with pytest.raises(ConfigError, match="does not import: ModuleNotFoundError"):
        load_class("model.module", "broken", dict)
    with pytest.raises(ConfigError, match="there are: broken, ordered"):
        load_class("model.module", "other", dict)


def test_reading_and_checking_a_job_imports_nothing_of_it() -> None:
    """A server does both with jobs of everybody."""
    Path("own_thing.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    table = {
        "model": {"preset": "tiny", "module": "own_thing:Block", "loss": "own_thing:Loss"},
        "data": {"source": "module", "module": "own_thing:Corpus"},
        "optimizer": {"module": "own_thing:Lion"},
        "code": {"files": ["own_thing.py"], "callbacks": ["own_thing:Watch"]},
    }
    check(job_from_table(table), 1)
    assert "own_thing" not in sys.modules


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"model": {"module": "own thing"}}, "model.module"),
        ({"code": {"callbacks": [""]}}, "code.callbacks[0]"),
        ({"code": {"files": ["model.txt"]}}, "code.files[0]"),
        ({"data": {"source": "module"}}, "data.module"),
        ({"data": {"module": "own:Corpus"}}, "data.module"),
        ({"optimizer": {"module": "own:Lion", "kind": "muon"}}, "optimizer.module"),
    ],
)
def test_references_that_cannot_work_are_refused_by_their_key(
    table: dict[str, dict[str, object]], key: str
) -> None:
    table["model"] = {"preset": "tiny", **table.get("model", {})}
    with pytest.raises(ConfigError) as caught:
        check(job_from_table(table), 1)
    assert [found.key for found in caught.value.problems] == [key]


def test_the_version_of_a_file_is_that_of_what_was_imported() -> None:
    Path("own_thing.py").write_text("x = 1\n", encoding="utf-8")
    code = OwnCode(files=("own_thing.py",))
    import_code(code)
    Path("own_thing.py").write_text("x = 2\n", encoding="utf-8")
    assert code_versions(code) == {"own_thing.py": hashlib.sha256(b"x = 1\n").hexdigest()}


def test_files_that_came_with_a_job_are_imported_and_not_what_lies_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = OwnCode(files=("sub/own_sent.py",)), "x = 'sent'\r\n"
    monkeypatch.syspath_prepend(str(tmp_path / "sub"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "own_sent.py").write_bytes(text.encode())
    texts = read_code(code, tmp_path)
    assert texts == {"sub/own_sent.py": text}
    (tmp_path / "sub" / "own_sent.py").write_text("x = 'changed since'\n")
    for _ in range(2):  # as two ranks of a node do
        place_code(texts, tmp_path / "work")
    import_code(code)
    module = sys.modules["own_sent"]
    assert module.x == "sent"
    assert code_versions(code) == {"sub/own_sent.py": digest(text)}
    assert Path(str(module.__file__)).is_relative_to(tmp_path / "work" / "code")
    (placed,) = (tmp_path / "work" / "code").iterdir()
    assert [path.name for path in placed.iterdir() if path.is_file()] == ["own_sent.py"]


def test_a_file_never_leaves_the_folder_that_it_is_placed_in(tmp_path: Path) -> None:
    place_code({"../../own_up.py": "x = 1\n", "/own_root.py": "x = 2\n"}, tmp_path / "work")
    found = sorted(path.name for path in (tmp_path / "work").rglob("*.py"))
    assert found == ["own_root.py", "own_up.py"]
    assert not (tmp_path / "own_up.py").exists() and not Path("/own_root.py").exists()


def test_what_cannot_be_sent_with_a_job_is_refused_with_the_fix(tmp_path: Path) -> None:
    def said(*files: str) -> str:
        with pytest.raises(ConfigError) as caught:
            read_code(OwnCode(files=files), tmp_path)
        return str(caught.value)

    absent = said("own_absent.py")
    assert "No such file" in absent and "install its package" in absent
    (tmp_path / "own_large.py").write_bytes(b"#" * MOST_CODE_BYTES + "é".encode())
    assert f"larger than the {MOST_CODE_BYTES} bytes" in said("own_large.py")
    (tmp_path / "own_latin.py").write_bytes(b"x = '\xe9'\n")
    assert "no UTF-8 text" in said("own_latin.py")
    (tmp_path / "sub").mkdir()
    for folder in (tmp_path, tmp_path / "sub"):
        (folder / "own_twice.py").write_text("")
    assert "two files of one name" in said("own_twice.py", "sub/own_twice.py")
    names = [f"own_{i}.py" for i in range(33)]
    for name in names:
        (tmp_path / name).write_text("")
    assert "are 33 files" in said(*names)
