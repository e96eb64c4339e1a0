"""Python that a job brings along. Ranks import it; whoever only describes a job reads its text."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from phalanx.config.errors import ConfigError, did_you_mean
from phalanx.config.schema import OwnCode

ENTRY_POINTS = "phalanx.plugins"  # the group in which an installed package names its classes

# Every node gets the texts with each order to form: what is larger belongs into a package.
MOST_CODE_FILES, MOST_CODE_BYTES = 32, 128 << 10
KEY = "code.files"

T = TypeVar("T")
_versions: dict[str, str] = {}  # of what was imported, by path
_placed: dict[str, Path] = {}  # files that came with the job, by their names in it


def import_code(code: OwnCode) -> None:
    """Import a job's files, each once in a process; ``ConfigError`` names the first that fails."""
    for file in code.files:
        _import_file(file)


def code_versions(code: OwnCode) -> dict[str, str]:
    """SHA-256 of every file that a job brings along, as this process imported it."""
    return {file: _versions[str(_path(file).absolute())] for file in code.files}


def digest(text: str) -> str:
    """SHA-256 of a file's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_code(code: OwnCode, folder: Path) -> dict[str, str]:
    """The texts of a job's files, by their names, to be sent with it. It runs in ``folder``.

    ConfigError names the one that is missing, is no text, or is too large.
    """
    texts: dict[str, str] = {}
    for file in code.files:
        try:
            with (folder / file).open("rb") as opened:
                data = opened.read(MOST_CODE_BYTES + 1)
            texts[file] = data.decode(
                errors="strict" if len(data) <= MOST_CODE_BYTES else "replace"
            )
        except OSError as error:
            rule = f"cannot be sent with the job: {error.strerror} in {folder}"
            fix = "give its path from the folder that the job runs in, or install its package"
            raise ConfigError(KEY, f'"{file}"', rule, fix) from None
        except UnicodeDecodeError:
            raise ConfigError(KEY, f'"{file}"', "is no UTF-8 text", "save it as UTF-8") from None
    if rule := code_problem(texts):
        fix = "install them as a package on every node, and leave out code.files"
        raise ConfigError(KEY, ", ".join(texts), rule, fix)
    return texts


def code_problem(texts: Mapping[str, str]) -> str:
    """Why files are not sent with a job; "": nothing is wrong with them."""
    if len(texts) > MOST_CODE_FILES:
        return f"are {len(texts)} files: at most {MOST_CODE_FILES} are sent with a job"
    size = sum(len(text.encode()) for text in texts.values())
    if size > MOST_CODE_BYTES:
        return f"are larger than the {MOST_CODE_BYTES} bytes that are sent with a job"
    modules = [Path(file).name for file in texts]
    if len(set(modules)) < len(modules):
        return "have two files of one name, and a module has one"
    return ""


def place_code(texts: Mapping[str, str], folder: Path) -> None:
    """Write files that came with the job, as this process's user; it imports them from there.

    Ranks of a node do so at once, with the same texts. Other texts lie in other folders.
    """
    all_of_it = "".join(f"{digest(text)} {file}\n" for file, text in texts.items())
    package = folder / "code" / digest(all_of_it)
    package.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file, text in texts.items():
        path = package / Path(file).name
        unfinished = package / f".{path.name}.{os.getpid()}"
        unfinished.write_text(text, encoding="utf-8", newline="")
        unfinished.replace(path)
        _placed[file] = path


def _path(file: str) -> Path:
    """Where a file of the job lies: as it came with it, else in the folder that it runs in."""
    return _placed.get(file, Path(file))


def load_class(key: str, reference: str, base: type[T]) -> type[T]:
    """The class that setting ``key`` names, derived from ``base``.

    ``reference`` is ``package:Class``, or the name of an installed plug-in.
    """
    loaded = _named(key, reference) if ":" in reference else _installed(key, reference)
    if not isinstance(loaded, type) or not issubclass(loaded, base):
        rule = f"is no class derived from {base.__module__}.{base.__name__}"
        fix = f"write class {reference.rpartition(':')[2]}({base.__name__})"
        raise ConfigError(key, f'"{reference}"', rule, fix)
    return loaded


def _named(key: str, reference: str) -> object:
    module, _, name = reference.partition(":")
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        fix = f'name its file in code.files = ["{module}.py"], or install its package'
        raise _refusal(key, reference, error, fix if missing else "") from error
    if not hasattr(imported, name):
        classes = [each for each, value in vars(imported).items() if isinstance(value, type)]
        fix = did_you_mean(name, classes)
        raise ConfigError(key, f'"{reference}"', f"{module} has no class {name}", fix)
    return getattr(imported, name)


def _installed(key: str, name: str) -> object:
    entries = metadata.entry_points(group=ENTRY_POINTS)
    if name not in entries.names:
        known = ", ".join(sorted(entries.names)) or "none"
        rule = f"no installed package has such an entry point of {ENTRY_POINTS}; there are: {known}"
        fix = 'install it where ranks run, or write "package:Class"'
        raise ConfigError(key, f'"{name}"', rule, fix)
    try:
        return entries[name].load()
    except Exception as error:
        raise _refusal(key, name, error) from error


def _import_file(file: str) -> None:
    """Import a file under the name that it has without its ending."""
    path = _path(file)
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path.absolute()):
        return
    key, value = KEY, f'"{path}"'
    if path.suffix != ".py" or not name.isidentifier():
        raise ConfigError(key, value, "is no module's name", "name a file such as my_model.py")
    if loaded is not None or _hides_another(name, path, Path(file)):
        rule = f"{name} is the name of another module"
        raise ConfigError(key, value, rule, "give the file another name")
    if not path.is_file():
        rule = f"there is no such file in {Path.cwd()}"
        fix = "give its path from the folder that the job runs in; every node needs it"
        raise ConfigError(key, value, rule, fix)
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    assert spec is not None and spec.loader is not None, "it ends in .py"
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    _versions[str(path.absolute())] = hashlib.sha256(path.read_bytes()).hexdigest()
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _refusal(key, str(path), error) from error


def _hides_another(name: str, *paths: Path) -> bool:
    """Whether a module of this name can be imported that is none of these files."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return False
    return not spec.origin or Path(spec.origin).absolute() not in [p.absolute() for p in paths]


def _refusal(key: str, value: str, error: Exception, fix: str = "") -> ConfigError:
    """Of code that does not import: what was raised, and where."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    location = f"{last.filename}:{last.lineno}"
    if isinstance(error, SyntaxError) and error.filename:
        location = f"{error.filename}:{error.lineno}"
    rule = f"does not import: {type(error).__name__}: {error}"
    return ConfigError(key, f'"{value}"', rule, fix or f"correct {location}")
