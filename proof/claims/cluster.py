"""The planner, the cluster core, the simulator and the controller at fleet size."""

from __future__ import annotations

from proof.claim import Claim, Figure, Need

QUIET = (Need.QUIET,)

CLUSTER = (
    Claim(
        name="plan",
        says="A plan for any preset on any catalogued cluster is found in seconds, and published "
        "runs that the planner was not fitted to are predicted.",
        command="python -m benchmarks.plan",
        figures=(
            Figure(
                "slowest_seconds",
                "the slowest search of all presets and clusters",
                "s",
                at_most=10.0,
            ),
            Figure("mappings_per_second", "mappings evaluated", "/s", at_least=20_000),
            Figure(
                "dense_error",
                "step time of held-out dense runs, mean error",
                "%",
                at_most=0.08,
                timed=False,
            ),
            Figure(
                "moe_error",
                "step time of held-out mixtures of experts, mean error",
                "%",
                at_most=0.30,
                timed=False,
            ),
            Figure(
                "unnamed_dense_error",
                "the same of dense runs whose software nobody named",
                "%",
                at_most=0.09,
                timed=False,
            ),
            Figure(
                "unnamed_dense_covered",
                "of these, in the 80 % interval",
                "%",
                at_least=0.75,
                timed=False,
            ),
            Figure(
                "unnamed_moe_error",
                "the same of mixtures of experts, unnamed",
                "%",
                at_most=0.20,
                timed=False,
            ),
            Figure(
                "unnamed_moe_covered",
                "of these, in the 80 % interval",
                "%",
                at_least=0.75,
                timed=False,
            ),
            Figure(
                "pairs_in_order",
                "pairs of measured mappings in the right order, named or not",
                "%",
                at_least=0.80,
                timed=False,
            ),
            Figure(
                "regret",
                "how much longer the pick of a measured group takes, named or not",
                "%",
                at_most=0.03,
                timed=False,
            ),
            Figure(
                "false_oom",
                "runs that ran and are said not to fit, unnamed",
                "%",
                at_most=0.10,
                timed=False,
            ),
            Figure("rows", "published runs compared", at_least=100, timed=False),
        ),
        minutes=4,
        needs=QUIET,
    ),
    Claim(
        name="core",
        says="One process decides for 12,500 nodes.",
        command="python -m benchmarks.cluster",
        figures=(
            Figure("events_per_second", "events handled", "/s", at_least=20_000),
            Figure("replay_seconds", "replay of a million events", "s", at_most=60.0),
            Figure("restore_seconds", "restart from a snapshot", "s", at_most=2.0, regression=0.3),
            Figure(
                "liveness_share",
                "heartbeats of the fleet, of a core",
                "%",
                at_most=0.01,
                regression=0.5,
            ),
        ),
        minutes=3,
        needs=QUIET,
    ),
    Claim(
        name="core-quick",
        says="The same on a tenth of the events, with every change.",
        command="python -m benchmarks.cluster --events 100000",
        figures=(
            Figure("events_per_second", "events handled", "/s", at_least=15_000, regression=0.25),
            Figure("restore_seconds", "restart from a snapshot", "s", at_most=2.0, regression=0.5),
        ),
        minutes=0.5,
        needs=QUIET,
        quick=True,
    ),
    Claim(
        name="placement",
        says="98,304 GPUs are placed at once, and gangs talk over less network than by the tree "
        "rule.",
        command="python -m benchmarks.placement",
        figures=(
            Figure(
                "giant_seconds",
                "placing 98,304 GPUs on a fragmented fleet, median",
                "s",
                at_most=0.5,
                regression=0.5,
            ),
            Figure(
                "cost_mean",
                "predicted communication, of the tree rule's, fragmented fleets",
                "x",
                at_most=0.9,
                timed=False,
            ),
            Figure("cost_median", "the same, median", "x", at_most=1.0, timed=False),
        ),
        minutes=4,
        needs=QUIET,
    ),
    Claim(
        name="queue",
        says="The queue keeps up with 50,000 jobs that wait for 12,500 nodes.",
        command="python -m benchmarks.queue_decisions --seconds 5",
        figures=(
            Figure(
                "decisions_per_second", "decisions, 200 jobs ending at a time", "/s", at_least=2_000
            ),
            Figure("decisions_per_second_quotas", "the same with quotas", "/s", at_least=2_000),
        ),
        minutes=3,
        needs=QUIET,
    ),
    Claim(
        name="queue-quick",
        says="The same with 5,000 jobs, with every change.",
        command="python -m benchmarks.queue_decisions --nodes 2000 --pending 5000 --seconds 1",
        figures=(
            Figure(
                "decisions_per_second",
                "decisions, 200 jobs ending at a time",
                "/s",
                at_least=2_000,
                regression=0.25,
            ),
        ),
        minutes=0.5,
        needs=QUIET,
        quick=True,
    ),
    Claim(
        name="policies",
        says="With the default policy jobs of the Philly trace wait no longer than under EASY "
        "backfill on the same packing, and the trace plays through the core in a minute.",
        command="python -m benchmarks.policies",
        figures=(
            Figure(
                "mean_wait",
                "mean wait, of EASY's, the worst of a stretch and all on 400, 512 and 560 GPUs",
                "x",
                at_most=1.0,
                timed=False,
            ),
            Figure("p95_wait", "the same of the 95th percentile", "x", at_most=1.0, timed=False),
            Figure(
                "longest_wait",
                "the longest wait beyond queue.starving_ns, of EASY's longest",
                "x",
                at_most=1.25,
                timed=False,
            ),
            Figure(
                "longest_of_easy",
                "the longest wait, of EASY's longest",
                "x",
                at_most=2.0,  # what docs/concepts/queue.md says that the default costs
                timed=False,
            ),
            Figure("whole_seconds", "all jobs on 512 GPUs, CPU time", "s", at_most=60.0),
            Figure("jobs", "jobs of them", at_least=29_000, timed=False),
        ),
        minutes=8,
        needs=(Need.QUIET, Need.TRACE),
    ),
    Claim(
        name="estimates",
        says="A pending job is told when it starts, and asking costs little.",
        command="python -m benchmarks.estimates --days 3 --seed 1",
        figures=(
            # One path of a queue at the edge of its capacity: seeds differ from 1 to 20 minutes.
            Figure("off_median_minutes", "off, median", "min", at_most=30.0, timed=False),
            Figure("later_share", "started later than said", "%", at_most=0.25, timed=False),
        ),
        minutes=3,
    ),
    Claim(
        name="simulate",
        says="Months of 100,000 GPUs are simulated in a minute, through the code that runs live.",
        command="python -m benchmarks.simulate",
        figures=(
            Figure("llama3_54d_seconds", "54 days of 16,384 GPUs, a seed", "s", at_most=30.0),
            Figure(
                "llama3_54d_interruptions",
                "interruptions (419 were published)",
                at_least=380,
                timed=False,
            ),
            Figure(
                "llama3_54d_ettr", "effective time of the same", "%", at_least=0.93, timed=False
            ),
            Figure("100k_1t_seconds", "a month of 100,000 GPUs, a seed", "s", at_most=120.0),
            Figure("100k_1t_ettr", "effective time of the same", "%", at_least=0.93, timed=False),
            Figure("violations", "violations", at_most=0, timed=False),
        ),
        minutes=3,
        needs=QUIET,
    ),
    Claim(
        name="simulate-many-jobs",
        says="Eleven months of RSC-1 at its full size, with all jobs of a node and more, are "
        "played on one core in less than ten minutes.",
        command="python -m benchmarks.simulate --many-jobs",
        figures=(
            Figure("rsc_11mo_seconds", "334 days of 16,384 GPUs, a seed", "s", at_most=570.0),
            Figure("rsc_11mo_jobs", "jobs that came", at_least=277_000, timed=False),
            Figure("violations", "violations", at_most=0, timed=False),
        ),
        minutes=10,
        needs=QUIET,
    ),
    Claim(
        name="simulate-quick",
        says="Two days of 100,000 GPUs, with every change.",
        command="python -m benchmarks.simulate --quick",
        figures=(
            Figure(
                "100k_1t_seconds", "two days of 100,000 GPUs", "s", at_most=10.0, regression=0.25
            ),
            Figure("violations", "violations", at_most=0, timed=False),
        ),
        minutes=0.5,
        needs=QUIET,
        quick=True,
    ),
    Claim(
        name="detection",
        says="A slow rank among 98,304 is named within 20 steps, nobody else is, and a flipped bit "
        "is localised.",
        command="python -m benchmarks.detection --days 1 --trials 1",
        figures=(
            Figure(
                "named_share",
                "ranks 1.12 times as slow or slower that were named",
                "%",
                at_least=1.0,
                timed=False,
            ),
            Figure("others_accused", "others accused", at_most=0, timed=False),
            Figure("alarms", "alarms in a day of clean noise", at_most=1, timed=False),
            Figure("bits_localised", "flipped bits localised, of 20", at_least=20, timed=False),
        ),
        minutes=4,
    ),
    Claim(
        name="controller",
        says="One server holds 12,500 agents.",
        command="python -m benchmarks.controller",
        figures=(
            Figure(
                "heartbeat_share",
                "2,500 heartbeats a second, of a core",
                "%",
                at_most=0.2,
                regression=0.5,
            ),
            Figure(
                "connect_seconds",
                "the whole fleet connects for the first time",
                "s",
                at_most=15.0,
                regression=0.5,
            ),
            Figure(
                "order_median_ms",
                "an order until the node has it, median",
                "ms",
                at_most=20,
                regression=0.5,
            ),
            Figure(
                "order_p99_ms",
                "an order until the node has it, 99th percentile",
                "ms",
                at_most=250,
                regression=1.0,
            ),
            Figure(
                "failures_handled_seconds",
                "1,000 nodes vanish at once: all handled",
                "s",
                at_most=5.0,
                regression=0.5,
            ),
            Figure(
                "restart_seconds",
                "killed and restarted: all agents are back",
                "s",
                at_most=10.0,
                regression=0.5,
            ),
        ),
        minutes=3,
        needs=(Need.QUIET, Need.FILES),
    ),
    Claim(
        name="longest-handling",
        says="No order holds the core of 12,500 nodes up, whatever a person asks for.",
        command="python -m benchmarks.hostile_orders",
        figures=(
            Figure(
                "longest_ms",
                "the longest handling of one event",
                "ms",
                at_most=200,
                regression=0.5,
            ),
        ),
        minutes=0.5,
        needs=QUIET,
    ),
    Claim(
        name="slow-clients",
        says="10,000 idle or slow connections without a token keep nobody else waiting.",
        command="python -m benchmarks.slow_clients",
        figures=(
            # One request in a hundred meets an accept of many connections, or does not.
            Figure(
                "p99_ms",
                "requests of others meanwhile, 99th percentile",
                "ms",
                at_most=50,
                regression=1.0,
            ),
            Figure("server_share", "the server meanwhile, of a core", "%", at_most=1.0),
        ),
        minutes=2,
        needs=(Need.QUIET, Need.FILES),
    ),
)
