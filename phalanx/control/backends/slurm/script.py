"""The batch script of a job: every line with the reason why it is there."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from phalanx.config import Backend
from phalanx.control.backends.need import Need
from phalanx.control.backends.slurm.container import (
    PYTHON,
    container_words,
    staged,
    staging,
)
from phalanx.control.client import TLS_FILE

FIRST_PORT, PORTS = 20_000, 20_000  # by the number of the job: two jobs on a node do not meet
RAY_PORTS = 5_000  # behind those
JOB_MARK = "PHALANX_JOB"


class ScriptOptions(Struct, frozen=True, kw_only=True):
    """What a script is made of."""

    name: str
    backend: Backend
    need: Need
    python: str
    folder: str  # that the job runs in
    runs: Path  # folder of this name's runs, on shared storage
    job_toml: str = ""  # "": a program
    argv: tuple[str, ...] = ()
    lead: tuple[str, ...] = ()  # more options of the leading process
    switches: int = 0
    segment: bool = True  # this Slurm has it
    exclude: tuple[str, ...] = ()
    quarantined: int = 0  # of those, how many Phalanx found itself
    server: str = ""  # "": the controller runs in the job
    policy: str = ""


class Line(Struct, frozen=True):
    """A line, or several, and why."""

    text: str
    why: str = ""


def render(options: ScriptOptions, comments: bool) -> str:
    """The script; ``comments``: with the reason above each line."""
    lines = ["#!/bin/bash"]
    for made in (*_directives(options), *_body(options)):
        if comments and made.why:
            lines += [f"# {line}" for line in made.why.splitlines()]
        lines.append(made.text)
    return "\n".join(lines) + "\n"


def _directives(options: ScriptOptions) -> Iterator[Line]:
    for line in (
        *_who(options),
        *_nodes(options),
        *_place(options),
        *_time(options),
        *_fate(options),
    ):
        yield Line(f"#SBATCH {line.text}", line.why)


# Of a batch script alone.
SCRIPT_ONLY = ("--output", "--open-mode", "--requeue", "--no-requeue", "--array", "--signal")


def allocation_words(options: ScriptOptions) -> list[str]:
    """What salloc is asked for: the same nodes as by a script."""
    parts = (_who, _nodes, _place, _time, _fate)
    words = [line.text for part in parts for line in part(options)]
    return [word for word in words if not word.startswith(SCRIPT_ONLY)]


def agents_script(options: ScriptOptions) -> str:
    """Starts agents in an allocation that is there, and waits for them.

    Variables tell url, state and who leads: where that one is killed, the allocation is given back.
    """
    return "\n".join(
        (
            '(while kill -0 "$leader" 2>/dev/null; do sleep 1; done; scancel "$SLURM_JOB_ID") &',
            f"phalanx=({shlex.quote(options.python)} -m phalanx)",
            *([_staging(options).text] if staged(options.backend) else []),
            *(line.text for line in _agents(options)),
            'wait "$step"',
        )
    )


def _who(options: ScriptOptions) -> Iterator[Line]:
    slurm = options.backend.slurm
    yield Line(f"--job-name={options.name}")
    for name in ("account", "partition", "qos", "reservation"):
        if value := getattr(slurm, name):
            yield Line(f"--{name}={value}", f"backend.slurm.{name}")
    output = f"{options.runs}/slurm-%j.out"
    yield Line(f"--output={output}", "One file for all turns of the job:")
    yield Line("--open-mode=append", "a requeued job adds to it")


def _nodes(options: ScriptOptions) -> Iterator[Line]:
    need, slurm = options.need, options.backend.slurm
    spare = f" and {need.spares} that stand by in the same allocation" if need.spares else ""
    yield Line(f"--nodes={need.nodes}", f"{need.slots} for the gang of {need.ranks} ranks{spare}")
    yield Line(
        "--ntasks-per-node=1",
        "One task a node: the agent. It starts the workers, and binds each\n"
        "to its GPU, cores and NUMA node by itself.",
    )
    if need.wants_gpus:
        kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
        gpus = f"{kind}{need.gpus_per_node}"
        flag = f"--gres=gpu:{gpus}" if slurm.gres else f"--gpus-per-node={gpus}"
        yield Line(flag, "One rank a GPU")
    yield Line("--exclusive", "All cores of the node for loaders and keepers, and no noisy guest")
    if need.memory_bytes:
        gib = math.ceil(need.memory_bytes / 2**30)
        yield Line(
            f"--mem={gib}G",
            "As predicted: each rank's process, and six snapshots of its state\n"
            "(four of its own, two of its neighbour's)",
        )
    else:
        yield Line("--mem=0", "All memory of the node: snapshots live there (no backend.cluster)")


def _place(options: ScriptOptions) -> Iterator[Line]:
    slurm = options.backend.slurm
    if slurm.constraint:
        yield Line(f"--constraint={slurm.constraint}", "backend.slurm.constraint")
    if slurm.nodelist:
        yield Line(f"--nodelist={slurm.nodelist}", "backend.slurm.nodelist")
    if options.exclude:
        found = f", {options.quarantined} of which Phalanx quarantined" * bool(options.quarantined)
        yield Line(f"--exclude={','.join(options.exclude)}", f"Nodes to stay away from{found}")
    if options.switches:
        yield Line(
            f"--switches={options.switches}@{slurm.switches_minutes}",
            f"As few leaf switches as {options.need.nodes} nodes need; Slurm may wait\n"
            f"{slurm.switches_minutes} minutes for them. Ranks are ordered by leaf inside.",
        )
    if slurm.segment and options.segment:
        yield Line(f"--segment={slurm.segment}", "Nodes of one block stay together")


def _time(options: ScriptOptions) -> Iterator[Line]:
    need, slurm = options.need, options.backend.slurm
    if need.hours:
        why = need.predicted or "backend.hours"
        yield Line(f"--time={_clock(need.hours)}", why)
        if need.least_hours < need.hours:
            yield Line(
                f"--time-min={_clock(need.least_hours)}",
                "Backfill may start it with less: it goes on in the next allocation",
            )
    yield Line(
        f"--signal=B:USR1@{slurm.signal_seconds}",
        f"{slurm.signal_seconds} s before the limit, or when preempted (sites with\n"
        "preempt_send_user_signal), the script is told: snapshot, flush, requeue.",
    )


def _fate(options: ScriptOptions) -> Iterator[Line]:
    slurm = options.backend.slurm
    if slurm.requeue:
        yield Line("--requeue", "Preempted, or its first node lost: back to the queue")
    else:
        yield Line("--no-requeue", "backend.slurm.requeue = false")
    yield Line("--no-kill", "The loss of a node is ours to deal with: a spare takes its place")
    if slurm.dependency:
        yield Line(f"--dependency={slurm.dependency}", "backend.slurm.dependency")
        yield Line("--kill-on-invalid-dep=yes", "Do not wait for ever for what cannot come")
    if slurm.array:
        width = f"%{slurm.array_width}" if slurm.array_width else ""
        yield Line(f"--array=0-{slurm.array - 1}{width}", "Members, and how many at a time")
    for option in slurm.options:
        yield Line(option, "backend.slurm.options")


def _clock(hours: float) -> str:
    minutes = max(1, math.ceil(hours * 60))
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"


def _body(options: ScriptOptions) -> Iterator[Line]:
    yield Line("")
    yield Line("set -u")
    yield from (Line(line, "backend.slurm.setup") for line in options.backend.slurm.setup)
    yield Line(f"cd -- {shlex.quote(options.folder)} || exit 1")
    if options.backend.network_hints:
        yield Line(
            "export NCCL_IB_TIMEOUT=22 NCCL_IB_RETRY_CNT=7 NCCL_IB_QPS_PER_CONNECTION=4\n"
            "export UCX_TLS=rc,sm,self UCX_RC_TIMEOUT=1s",
            "backend.network_hints: links that flap for seconds do not end a collective",
        )
    yield Line(f"phalanx=({shlex.quote(options.python)} -m phalanx)")
    run = f"{shlex.quote(str(options.runs))}/slurm-$SLURM_JOB_ID"
    yield Line(
        f'run={run}\nstate=$run/control\nmkdir -p -m 700 "$run" "$state"',
        "The run and its controller's log: shared storage, the same in every turn",
    )
    yield from _image(options)
    yield from _ray(options)
    yield from _where(options)
    yield from _lead(options)
    yield from _agents(options)
    yield from _end(options)


def _image(options: ScriptOptions) -> Iterator[Line]:
    """Staged before anything else starts: where it fails, nothing has to be ended."""
    if staged(options.backend):
        requeue = 'scontrol requeue "$SLURM_JOB_ID"; ' * options.backend.slurm.requeue
        yield Line(f"trap '{requeue}exit 0' USR1 TERM", "Warned before there is anything to save")
        yield _staging(options)


def _staging(options: ScriptOptions) -> Line:
    return Line(
        'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --mpi=none bash -c '
        f"{shlex.quote(staging(options.backend))} &\n"
        'wait "$!" || exit 1',
        "backend.slurm.image_folder: every node has its own copy of the image, verified",
    )


def agents_step(options: ScriptOptions) -> int:
    """The number of the agents' step."""
    return bool(staged(options.backend)) + options.backend.slurm.ray


RAY = """\
ray() {
  first=$1 head=$2 port=$3 python=$4; shift 4
  if [ "$SLURMD_NODENAME" = "$first" ]; then
    exec "$python" -m ray.scripts.scripts start --block --head --port="$port" \
      --node-ip-address="$head" --include-dashboard=false --disable-usage-stats
  fi
  until "$python" -m ray.scripts.scripts start --block --address="$head:$port"; do sleep 1; done
}"""


def _ray(options: ScriptOptions) -> Iterator[Line]:
    """A Ray of all nodes beside the agents, for jobs that use it themselves."""
    if not options.backend.slurm.ray:
        return
    before, step = container_words(options.backend)[1], agents_step(options) - 1
    python = PYTHON if options.backend.slurm.container != "none" else options.python
    yield Line(
        f"{RAY}\nexport -f ray\n"
        'ray_host=$(scontrol --oneliner show node "$SLURMD_NODENAME" | '
        "sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')\n"
        f"ray_port=$(({FIRST_PORT + PORTS} + SLURM_JOB_ID % {RAY_PORTS}))\n"
        'srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --no-kill \\\n'
        "  --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --gpu-bind=none --mpi=none \\\n"
        f'  {" ".join(before)} bash -c \'ray "$@"\' - "$SLURMD_NODENAME" "$ray_host" '
        f'"$ray_port" {shlex.quote(python)} > "$run/ray.log" 2>&1 &\n'
        f'until scontrol show step "$SLURM_JOB_ID.{step}" >/dev/null 2>&1; do sleep 0.1; done\n'
        'export RAY_ADDRESS="$ray_host:$ray_port"',
        "backend.slurm.ray: a Ray cluster of these nodes, for the job's own use",
    )


def _where(options: ScriptOptions) -> Iterator[Line]:
    if options.server:
        yield Line(f"url={shlex.quote(options.server)}", "The controller is elsewhere")
        return
    if options.backend.port:
        yield Line(f"port={options.backend.port}", "backend.port")
    else:
        yield Line(
            f"port=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))\n"
            'while (: < "/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done',
            "A port that nobody on this node listens on",
        )
    yield Line(
        'host=$(scontrol --oneliner show node "$SLURMD_NODENAME" | '
        "sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')\n"
        f"url={'https' if options.backend.tls else 'http'}://${{host:-$(hostname)}}:$port",
        "The controller runs on this node, at the address that Slurm itself uses",
    )


def _lead(options: ScriptOptions) -> Iterator[Line]:
    what = '"$run/job.toml"'
    if options.job_toml:
        yield Line(
            f"cat > \"$run/job.toml\" <<'{JOB_MARK}'\n{options.job_toml.rstrip()}\n{JOB_MARK}",
            "The job as submitted; later changes of the file do not touch it",
        )
    words = ["--nodes", options.need.slots, "--spares", options.need.spares]
    words += ["--gpus", options.need.gpus_per_node, "--world-size", options.need.ranks]
    words += ["--policy", options.policy] if options.policy else []
    words += ["--server"] if options.server else []
    given = " ".join(shlex.quote(str(word)) for word in (*words, *options.lead))
    if not options.job_toml:
        what = "-- " + " ".join(map(shlex.quote, options.argv))
    yield Line(
        f'"${{phalanx[@]}}" lead --engine slurm --state "$state" --url "$url" '
        f"{given} {what} &\nlead=$!",
        "Controller, submission, and what Slurm wants of nodes, told to the core",
    )
    yield Line(
        "trap 'kill -USR1 \"$lead\" 2>/dev/null' USR1 TERM",
        "A warning goes to the controller, which has all agents snapshot and flush",
    )


def _agents(options: ScriptOptions) -> Iterator[Line]:
    join = '"$state/join.token"' if not options.server else '"$PHALANX_JOIN_TOKEN_FILE"'
    container, before = container_words(options.backend)
    contained = options.backend.slurm.container != "none"
    feature = ' --feature "slurm_$SLURM_JOB_ID"' if options.server else ""
    feature += "" if options.backend.standby else " --no-standby"
    program = " ".join((*before, f"{PYTHON} -m phalanx" if contained else '"${phalanx[@]}"'))
    yield Line(
        'agents=(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1\n'
        "  --no-kill --kill-on-bad-exit=0 --wait=0\n"
        "  --cpu-bind=none --gpu-bind=none --mem-bind=none --mpi=none"
        + "".join(f"\n  {word}" for word in container)
        + ")",
        "One step for all agents. A node or an agent that ends takes nobody with it,\n"
        "and binding is left to the agents.",
    )
    if options.backend.tls and not options.server:
        yield Line(f'export PHALANX_CA="$state/{TLS_FILE}"', "The controller's own certificate")
    yield Line(
        f"export PHALANX_TOKEN_FILE={join}\n"
        '"${agents[@]}" bash -c \'while :; do\n'
        '  "$@" --state "$0/nodes/$SLURMD_NODENAME"; code=$?\n'
        "  [ $code -ge 128 ] && [ $code -ne 130 ] || exit $code\n"
        'done\' "$state" '
        f'{program} agent --site slurm --join "$url" --gpus {options.need.gpus_per_node}'
        f"{feature} --as-agent &\nstep=$!",
        "An agent that is killed is started again, and adopts what it left running",
    )


def _end(options: ScriptOptions) -> Iterator[Line]:
    yield Line(
        'while :; do wait "$lead"; code=$?; kill -0 "$lead" 2>/dev/null || break; done',
        "wait returns early when a warning comes",
    )
    yield Line(
        f'scancel --signal=INT "$SLURM_JOB_ID.{agents_step(options)}" 2>/dev/null; sleep 0.2\n'
        'for _ in $(seq 100); do kill -0 "$step" 2>/dev/null || break; sleep 0.1; done',
        "Agents end what they started, so that no node lingers in COMPLETING",
    )
    if options.backend.slurm.requeue:
        yield Line(
            "if [ $code -eq 75 ]; then\n"
            '  [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ] || exit 0  # cancelled\n'
            '  scontrol requeue "$SLURM_JOB_ID"\n'
            '  bad=$(cat "$state/exclude" 2>/dev/null)\n'
            '  [ -z "$bad" ] || scontrol update job="$SLURM_JOB_ID" ExcNodeList="$bad"\n'
            "  exit 0\nfi",
            "75: not done. The same job waits for its next turn, away from bad nodes",
        )
    yield Line("exit $code")
