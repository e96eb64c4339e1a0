"""No module reads files in a way that runs what they say, without a reason given here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import phalanx

ROOT = Path(phalanx.__file__).parent
UNPICKLING = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNPICKLING.add("runpy")  # runs a file
CALLS = {  # last part of what is called
    **dict.fromkeys(("eval", "exec", "__import__", "execfile"), "runs text"),
    **dict.fromkeys(("unsafe_load", "full_load", "load_all"), "YAML that makes objects"),
    **dict.fromkeys(("extractall", "unpack_archive"), "writes where an archive says"),
    **dict.fromkeys(
        ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
        "unpickles what other ranks send",
    ),
    "recv_object_list": "unpickles what other ranks send",
    "from_pretrained": "may run a model's own code",
}
LOADS = {"torch", "np", "numpy", "yaml"}  # modules whose `load` makes any object, unless told

RANKS = "ranks of one gang, which run one another's gradients anyway"
ALLOWED = {
    "checkpoint/tools/dcp_metadata.py": {
        "pickle": "an unpickler that knows only inert records in place of torch's own names"
    },
    "checkpoint/ranks.py": {"all_gather_object": RANKS},
    "doctor/fabric/ranks.py": {"all_gather_object": RANKS},
    "model/hf/compare.py": {"from_pretrained": "safetensors that were written just before"},
    "train/evaluate/lead.py": {"broadcast_object_list": RANKS},
    "train/evaluate/score.py": {"all_gather_object": RANKS},
    "train/post_training/hand_off.py": {"all_gather_object": RANKS},
    "train/report/gaps.py": {"gather_object": RANKS},
    "train/optim/verification.py": {"broadcast_object_list": RANKS},
    "train/rank/local_orders.py": {"all_gather_object": RANKS, "broadcast_object_list": RANKS},
}


def uses(text: str) -> Iterator[str]:
    """Names of what a module does that runs what a file says."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in UNPICKLING)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLING:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _called(node)


def _called(node: ast.Call) -> Iterator[str]:
    told = {keyword.arg: keyword.value for keyword in node.keywords}
    name = ""
    if isinstance(node.func, ast.Name):
        name = node.func.id
    elif isinstance(node.func, ast.Attribute):
        name = node.func.attr
        module = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        flag, harmless = ("allow_pickle", False) if module == "np" else ("weights_only", True)
        only = told.get(flag)
        safe = isinstance(only, ast.Constant) and only.value is harmless
        if name == "load" and module in LOADS and not safe:
            yield f"{module}.load"
    if name in CALLS and not (name == "eval" and isinstance(node.func, ast.Attribute)):
        yield name  # `model.eval()` is a mode
    for flag in ("allow_pickle", "trust_remote_code"):
        value = told.get(flag)
        if value is not None and not (isinstance(value, ast.Constant) and value.value is False):
            yield flag


def test_no_module_runs_what_a_file_says() -> None:
    found: dict[str, set[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        if names := set(uses(path.read_text(encoding="utf-8"))):
            found[str(path.relative_to(ROOT))] = names
    assert found == {path: set(names) for path, names in ALLOWED.items()}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import pickle", ["pickle"]),
        ("from pickle import loads", ["pickle"]),
        ("torch.load(f)", ["torch.load"]),
        ("torch.load(f, weights_only=False)", ["torch.load"]),
        ("torch.load(f, weights_only=True)", []),
        ("np.load(f, allow_pickle=True)", ["np.load", "allow_pickle"]),
        ("np.load(f)", ["np.load"]),
        ("np.load(f, allow_pickle=False)", []),
        ("yaml.load(f)", ["yaml.load"]),
        ("eval(text)", ["eval"]),
        ("model.eval()", []),
        ("archive.extractall(folder)", ["extractall"]),
        ("AutoModel.from_pretrained(n, trust_remote_code=True)", None),
    ],
)
def test_the_search_knows_what_it_looks_for(text: str, names: list[str] | None) -> None:
    expected = ["from_pretrained", "trust_remote_code"] if names is None else names
    assert list(uses(text)) == expected
