"""Commands of pages run as they stand, or it is said why not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.reader import BLOCK, STAYS, Reader

DOCS = Path(__file__).parents[2] / "docs"
COMMAND = re.compile(r"(?:[^\n]*\\\n)*[^\n]+")
REFUSED = re.compile(r"# refused")
SAVED = re.compile(r"```toml\n# ([\w.-]+\.toml)\n(.*?)```", re.DOTALL)
CLUSTER = "phalanx up --nodes 2 --gpus-per-node 8 --port 0"
TRAIN = "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
LONG = "takes long"
THEIRS = "needs an engine or a machine of the site"


class Scene(NamedTuple):
    """What is there before the first command, and what is not typed, with the reason."""

    server: str = ""
    left_out: dict[str, str] = {}  # noqa: RUF012 - nothing changes it
    before: tuple[str, ...] = ()  # typed first
    instead: dict[str, str] = {}  # noqa: RUF012 - of what stands there, such as a job's number


NODES = "phalanx up --nodes 2 --port 0"
ENDED = ("phalanx submit examples/tiny.toml --set parallel.data=2", "phalanx logs 1 -f >/dev/null")
RUNS = (
    "phalanx submit examples/tiny.toml --set parallel.data=2 --set train.steps=100000",
    "until phalanx steps 1 --steps 10:20 >/dev/null 2>&1; do sleep 0.5; done",
)


RUN = {
    "coming-from/deepspeed.md": Scene(CLUSTER),
    "coming-from/megatron.md": Scene(),
    "coming-from/skypilot.md": Scene(CLUSTER),
    "coming-from/slurm-scripts.md": Scene(left_out={"slurm job.toml": THEIRS}),
    "coming-from/torchrun.md": Scene(),
    "coming-from/torchtitan.md": Scene(),
    "concepts/detection.md": Scene(),
    "concepts/failures.md": Scene(
        CLUSTER, {"benchmarks": LONG, "phalanx submit|phalanx events": "needs a plan", "100k": LONG}
    ),
    "concepts/metrics.md": Scene(
        NODES, before=RUNS, instead={"12 --steps 300:310": "1 --steps 10:20"}
    ),
    "concepts/parallelism.md": Scene(),
    "concepts/recovery.md": Scene(
        left_out={"--nodes 2|spares 1$": "a second server", "pytest": LONG}
    ),
    "how-to/accept-nodes.md": Scene(
        NODES, {r"accept  |--dcgm|--node": LONG, "--verify": "of such a test"}
    ),
    "how-to/add-nodes.md": Scene(CLUSTER, {"agent --join": THEIRS, "a.example": THEIRS}),
    "how-to/audit-requests.md": Scene(CLUSTER, {"--head HASH": "of a line", "siem": THEIRS}),
    "how-to/bring-your-own-model.md": Scene(),
    "how-to/check-the-fabric.md": Scene(NODES, {"8192": LONG, "ndr": THEIRS}, instead={"16": "2"}),
    "how-to/choose-a-backend.md": Scene(CLUSTER, {"--backend|…": THEIRS}),
    "how-to/compose-a-model.md": Scene(),
    "how-to/configure-a-job.md": Scene(),
    "how-to/describe-nodes.md": Scene(left_out={"nodes NODE|agent --join": THEIRS}),
    "how-to/follow-a-recipe.md": Scene(),
    "how-to/give-access.md": Scene(CLUSTER),
    "how-to/inject-faults.md": Scene(left_out={"--count 50": LONG}),
    "how-to/profile-a-job.md": Scene(NODES, before=RUNS, instead={"12": "1", "0,8": "0,1"}),
    "how-to/prove-a-mesh.md": Scene(left_out={"--reshard|--ranks 8": LONG}),
    "how-to/run-a-sweep.md": Scene(left_out={"sweep fit": "needs a sweep of sizes"}),
    "how-to/run-on-kubernetes.md": Scene(left_out={"kubectl|status|delete|job.toml": THEIRS}),
    "how-to/run-your-program.md": Scene(
        CLUSTER, {"--backend": THEIRS, "torchrun|accelerate|-f": "tests/control/frameworks"}
    ),
    "how-to/schedule-jobs.md": Scene(
        CLUSTER, {"--after|--partition|17|n3": "needs jobs, partitions and nodes of the site"}
    ),
    "how-to/secure-a-site.md": Scene(CLUSTER, {"revoke ID": "needs a token's id"}),
    "how-to/set-alerts.md": Scene(
        f"{CLUSTER} --mail-relay localhost", {"--job 7": "needs a job", "test": THEIRS, "rm": ""}
    ),
    "how-to/survive-failures.md": Scene(NODES, before=ENDED, instead={"12": "1"}),
    "how-to/train-and-resume.md": Scene(left_out={"torchrun": "needs two machines"}),
    "how-to/tune-a-job.md": Scene(),
    "how-to/use-the-page.md": Scene(
        left_out={"demo": "tests/cli/train/test_demo.py"},
        instead={"phalanx top": "phalanx top --once"},
    ),
    "how-to/watch-runs.md": Scene(
        NODES,
        before=("phalanx train examples/tiny.toml", *RUNS),
        instead={"12": "1", "0,8": "0,1"},
    ),
    "how-to/why-a-job-waits.md": Scene(
        NODES, before=RUNS, instead={"7": "1", "phalanx top": "phalanx top --once"}
    ),
}
# Pages whose commands another test types.
FOLLOWED = {
    "how-to/clean-raw-text.md": "tests/data/prepare/test_recipe.py",
    "how-to/evaluate.md": "tests/docs/test_tutorials.py",
    "how-to/pipelines.md": "tests/pipelines/test_docs.py",
    "how-to/plan-a-run.md": "tests/cli/plan/test_plan_docs.py",
    "how-to/post-train.md": "tests/docs/test_post_training.py",
    "how-to/prepare-data.md": "tests/data/test_docs.py",
    "how-to/run-the-server.md": "tests/control/test_server_docs.py",
    "how-to/use-the-api.md": "tests/control/test_server_docs.py",
}
# Pages of which no test types all: that their commands and options exist is checked
# (``test_commands.py``), and what they do in the tests of those commands.
NOT_TYPED = {
    "how-to/back-up-and-restore.md": "needs a damaged log",
    "how-to/check-a-node.md": "changes the machine",
    "how-to/run-a-standby.md": "needs PostgreSQL and two machines",
    "how-to/run-on-ray.md": "needs a Ray cluster",
    "how-to/run-on-slurm.md": "its commands are those of the tutorial, and of a real site",
    "how-to/save-and-restore.md": "needs keys of an object store",
    "index.md": "benchmarks/first_picture.py does",
}


def commands(name: str) -> Iterator[str]:
    """What stands in a page's blocks for the shell, one command after another."""
    for block in BLOCK.finditer((DOCS / name).read_text(encoding="utf-8")):
        if block["kind"] == "sh":
            yield from COMMAND.findall(block["text"])


def reason(command: str, scene: Scene) -> str | None:
    """Why a command is not typed; None: it is."""
    return next((why for part, why in scene.left_out.items() if re.search(part, command)), None)


def test_every_page_with_commands_is_run_or_says_where_they_are() -> None:
    written = [path for path in DOCS.rglob("*.md") if path.parent.name not in SELF_MADE]
    shown = {name for path in written if any(commands(name := str(path.relative_to(DOCS))))}
    assert shown - {"evidence.md"} == {*RUN, *FOLLOWED, *NOT_TYPED}
    for name, test in FOLLOWED.items():
        text = (DOCS.parent / test).read_text(encoding="utf-8")
        assert name.rpartition("/")[2] in text, f"{test} does not name {name}"


SELF_MADE = ("reference", "stories", "tutorials")  # generated, or followed by test_tutorials.py


def test_what_is_left_out_of_a_page_is_there() -> None:
    for name, scene in RUN.items():
        typed = list(commands(name))
        assert all(any(re.search(part, each) for each in typed) for part in scene.left_out), name


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(RUN))
def test_the_commands_of_a_page_run(name: str, tmp_path: Path) -> None:
    scene = RUN[name]
    with Reader(tmp_path) as reader:
        for file, text in SAVED.findall((DOCS / name).read_text(encoding="utf-8")):
            (reader.folder / file).write_text(text)
        (reader.folder / "train.py").write_text(TRAIN)
        (reader.folder / "ds_config.json").write_text("{}")
        job = (DOCS.parent / "examples" / "tiny.toml").read_text(encoding="utf-8")
        (reader.folder / "job.toml").write_text(job)
        if scene.server:
            reader.start(scene.server)
        for command in scene.before:
            reader.type(command)
        for written in commands(name):
            if reason(written, scene) is None:
                command = written
                for words, here in scene.instead.items():
                    command = re.sub(rf"(?<![\w-]){words}(?![\w-])", here, command)
                if STAYS.match(command):
                    reader.start(command.partition("#")[0].strip())
                else:
                    reader.type(command, bool(REFUSED.search(command)))
