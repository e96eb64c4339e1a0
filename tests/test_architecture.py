"""The order of the rooms, the size of their parts, and the paths that ARCHITECTURE.md names.

Lists of exceptions may only shrink: an entry that is no longer needed fails the test that reads it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.source_tree import (
    Import,
    SourceTree,
    Where,
    cycle,
    function_lines,
    module_lines,
    named_paths,
    room_of,
    sibling_imports,
    too_long,
    upward_imports,
)

ROOT = Path(__file__).parents[1]

# A room imports only from rooms before it.
ROOMS = (
    *("config", "hardware", "plan", "data", "model", "parallel", "checkpoint", "train"),
    *("cluster", "simulate", "observe", "doctor", "control", "pipelines", "testing", "cli"),
)
UPWARD: dict[tuple[str, str], str] = {}  # (importing module, room): why

TORCH_ROOMS = ("model", "parallel", "checkpoint", "train")
TORCH_IN_FUNCTIONS = ("data", "doctor", "control", "testing", "cli")
RANKS_ONLY = "runs where ranks are started or is a rank"
LOADS_TORCH = {  # modules of other rooms that load torch when they are imported
    "phalanx.control.agent.spawn.child": RANKS_ONLY,
    "phalanx.control.agent.spawn.zygote": RANKS_ONLY,
    "phalanx.control.worker.process": RANKS_ONLY,
    "phalanx.control.worker.orders": RANKS_ONLY,
}

# Children of one folder import each other in one direction. These imports go against it: taken
# away, there is no circle between sub-packages.
CORE = "the core's parts share one state; narrow protocols would end it"
STRUCTS = "structs that lie with what fills them"
KNOTS: dict[str, dict[str, str]] = {
    "cluster": {
        **dict.fromkeys(
            [
                *("context -> jobs", "context -> ledger", "context -> queue"),
                *("state -> fleet", "state -> jobs", "gang -> jobs", "protocol -> jobs"),
            ],
            STRUCTS,
        ),
        **dict.fromkeys(
            [
                *("fleet -> placement", "fleet -> recovery", "jobs -> fleet"),
                *("jobs -> placement", "jobs -> recovery"),
            ],
            CORE,
        ),
    },
    "plan": {
        "show -> search": STRUCTS,
    },
}

MODULES_A_FOLDER = 16

LINES_A_MODULE = 400
DECLARATIONS = {  # only structs: no function of more than a few lines
    "phalanx/cluster/protocol/events.py",
    "phalanx/cluster/protocol/messages.py",
    "phalanx/config/schema.py",
    "phalanx/control/wire/api_types.py",
}
LINES_OF_CODE_IN_DECLARATIONS = 20

LINES_A_FUNCTION = 60


@pytest.fixture(scope="module")
def phalanx() -> SourceTree:
    return SourceTree(ROOT / "phalanx")


def shown(imports: Iterable[Import]) -> list[str]:
    return [f"{one.importer}:{one.line} imports {one.target} {one.where.value}" for one in imports]


def test_the_order_names_every_room() -> None:
    folders = {path.parent.name for path in ROOT.glob("phalanx/*/__init__.py")}
    assert folders == set(ROOMS)


def test_rooms_import_only_from_rooms_above_them(phalanx: SourceTree) -> None:
    upward = upward_imports(phalanx, ROOMS)
    allowed = {(one.importer, room_of(one.target)) for one in upward} & UPWARD.keys()
    new = [one for one in upward if (one.importer, room_of(one.target)) not in UPWARD]
    assert shown(new) == []
    assert UPWARD.keys() - allowed == set(), "no longer needed"


def test_importing_the_package_loads_no_room(phalanx: SourceTree) -> None:
    assert phalanx.loads("phalanx") == {"phalanx", "__future__", "typing"}


def test_torch_is_imported_only_where_it_may_be(phalanx: SourceTree) -> None:
    wrong = [
        one
        for one in phalanx.imports
        if one.target.split(".")[0] == "torch"
        and room_of(one.importer) not in TORCH_ROOMS
        and (one.where is Where.MODULE or room_of(one.importer) not in TORCH_IN_FUNCTIONS)
    ]
    assert shown(wrong) == []


def test_other_rooms_start_without_torch(phalanx: SourceTree) -> None:
    loading = {
        name
        for name in phalanx.modules
        if room_of(name) not in TORCH_ROOMS and "torch" in phalanx.loads(name)
    }
    assert loading == LOADS_TORCH.keys()


def test_no_modules_import_each_other_in_a_circle(phalanx: SourceTree) -> None:
    edges = {
        (one.importer, one.target)
        for one in phalanx.imports
        if one.where is Where.MODULE and one.target in phalanx.modules
    }
    assert cycle(edges) == []


def unneeded_knots(edges: set[tuple[str, str]], allowed: set[tuple[str, str]]) -> list[str]:
    """Allowed edges that are not there, or close no circle."""
    rest = edges - allowed
    return [" -> ".join(edge) for edge in sorted(allowed) if not cycle(rest | (edges & {edge}))]


def test_parts_of_a_folder_import_each_other_in_one_direction(phalanx: SourceTree) -> None:
    folders = {name for name, module in phalanx.modules.items() if module.is_package}
    folders -= {"phalanx"}  # its parts are the rooms
    assert {f"phalanx.{folder}" for folder in KNOTS} <= folders
    circles, unneeded = {}, {}
    for folder in sorted(folders):
        edges = set(sibling_imports(phalanx, folder))
        knots = KNOTS.get(folder.removeprefix("phalanx."), {})
        allowed = {(start, end) for start, _, end in (knot.partition(" -> ") for knot in knots)}
        circles[folder] = cycle(edges - allowed)
        unneeded[folder] = unneeded_knots(edges, allowed)
    assert {folder: names for folder, names in circles.items() if names} == {}
    assert {folder: names for folder, names in unneeded.items() if names} == {}


def test_a_folder_can_be_seen_at_a_glance(phalanx: SourceTree) -> None:
    crowded = {
        str(folder.relative_to(ROOT)): count
        for folder, count in phalanx.folders().items()
        if count > MODULES_A_FOLDER
    }
    assert crowded == {}


def test_modules_are_short_unless_they_only_declare(phalanx: SourceTree) -> None:
    long = too_long(phalanx, LINES_A_MODULE, module_lines).keys()
    assert long == DECLARATIONS
    for module in phalanx.modules.values():
        if str(module.path.relative_to(ROOT)) in DECLARATIONS:
            code = sum(lines for _, lines in module.functions())
            assert code <= LINES_OF_CODE_IN_DECLARATIONS, module.path


def test_functions_are_short(phalanx: SourceTree) -> None:
    assert too_long(phalanx, LINES_A_FUNCTION, function_lines) == {}


def test_no_script_has_the_name_of_a_standard_module() -> None:
    """Run by its path, a script's folder comes first: its neighbours would hide such modules."""
    scripts = [path.stem for path in ROOT.glob("benchmarks/*.py")]
    assert scripts
    assert [name for name in scripts if name in sys.stdlib_module_names] == []


TOP = ("phalanx/", "tests/", "docs/", "benchmarks/", "proof/", "examples/")


def test_every_path_that_the_map_names_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    paths = named_paths(text, TOP)
    assert len(paths) > 60
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_map_counts_the_files_of_its_walks() -> None:
    """A walk's heading says how many files it has; its list has as many."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    walks = re.findall(r"^### (.+?): (\d+) files\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL)
    assert len(walks) == 4
    for name, count, body in walks:
        assert (name, len(re.findall(r"^\d+\. `phalanx/", body, re.MULTILINE))) == (
            name,
            int(count),
        )


def test_the_map_shows_every_room_in_order() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(ROOMS)


def test_the_map_shows_every_sub_package() -> None:
    """In the pictures of rooms, and none that is not there."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text[text.index("The two large rooms inside:") : text.index("## Walks")]
    drawn, room = set(), ""
    for line in "".join(re.findall(r"```\n(.*?)```", section, re.DOTALL)).splitlines():
        if line[0] != " ":
            room, line = line.split("/", 1)
        names = re.match(r" *((?:[\w.]+/? )*(?:[\w.]+/?))(?:  |$)", line)
        if names is not None and not line.startswith(" " * 20):
            drawn |= {(room, name[:-1]) for name in names[1].split() if name[-1] == "/"}
    packages = {(path.parts[-3], path.parts[-2]) for path in ROOT.glob("phalanx/*/*/__init__.py")}
    assert drawn - {("observe", "monitoring")} == packages  # which has files for other programs


# Files of tests whose name is no module or package of their room, by why.
BEHAVIOUR = {
    "a live cluster, looked at from outside": {
        "control": """api_schema backup blame chaos described_fleet double_faults failover formation
            frameworks fresh_server full_disk kills lease log_damage log_format one_writer own_code
            paths planned_submission program_leaks questions remap replan restage scheduler_verbs
            server_cli server_docs top""",
        "control/backends": "bad_sites docs one_file sandbox",
        "control/backends/slurm": "chaos reuse turns",
        "control/server": "admin_token",
        "doctor/fabric": "cluster",
        "observe": """all_clients grafana live mirrors outside page_actions page_roles page_scale
            signals steps_path""",
    },
    "events through the whole core": {
        "cluster": """asking borrowed_quota collect docs fuzz keeper_silent leaving lost_peer
            memory_kept partitions queue_core queue_properties rollback scale small_parts""",
        "cluster/gang": "backup printed",
        "cluster/jobs": "cancel_program restage",
        "cluster/recovery": "remap waiting",
        "simulate": "controller_mutations physics program_fence",
        "simulate/world": "failure_rates own_mapping",
    },
    "ranks, with model, axes and state together": {
        "checkpoint": "bounds continue reshard tiers",
        "parallel": """compile features kept parity pipeline_balance random_jobs ranks
            unknown_parameters""",
        "train": """batch_ramp damage determinism last_save launch_soak leave_out offload_folder
            recipes trackers_soak virtual_replicas""",
        "train/kernels": "warm_start_soak",
        "train/parity": "families",
        "train/post_training": "adapters preference",
    },
    "several modules of one subject": {
        "checkpoint": "ckpt_cli hf_export",
        "data/order": "changed_stages",
        "data": "docs exactness keeping s3 tokenize_runs",
        "doctor": "measured",
        "doctor/checks": "cgroups gpu os",
        "hardware": "consistency",
        "hardware/probe": "parsers",
        "model": "dropout hf_keys",
        "observe/profile": "reports rules",
        "pipelines": "docs example",
        "pipelines/run": "kills",
    },
    "every command": {
        "cli": "bad_input commands help_text without_torch",
        "config": "file_kinds",
        "cli/plan": "plan_docs",
        "cli/train": "train_errors",
    },
}


def unmirrored(tests: Iterable[str], modules: Iterable[str]) -> set[str]:
    """Files of tests, as ``room/folder/test_name.py``, that no module of their room answers to."""
    answering: dict[str, set[str]] = {}
    for module in modules:
        room, *below = module.split(".")[1:]
        answering.setdefault(room, set()).update(below, [room])
    return {
        test
        for test in tests
        if (room := test.split("/")[0]) in answering
        and Path(test).stem.removeprefix("test_") not in answering[room]
    }


def test_files_of_tests_mirror_modules_or_say_why_not(phalanx: SourceTree) -> None:
    tests = [str(path.relative_to(ROOT / "tests")) for path in ROOT.glob("tests/*/**/test_*.py")]
    modules = [name for name in phalanx.modules if name != "phalanx"]
    listed = [
        f"{folder}/test_{name}.py"
        for folders in BEHAVIOUR.values()
        for folder, names in folders.items()
        for name in names.split()
    ]
    nameless = unmirrored(tests, modules)
    assert sorted(nameless - set(listed)) == [], "name them after what they prove"
    assert sorted(set(listed) - nameless) == [], "no longer needed"


# The checkers themselves, on trees made up for them.


def made_up(folder: Path, **files: str) -> SourceTree:
    """A package ``top`` with the files given as ``room__module="text"``."""
    top = folder / "top"
    for name, text in {"__init__": "", **files}.items():
        path = top.joinpath(*name.split("__")) if name != "__init__" else top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text, encoding="utf-8")
        if path.parent != top:
            (path.parent / "__init__.py").touch()
    return SourceTree(top)


UP = "from top.high import thing"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (UP, Where.MODULE),
        ("import top.high.thing", Where.MODULE),
        ("from ..high import thing", Where.MODULE),
        ("try:\n    import top.high.thing\nexcept ImportError:\n    pass", Where.MODULE),
        (f"class A:\n    {UP}", Where.MODULE),
        (f"def f():\n    {UP}", Where.FUNCTION),
        (f"class A:\n    async def f(self):\n        {UP}", Where.FUNCTION),
        (f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {UP}", Where.TYPES),
        (f"import typing\nif typing.TYPE_CHECKING:\n    {UP}", Where.TYPES),
    ],
)
def test_an_upward_import_is_found_wherever_it_stands(
    tmp_path: Path, text: str, where: Where
) -> None:
    tree = made_up(tmp_path, low__a=text, high__thing="")
    found = upward_imports(tree, ("low", "high"))
    assert [(one.importer, one.target, one.where) for one in found] == [
        ("top.low.a", "top.high.thing", where)
    ]
    assert upward_imports(tree, ("high", "low")) == []


def test_torch_is_found_through_other_modules_and_packages(tmp_path: Path) -> None:
    tree = made_up(
        tmp_path,
        a__x="from top.b import y",
        a__z="def f():\n    import torch",
        b__y="from top.c.deep import name",
        c__deep="",
    )
    (tmp_path / "top" / "c" / "__init__.py").write_text("from torch import nn", encoding="utf-8")
    tree = SourceTree(tmp_path / "top")
    assert "torch" in tree.loads("top.a.x")
    assert "torch" not in tree.loads("top.a.z")


def test_a_circle_of_sub_packages_is_found_and_may_be_allowed_while_needed(tmp_path: Path) -> None:
    one_way = made_up(tmp_path / "1", r__a__m="from top.r.b import n", r__b__n="", r__b__o="")
    assert cycle(sibling_imports(one_way, "top.r")) == []
    files = {"r__a__m": "from top.r.b import n", "r__b__n": "", "r__b__o": "import top.r.a.m"}
    both = set(sibling_imports(made_up(tmp_path / "2", **files), "top.r"))
    assert cycle(both) == ["a", "b"]
    assert cycle(both - {("b", "a")}) == []
    assert unneeded_knots(both, {("b", "a")}) == []
    assert unneeded_knots({("a", "b")}, {("b", "a")}) == ["b -> a"]


def test_a_circle_of_three_is_found_and_a_diamond_is_none() -> None:
    assert cycle([("a", "b"), ("b", "c"), ("c", "a")]) == ["a", "b", "c"]
    assert cycle([("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")]) == []


def test_long_files_functions_and_folders_are_found(tmp_path: Path) -> None:
    body = "    x = 1\n" * 3
    tree = made_up(tmp_path, r__a=f"@staticmethod\ndef f():\n{body}\nasync def g():\n{body}{body}")
    assert too_long(tree, 4, function_lines) == {"top/r/a.py:g": 7}
    assert too_long(tree, 13, module_lines) == {}
    assert too_long(tree, 12, module_lines) == {"top/r/a.py": 13}
    assert tree.folders()[tmp_path / "top" / "r"] == 2


def test_paths_are_read_between_backticks() -> None:
    text = "see `phalanx/a.py`, phalanx/b.py and `run phalanx/c.py`, `docs/d.md`"
    assert named_paths(text, ("phalanx/", "docs/")) == {"phalanx/a.py", "docs/d.md"}


def test_a_file_of_tests_that_mirrors_nothing_is_found() -> None:
    modules = ["top.low", "top.low.part", "top.low.part.thing", "top.high.other"]
    mirrors = ["low/test_low.py", "low/test_part.py", "low/part/test_thing.py", "free/test_x.py"]
    assert unmirrored([*mirrors, "low/test_other.py"], modules) == {"low/test_other.py"}
