"""No agent-side module opens, makes or changes files by their path without a reason given here.

An agent may be root, and a job's folders are its user's. Whatever touches them goes through
``phalanx.control.agent.safe_files``; what is listed here touches only what is the agent's own.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import phalanx

ROOT = Path(phalanx.__file__).parent
METHODS = {  # of paths
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "mkdir", "touch", "rename"),
    *("unlink", "rmdir", "chmod", "lchmod", "symlink_to", "hardlink_to"),
}
OF_OS = {"open", "chown", "chmod", "lchown", "mkdir", "makedirs", "mkfifo", "link", "symlink"}
OF_OS |= {"rename", "replace", "unlink", "remove", "rmdir", "truncate", "utime", "setxattr"}

OWN = "the agent's state folder, which nobody else can write"
PROC = "the kernel's own files"
RUNTIME = "the agent's runtime folder, which nobody else can write"
AS_USER = "the process has switched to the job's user, or has been told to be itself"

CGROUP_USES = ("make", "_bounded", "close", "enter_group", "own_group", "_end", "_removed")

ALLOWED = {
    "control/agent/process.py": {"leave": RUNTIME, "run": "connections, not files"},
    "control/agent/inspect/details.py": {},
    "control/agent/inspect/logs.py": {},
    "control/agent/inspect/shell.py": {},
    "control/agent/spawn/cgroups.py": dict.fromkeys(CGROUP_USES, PROC),
    "control/agent/spawn/containment.py": {
        "contain": PROC,
        "enable_controllers": PROC,
        "bound_group": PROC,
    },
    "control/agent/jobs/jobs.py": {
        "__init__": OWN,
        "job": OWN,
        "_clear_sockets": "rmtree follows no link",
        "stop": "rmtree follows no link",
    },
    "control/agent/jobs/worker_events.py": {"listen": "reached as the job's user"},
    "control/agent/inspect/evidence.py": {"write_process": PROC},
    "control/agent/node_check.py": {"_run": OWN, "_injected": OWN, "_read": OWN, "examine": OWN},
    "control/agent/jobs/local_job.py": {},
    "control/agent/hooks.py": {},
    "control/agent/jobs/keeper_watch.py": {},
    "control/agent/spawn/log_keeping.py": {
        "note_ranks": OWN,
        "noted_ranks": OWN,
        "_compress_at": "a name in a folder that is open; unlink follows no link",
        "_pack": "names in a folder that is open, behind descriptors",
        "compress_ended": "the folder is opened without following links",
        "expire": "unlink and rmtree follow no link",
        "move_logs": OWN,
    },
    "control/agent/spawn/output_pump.py": {},
    "control/agent/jobs/assignment.py": {},
    "control/agent/jobs/job_owner.py": {"own_job_folder": OWN},
    "control/host/process_tree.py": {"read_stat": PROC, "own_children": PROC},
    "control/agent/jobs/start.py": {
        "ensure_keeper": "unlink follows no link",
        "end_keeper": "unlink follows no link",
        "watch": "a connection, not a file",
    },
    "control/agent/jobs/program_activity.py": {},
    "control/agent/jobs/program_notes.py": {
        "note_program": OWN,
        "noted_programs": OWN,
        "forget_program": OWN,
    },
    "control/agent/jobs/programs.py": {},
    "control/agent/socket_paths.py": {"make_runtime_folder": RUNTIME, "clear_away": RUNTIME},
    "control/trust/secrets.py": {"_read": AS_USER},
    "control/agent/telemetry.py": {},
    "control/agent/jobs/wrapper_exits.py": {},
    "control/agent/spawn/child.py": {"enter_namespace": PROC},
    "control/agent/spawn/zygote.py": {
        "listen": RUNTIME,
        "_end_children": RUNTIME,
        "_spawn": "a pump",
    },
    "control/agent/spawn/zygote_client.py": {"_start": OWN},
    "observe/node/ring.py": {"__init__": AS_USER, "_open": "what it is, is asked of the open file"},
    "observe/node/worker_ring.py": {},
}  # fmt: skip


def uses(path: Path) -> list[tuple[str, int, str]]:
    """Functions that touch files by themselves, with line and call."""
    found: list[tuple[str, int, str]] = []

    def look(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and (name := touched(node.func)):
            found.append((function, node.lineno, name))
        for child in ast.iter_child_nodes(node):
            look(child, function)

    look(ast.parse(path.read_text()), "")
    return found


def touched(function: ast.expr) -> str:
    """The name of a call that touches a file by its path; "" for others."""
    if isinstance(function, ast.Name):
        return "open" if function.id == "open" else ""
    if not isinstance(function, ast.Attribute):
        return ""
    of = function.value.id if isinstance(function.value, ast.Name) else ""
    if of == "os":
        return f"os.{function.attr}" if function.attr in OF_OS else ""
    if of == "shutil":
        return "" if function.attr == "copyfileobj" else f"shutil.{function.attr}"
    if of in ("structs", "msgspec", "gzip", "zygote"):
        return ""
    return f".{function.attr}" if function.attr in METHODS else ""


@pytest.mark.parametrize("module", ALLOWED)
def test_files_are_touched_through_safe_files_or_for_a_reason(module: str) -> None:
    allowed = ALLOWED[module]
    found = uses(ROOT / module)
    strangers = [f"{module}:{line} {name} in {function}()" for function, line, name in found
                 if function not in allowed]  # fmt: skip
    assert not strangers, "use phalanx.control.agent.safe_files, or say here why not"
    unused = set(allowed) - {function for function, _, _ in found}
    assert not unused, f"{module}: these reasons excuse nothing any more"
