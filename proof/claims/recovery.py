"""What breaks, and how soon training goes on."""

from __future__ import annotations

from proof.claim import Claim, Figure, Need

QUIET = (Need.QUIET,)


def worker_figures(kills: int, *more: Figure) -> tuple[Figure, ...]:
    """What is read off so many kills of workers."""
    return (
        Figure("worker_recovered", "kills that were recovered from", at_least=kills, timed=False),
        # It holds a step, whose own time differs by a fifth between quiet runs on two cores.
        Figure(
            "worker_median",
            "until the next committed step, median",
            "s",
            at_most=1.3,
            regression=0.3,
        ),
        Figure("worker_worst", "the worst", "s", at_most=3.0, regression=1.0),
        *more,
        Figure("worker_steps_again", "committed steps made again", at_most=0, timed=False),
    )


RECOVERY = (
    Claim(
        name="recovery",
        says="Thirty times in one job a worker is killed, and each time the next step is committed "
        "within about a second.",
        command="python -m benchmarks.recovery --only worker --times 30",
        figures=worker_figures(
            30,
            Figure(
                "worker_detected", "until it was noticed, median", "s", at_most=0.5, regression=1.0
            ),
        ),
        minutes=3,
        needs=QUIET,
    ),
    Claim(
        name="recovery-quick",
        says="The same eight times, twice for each of the four workers, with every change.",
        command="python -m benchmarks.recovery --only worker --times 8",
        figures=worker_figures(8),
        minutes=1,
        needs=QUIET,
        quick=True,
    ),
    Claim(
        name="recovery-kinds",
        says="Thirty times also a node, a keeper, an agent, the controller and a stopped rank.",
        command="python -m benchmarks.recovery --only node,keeper,agent,controller,stopped "
        "--times 30",
        figures=(
            Figure("node_recovered", "nodes killed and recovered from", at_least=30, timed=False),
            Figure("node_median", "node: until the next committed step, median", "s", at_most=3.0),
            Figure("node_worst", "node: the worst", "s", at_most=10.0, regression=2.0),
            Figure(
                "keeper_recovered", "keepers killed and recovered from", at_least=30, timed=False
            ),
            Figure("keeper_median", "keeper: median", "s", at_most=5.0),
            Figure("keeper_worst", "keeper: the worst", "s", at_most=10.0, regression=2.0),
            Figure("agent_recovered", "agents killed and recovered from", at_least=30, timed=False),
            Figure("agent_median", "agent: median", "s", at_most=3.0, regression=0.5),
            Figure("agent_worst", "agent: the worst", "s", at_most=10.0, regression=2.0),
            Figure(
                "controller_recovered",
                "controllers killed and recovered from",
                at_least=30,
                timed=False,
            ),
            Figure("controller_median", "controller: median", "s", at_most=3.0, regression=0.5),
            Figure("controller_worst", "controller: the worst", "s", at_most=10.0, regression=2.0),
            Figure(
                "stopped_recovered", "stopped ranks that were replaced", at_least=30, timed=False
            ),
            Figure("stopped_median", "stopped rank: median", "s", at_most=12.0),
        ),
        minutes=25,
        needs=QUIET,
    ),
    Claim(
        name="recovery-choice",
        says="The way out that is predicted to lose least beats a fixed order of rungs, over 200 "
        "incidents of each simulated fleet.",
        command="python -m benchmarks.recovery_choice",
        figures=(
            Figure("incidents", "the fewest incidents of a fleet", at_least=200, timed=False),
            Figure(
                "gain_mean",
                "effective time gained over the fixed order, mean of the fleets",
                "%",
                at_least=0.0,
                timed=False,
            ),
            Figure(
                "gain_least",
                "the same of the fleet that gains least",
                "%",
                at_least=-0.01,
                timed=False,
            ),
            Figure(
                "slow_starts_points",
                "points of effective time gained where starts take ten minutes, by going on "
                "without the lost replica",
                at_least=25,
                timed=False,
            ),
            Figure(
                "decision_ms",
                "the longest decision for a gang of 98,304 GPUs",
                "ms",
                at_most=20,
                regression=0.5,
            ),
            Figure("violations", "violations", at_most=0, timed=False),
        ),
        minutes=6,
        needs=QUIET,
    ),
    Claim(
        name="verification",
        says="Ranks recompute each other's gradients: in a job that is sharded without replicas "
        "(ZeRO 3) a flipped bit is found before it reaches the weights, and its rank is named.",
        command="python -m benchmarks.verification",
        figures=(
            Figure("flips", "gradients with a flipped bit", at_least=20, timed=False),
            Figure("caught", "of them found", at_least=20, timed=False),
            Figure("named", "flips whose rank was named rightly", at_least=20, timed=False),
            Figure("false_alarms", "alarms at undisturbed steps", at_most=0, timed=False),
            # A difference of two times: it varies by more than either of them.
            Figure(
                "cost_share",
                "cost, as a share of the time, when one step in 200 is verified",
                "%",
                at_most=0.01,
                regression=0.5,
            ),
        ),
        minutes=1,
        needs=QUIET,
    ),
    Claim(
        name="endurance",
        says="200 kills of all kinds in twenty minutes leave no trace: the job is done, with the "
        "losses and weights of an undisturbed run, and nothing has grown.",
        command="python -m benchmarks.endurance --minutes 20 --kills 200",
        figures=(
            Figure("kills", "kills that were recovered from", at_least=200, timed=False),
            Figure("done", "jobs that ended well", at_least=1, timed=False),
            Figure("differences", "losses and weights that differ", at_most=0, timed=False),
            Figure("growth", "the most that a process grew", "%", at_most=0.05, timed=False),
            Figure("worst", "the longest recovery", "s", at_most=30.0, regression=2.0),
        ),
        minutes=35,
        needs=QUIET,
    ),
    Claim(
        name="snapshots",
        says="A snapshot of every step in two nodes' memory costs a step little.",
        command="python -m benchmarks.recovery --only snapshots,snapshots-demo",
        figures=(
            Figure(
                "stall_share", "a step held up, steps of 0.2 s", "%", at_most=0.03, regression=0.5
            ),
            Figure("step_ratio", "longer steps, steps of 0.2 s", "x", at_most=1.10),
            Figure("demo_step_ratio", "longer steps, the demo's", "x", at_most=1.05),
        ),
        minutes=4,
        needs=QUIET,
    ),
    Claim(
        name="peers",
        says="The same kill under torchrun and torchft.",
        command="python -m benchmarks.recovery --only worker,torchrun,torchft --times 5 --peers",
        figures=(
            Figure("torchrun_median", "torchrun: until the next step, median", "s"),
            Figure(
                "torchrun_ratio",
                "times as long as a killed worker here",
                "x",
                at_least=3.0,
                regression=0.3,
            ),
            # No bars and no ratio: torchft goes on with one replica fewer, and how long that takes
            # depends on where in its step the kill fell.
            Figure(
                "torchft_median",
                "torchft, with one replica fewer: the same, median",
                "s",
                timed=False,
            ),
            Figure("torchft_worst", "torchft: the longest", "s", timed=False),
        ),
        minutes=5,
        needs=QUIET,
    ),
    Claim(
        name="chaos",
        says="Simulated clusters under random faults with the shipped policy: no rule is broken.",
        command="python -m benchmarks.chaos --seeds 1000",
        figures=(
            Figure("seeds", "seeds played", at_least=1000, timed=False),
            Figure("violations", "violations", at_most=0, timed=False),
        ),
        minutes=3,
    ),
    Claim(
        name="chaos-quick",
        says="The same for a few seeds, with every change.",
        command="python -m benchmarks.chaos --seeds 60",
        figures=(
            Figure("seeds", "seeds played", at_least=60, timed=False),
            Figure("violations", "violations", at_most=0, timed=False),
        ),
        minutes=0.5,
        quick=True,
    ),
    Claim(
        name="chaos-live",
        says="Random plans of harm on real processes: losses and weights are the same bit for bit, "
        "and nothing stays behind.",
        command="python -m benchmarks.chaos --live 5",
        figures=(
            Figure("plans", "plans played", at_least=5, timed=False),
            Figure("plans_bad", "plans that lost something", at_most=0, timed=False),
        ),
        minutes=8,
    ),
    Claim(
        name="demo",
        says="The demo's curve is the undisturbed run's, after a killed worker and a killed node.",
        command="python -m benchmarks.demo",
        figures=(
            Figure("identical", "losses and weights identical (1: yes)", at_least=1, timed=False),
            Figure(
                "worker_seconds",
                "killed worker: until the next committed step",
                "s",
                at_most=3.0,
                regression=1.0,
            ),
            Figure(
                "node_seconds",
                "killed node: until the next committed step",
                "s",
                at_most=5.0,
                regression=1.0,
            ),
            Figure("seconds", "the whole demo", "s", at_most=180.0, regression=0.25),
        ),
        minutes=2,
        needs=QUIET,
    ),
    Claim(
        name="slurm",
        says="The same job inside a Slurm allocation, beside Slurm's own requeue.",
        command="python -m benchmarks.slurm recovery",
        figures=(
            Figure("worker", "a worker killed", "s", at_most=3.0, regression=0.5),
            Figure("node", "a node killed", "s", at_most=6.0, regression=0.5),
            Figure("hang", "a worker stopped", "s", at_most=8.0, regression=0.5),
            Figure("controller", "the controller killed", "s", at_most=3.0, regression=2.0),
            Figure(
                "times_faster",
                "Slurm's requeue, times the worst of these",
                "x",
                at_least=5.0,
                regression=0.5,
            ),
        ),
        minutes=6,
        needs=(Need.QUIET, Need.SLURM, Need.ROOT),
    ),
    Claim(
        name="ray",
        says="The same job on Ray's nodes.",
        command="python -m benchmarks.ray_recovery",
        figures=(
            Figure("worker", "a worker killed", "s", at_most=5.0, regression=0.5),
            Figure("node", "a node killed", "s", at_most=10.0, regression=0.5),
        ),
        minutes=4,
        needs=(Need.QUIET, Need.RAY, Need.ROOT),
    ),
)
