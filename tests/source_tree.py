"""What a tree of modules imports, how long its files and functions are: read, never imported."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path


class Where(Enum):
    """When an import runs."""

    MODULE = "with the module"
    FUNCTION = "inside a function"
    TYPES = "only for the type checker"


@dataclass(frozen=True)
class Import:
    """One imported name: the module that imports, what it names, and where."""

    importer: str
    target: str
    line: int
    where: Where


@dataclass(frozen=True)
class Module:
    """A file, by its dotted name."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def syntax(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def functions(self) -> Iterator[tuple[str, int]]:
        """Every function's name and its lines, decorators not counted."""
        for node in ast.walk(self.syntax):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


class SourceTree:
    """All modules below one package's folder."""

    def __init__(self, package: Path) -> None:
        self.modules: dict[str, Module] = {}
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.modules[name] = Module(name, path)

    @cached_property
    def imports(self) -> list[Import]:
        """Every import of every module, one entry a name that is itself a module."""
        return [found for module in self.modules.values() for found in self._imports_of(module)]

    def _imports_of(self, module: Module) -> Iterator[Import]:
        for node, where in _import_statements(module.syntax, Where.MODULE):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                base = self._base(module, node)
                inner = [f"{base}.{alias.name}" for alias in node.names]
                targets = [name if name in self.modules else base for name in inner]
            for target in dict.fromkeys(targets):
                yield Import(module.name, target, node.lineno, where)

    @staticmethod
    def _base(module: Module, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.name.split(".")
        package = parts[: len(parts) - node.level + module.is_package]
        return ".".join([*package, *([node.module] if node.module else [])])

    @cached_property
    def loaded_with(self) -> dict[str, set[str]]:
        """What importing each module imports directly: its packages count too."""
        found = {name: set(_packages_of(name)) - {name} for name in self.modules}
        for one in self.imports:
            if one.where is Where.MODULE:
                found[one.importer].update(_packages_of(one.target))
        return found

    def loads(self, module: str) -> set[str]:
        """Everything that is loaded when a module is imported, itself too."""
        seen, left = {module}, [module]
        while left:
            new = self.loaded_with.get(left.pop(), set()) - seen
            seen |= new
            left += new
        return seen

    def folders(self) -> dict[Path, int]:
        """How many modules stand side by side in each folder."""
        counts: dict[Path, int] = {}
        for module in self.modules.values():
            counts[module.path.parent] = counts.get(module.path.parent, 0) + 1
        return counts


def _import_statements(
    node: ast.AST, where: Where
) -> Iterator[tuple[ast.Import | ast.ImportFrom, Where]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, where
        elif isinstance(child, ast.expr):
            continue  # no statement stands within, and most of a tree are expressions
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _import_statements(child, Where.FUNCTION)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for part in child.body:
                yield from _import_statements(ast.Module([part], []), Where.TYPES)
            for part in child.orelse:
                yield from _import_statements(ast.Module([part], []), where)
        else:
            yield from _import_statements(child, where)


def _packages_of(name: str) -> list[str]:
    """``a.b.c`` loads ``a`` and ``a.b`` too."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def room_of(module: str) -> str:
    """``phalanx.cluster.core`` is in ``cluster``; what stands beside the rooms is in none."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else ""


def upward_imports(tree: SourceTree, order: Iterable[str]) -> list[Import]:
    """Imports, wherever they stand, of a room that comes later in the order."""
    rank = {room: place for place, room in enumerate(order)}
    top = next(iter(tree.modules)).split(".")[0]
    return [
        one
        for one in tree.imports
        if one.target.split(".")[0] == top
        and room_of(one.importer)
        and room_of(one.target)
        and rank[room_of(one.target)] > rank[room_of(one.importer)]
    ]


def sibling_imports(tree: SourceTree, folder: str) -> dict[tuple[str, str], list[Import]]:
    """Module-level imports between the children of a package, a sub-package as one child."""
    found: dict[tuple[str, str], list[Import]] = {}
    for one in tree.imports:
        if one.where is not Where.MODULE:
            continue
        ends = [name.removeprefix(f"{folder}.") for name in (one.importer, one.target)]
        if ends[0] == one.importer or ends[1] == one.target:
            continue  # at least one is outside, or is the package itself
        importer, target = (end.split(".")[0] for end in ends)
        if importer != target:
            found.setdefault((importer, target), []).append(one)
    return found


def cycle(edges: Iterable[tuple[str, str]]) -> list[str]:
    """The names of some cycle in their order, or nothing."""
    graph: dict[str, list[str]] = {}
    for start, end in sorted(edges):
        graph.setdefault(start, []).append(end)
    done: set[str] = set()
    for root in graph:
        path: list[str] = []
        found = _walk(graph, root, path, done)
        if found:
            return found
    return []


def _walk(graph: dict[str, list[str]], node: str, path: list[str], done: set[str]) -> list[str]:
    if node in path:
        return path[path.index(node) :]
    if node in done:
        return []
    path.append(node)
    for following in graph.get(node, ()):
        found = _walk(graph, following, path, done)
        if found:
            return found
    path.pop()
    done.add(node)
    return []


def too_long(
    tree: SourceTree, limit: int, measure: Callable[[Module], Iterable[tuple[str, int]]]
) -> dict[str, int]:
    """What is above a limit, by ``path`` or ``path:function``."""
    root = next(iter(tree.modules.values())).path.parents[1]
    return {
        f"{module.path.relative_to(root)}{suffix}": size
        for module in tree.modules.values()
        for suffix, size in measure(module)
        if size > limit
    }


def module_lines(module: Module) -> list[tuple[str, int]]:
    return [("", module.lines)]


def function_lines(module: Module) -> list[tuple[str, int]]:
    return [(f":{name}", lines) for name, lines in module.functions()]


def named_paths(text: str, roots: Iterable[str]) -> set[str]:
    """Paths between backticks that begin with one of the roots."""
    pieces = text.split("`")[1::2]
    return {piece for piece in pieces if any(piece.startswith(root) for root in roots)}
