"""The batch script of a job: every line with the reason why it is there."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from phalanx.control.backends.lead import AGAIN, CANCELLED
from phalanx.control.backends.slurm.container import (
    PYTHON,
    container_words,
    staged,
    staging,
)
from phalanx.control.backends.slurm.directives import Directive, ScriptOptions, directives
from phalanx.control.client.client import TLS_FILE

FIRST_PORT, PORTS = 20_000, 20_000  # by the number of the job: two jobs on a node do not meet
RAY_PORTS = 5_000  # behind those
JOB_MARK = "PHALANX_JOB"
# As submit.run_folder counts.
RUN_FOLDER = '''\
run=$first last= number=1
while [ -e "$run" ]; do last=$run number=$((number + 1)); run=$first.$number; done
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || run=${last:-$run}
state=$run/control
mkdir -p -m 700 "$run" "$state"'''

END_LEAD = """\
kill "$lead" 2>/dev/null || exit
for _ in $(seq 100); do kill -0 "$lead" 2>/dev/null || exit; sleep 0.1; done
kill -KILL "$lead" 2>/dev/null"""


def render(options: ScriptOptions, comments: bool) -> str:
    """The script; ``comments``: with the reason above each line."""
    lines = ["#!/bin/bash"]
    for made in (*directives(options), *_body(options)):
        if comments and made.why:
            lines += [f"# {line}" for line in made.why.splitlines()]
        lines.append(made.text)
    return "\n".join(lines) + "\n"


def agents_script(options: ScriptOptions) -> str:
    """Starts agents in an allocation that is there, and waits for them.

    Variables tell url, state and who leads: where that one is killed, the allocation is given back.
    """
    return "\n".join(
        (
            '(while kill -0 "$leader" 2>/dev/null; do sleep 1; done',
            f'scancel --signal=INT "$SLURM_JOB_ID.{agents_step(options)}"',
            'sleep 5; scancel "$SLURM_JOB_ID") &',
            f"phalanx=({shlex.quote(options.python)} -m phalanx)",
            *([_staging(options).text] if staged(options.backend) else []),
            *(line.text for line in _agents(options)),
            'wait "$step"',
        )
    )


def _body(options: ScriptOptions) -> Iterator[Directive]:
    yield Directive("")
    yield Directive("set -u")
    yield from (Directive(line, "backend.slurm.setup") for line in options.backend.slurm.setup)
    yield Directive(f"cd -- {shlex.quote(options.folder)} || exit 1")
    if options.backend.network_hints:
        yield Directive(
            "export NCCL_IB_TIMEOUT=22 NCCL_IB_RETRY_CNT=7 NCCL_IB_QPS_PER_CONNECTION=4\n"
            "export UCX_TLS=rc,sm,self UCX_RC_TIMEOUT=1s",
            "backend.network_hints: links that flap for seconds do not end a collective",
        )
    yield Directive(f"phalanx=({shlex.quote(options.python)} -m phalanx)")
    yield Directive(
        f"first={shlex.quote(str(options.runs))}/slurm-$SLURM_JOB_ID\n{RUN_FOLDER}",
        "The run and its controller's log: shared storage, the same in every turn. A new job\n"
        "whose number Slurm has given before takes a folder of its own",
    )
    yield from _image(options)
    yield from _ray(options)
    yield from _where(options)
    yield from _lead(options)
    yield from _agents(options)
    yield from _end(options)


def _image(options: ScriptOptions) -> Iterator[Directive]:
    """Staged before anything else starts: where it fails, nothing has to be ended."""
    if staged(options.backend):
        requeue = 'scontrol requeue "$SLURM_JOB_ID"; ' * options.backend.slurm.requeue
        yield Directive(
            f"trap '{requeue}exit 0' USR1 TERM", "Warned before there is anything to save"
        )
        yield _staging(options)


def _staging(options: ScriptOptions) -> Directive:
    return Directive(
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


def _ray(options: ScriptOptions) -> Iterator[Directive]:
    """A Ray of all nodes beside the agents, for jobs that use it themselves."""
    if not options.backend.slurm.ray:
        return
    before, step = container_words(options.backend)[1], agents_step(options) - 1
    python = PYTHON if options.backend.slurm.container != "none" else options.python
    yield Directive(
        f"{RAY}\nexport -f ray\n"
        'ray_host=$(scontrol --oneliner show node "$SLURMD_NODENAME" | '
        "sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')\n"
        f"ray_port=$(({FIRST_PORT + PORTS} + SLURM_JOB_ID % {RAY_PORTS}))\n"
        'srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --no-kill \\\n'
        "  --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --gpu-bind=none --mpi=none \\\n"
        f'  {" ".join(before)} bash -c \'ray "$@"\' - "$SLURMD_NODENAME" "$ray_host" '
        f'"$ray_port" {shlex.quote(python)} > "$run/ray.log" 2>&1 &\n'
        "for _ in $(seq 120); do\n"
        f'  scontrol show step "$SLURM_JOB_ID.{step}" >/dev/null 2>&1 && break; sleep 0.5\n'
        "done\n"
        'export RAY_ADDRESS="$ray_host:$ray_port"',
        "backend.slurm.ray: a Ray cluster of these nodes, for the job's own use",
    )


def _where(options: ScriptOptions) -> Iterator[Directive]:
    if options.server:
        yield Directive(
            f"url={shlex.quote(options.server)}\n"
            ': "${PHALANX_JOIN_TOKEN_FILE:?names no file with the join token of that server}"',
            "The controller is elsewhere",
        )
        return
    if options.backend.port:
        yield Directive(f"port={options.backend.port}", "backend.port")
    else:
        yield Directive(
            f"port=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))\n"
            'while (: < "/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done',
            "A port that nobody on this node listens on",
        )
    yield Directive(
        'host=$(scontrol --oneliner show node "$SLURMD_NODENAME" | '
        "sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')\n"
        f"url={'https' if options.backend.tls else 'http'}://${{host:-$(hostname)}}:$port",
        "The controller runs on this node, at the address that Slurm itself uses",
    )


# With --no-kill Slurm lets a job whose script died with its node sit there until its time is over.
# Two of the other nodes look from time to time; more would trouble slurmctld.
WATCHER = """\
if [ -n "${script_node:-}" ] && [ $SLURM_NODEID = 1 -o $SLURM_NODEID = 2 ]; then
  (while sleep 15 && kill -0 $$ 2>/dev/null; do
    case $(timeout 30 scontrol --oneliner show node $script_node) in
      *" State=DOWN"*) $without_script $SLURM_JOB_ID; exit ;;
    esac
  done) &
fi
"""


def _lead(options: ScriptOptions) -> Iterator[Directive]:
    what = '"$run/job.toml"'
    if options.job_toml:
        yield Directive(
            f"cat > \"$run/job.toml\" <<'{JOB_MARK}'\n{options.job_toml.rstrip()}\n{JOB_MARK}",
            "The job as submitted; later changes of the file do not touch it",
        )
    variables = ""
    if options.environment:
        variables = ' --env-file "$run/environment"'
        yield Directive(
            f"cat > \"$run/environment\" <<'{JOB_MARK}'\n{options.environment}{JOB_MARK}",
            "Variables of the program, in a folder that is its owner's alone",
        )
    argv = ["--nodes", options.need.slots, "--spares", options.need.spares]
    argv += ["--gpus", options.need.gpus_per_node, "--world-size", options.need.ranks]
    argv += ["--policy", options.policy] if options.policy else []
    argv += ["--server"] if options.server else []
    given = " ".join(shlex.quote(str(word)) for word in (*argv, *options.lead))
    if not options.job_toml:
        what = "-- " + " ".join(map(shlex.quote, options.argv))
    yield Directive(
        f'"${{phalanx[@]}}" lead --engine slurm --state "$state" --url "$url" '
        f"{given}{variables} {what} &\nlead=$!",
        "Controller, submission, and what Slurm wants of nodes, told to the core",
    )
    yield Directive(
        "trap 'kill -USR1 \"$lead\" 2>/dev/null' USR1 TERM",
        "A warning goes to the controller, which has all agents snapshot and flush",
    )
    yield Directive(
        f"trap '{END_LEAD}' EXIT", "However this script ends: nobody leads on without it"
    )
    lost = "scontrol requeue" if options.backend.slurm.requeue else "scancel"
    yield Directive(
        f'export script_node=$SLURMD_NODENAME without_script="{lost}"',
        "Should this node die, others see to the job: with --no-kill Slurm does not",
    )


def _agents(options: ScriptOptions) -> Iterator[Directive]:
    join = '"$state/join.token"' if not options.server else '"$PHALANX_JOIN_TOKEN_FILE"'
    container, before = container_words(options.backend)
    contained = options.backend.slurm.container != "none"
    feature = ' --feature "slurm_$SLURM_JOB_ID"' if options.server else ""
    feature += "" if options.backend.standby else " --no-standby"
    program = " ".join((*before, f"{PYTHON} -m phalanx" if contained else '"${phalanx[@]}"'))
    if options.backend.slurm.array or any(
        "--array" in line for line in options.backend.slurm.options
    ):
        yield Directive(
            "export PHALANX_ARRAY_JOB=$SLURM_ARRAY_JOB_ID\n"
            "export PHALANX_ARRAY_INDEX=$SLURM_ARRAY_TASK_ID\n"
            "export PHALANX_ARRAY_COUNT=$SLURM_ARRAY_TASK_COUNT",
            "Which member of the array it is, as on other engines",
        )
    yield Directive(
        'agents=(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1\n'
        "  --no-kill --kill-on-bad-exit=0 --wait=0\n"
        "  --cpu-bind=none --gpu-bind=none --mem-bind=none --mpi=none"
        + "".join(f"\n  {word}" for word in container)
        + ")",
        "One step for all agents. A node or an agent that ends takes nobody with it,\n"
        "and binding is left to the agents.",
    )
    if options.backend.tls and not options.server:
        yield Directive(
            f'export PHALANX_CA="$state/{TLS_FILE}"', "The controller's own certificate"
        )
    yield Directive(
        f"export PHALANX_TOKEN_FILE={join}\n"
        '"${agents[@]}" bash -c \'' + WATCHER + "while :; do\n"
        '  "$@" --state "$0/nodes/$SLURMD_NODENAME"; code=$?\n'
        "  [ $code -ge 128 ] && [ $code -ne 130 ] || exit $code\n"
        'done\' "$state" '
        f'{program} agent --site slurm --join "$url" --gpus {options.need.gpus_per_node}'
        f"{feature} --as-agent &\nstep=$!",
        "An agent that is killed is started again, and adopts what it left running",
    )


def _end(options: ScriptOptions) -> Iterator[Directive]:
    yield Directive(
        'while :; do wait "$lead"; code=$?; kill -0 "$lead" 2>/dev/null || break; done',
        "wait returns early when a warning comes",
    )
    yield Directive(
        f"[ $code -ne {CANCELLED} ] || exit $code  # Slurm itself ends the agents\n"
        f'scancel --signal=INT "$SLURM_JOB_ID.{agents_step(options)}" 2>/dev/null; sleep 0.2\n'
        'for _ in $(seq 100); do kill -0 "$step" 2>/dev/null || break; sleep 0.1; done',
        "Agents end what they started, so that no node lingers in COMPLETING",
    )
    if options.backend.slurm.requeue:
        yield Directive(
            f"if [ $code -eq {AGAIN} ]; then\n"
            '  [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ] || exit 0  # cancelled\n'
            '  scontrol requeue "$SLURM_JOB_ID"\n'
            '  bad=$(cat "$state/exclude" 2>/dev/null)\n'
            '  [ -z "$bad" ] || scontrol update job="$SLURM_JOB_ID" ExcNodeList="$bad"\n'
            "  exit 0\nfi",
            f"{AGAIN}: not done. The same job waits for its next turn, away from bad nodes",
        )
    yield Directive("exit $code")
