"""What people wait for: the page, metrics, the doctor, the test suite."""

from __future__ import annotations

from proof.claim import Claim, Figure, Need

PEOPLE = (
    Claim(
        name="first-picture",
        says="`git clone`, `make demo`: a newcomer looks at a running job within minutes (packages "
        "in pip's cache).",
        command="python -m benchmarks.first_picture",
        figures=(
            Figure("clone_seconds", "until it is cloned", "s", regression=1.0),
            Figure("installed_seconds", "until it is installed", "s", regression=0.5),
            Figure("link_seconds", "until the link to the page", "s", regression=0.5),
            Figure(
                "picture_seconds", "until the job is seen there", "s", at_most=180, regression=0.5
            ),
        ),
        minutes=4,
        needs=(Need.QUIET, Need.CHROMIUM),
    ),
    Claim(
        name="page",
        says="The page shows 12,500 nodes without making anyone wait.",
        command="python -m benchmarks.page",
        figures=(
            Figure(
                "fleet_view_seconds",
                "from an empty tab to the fleet",
                "s",
                at_most=1.0,
                regression=0.3,
            ),
            Figure("jobs_view_seconds", "to the jobs", "s", at_most=1.0, regression=0.3),
            Figure("runs_view_seconds", "to 1,000 runs", "s", at_most=1.0, regression=0.3),
            Figure("frame_ms", "a frame while the map is panned, median", "ms", at_most=20.0),
            Figure("fleet_ms", "the fleet over HTTP", "ms", at_most=50.0, regression=0.5),
            Figure(
                "past_ms", "the fleet at a moment of the past", "ms", at_most=100.0, regression=0.5
            ),
        ),
        minutes=3,
        needs=(Need.QUIET, Need.CHROMIUM),
    ),
    Claim(
        name="metrics",
        says="Measuring every rank of every step costs next to nothing.",
        command="python -m benchmarks.observe --days 0.5",
        figures=(
            Figure(
                "ingest_share",
                "1,000 ranks, ten metrics a second each, of a core",
                "%",
                at_most=0.05,
                regression=0.5,
            ),
            Figure(
                "fleet_share",
                "100,000 ranks, aggregated by node, of a core",
                "%",
                at_most=0.15,
                regression=0.5,
            ),
            Figure(
                "rank_us",
                "a rank's own part of a step with 200 collectives",
                "µs",
                at_most=200.0,
                regression=0.5,
            ),
        ),
        minutes=3,
        needs=(Need.QUIET,),
    ),
    Claim(
        name="doctor",
        says="`phalanx doctor node` says within seconds what a node's settings cost.",
        command="python -m benchmarks.doctor",
        figures=(
            Figure("seconds", "all checks of settings, median", "s", at_most=3.0, regression=0.5),
            Figure("checked", "of 46 points that a node decides", at_least=44, timed=False),
            Figure("served", "of 72 points that tools decide, served", at_least=60, timed=False),
        ),
        minutes=1,
        needs=(Need.QUIET,),
    ),
    Claim(
        name="job-array",
        says="An array of 10,000 jobs is submitted as fast as one, and stays one line of `ps`.",
        command="python -m benchmarks.job_array",
        figures=(
            Figure(
                "submit_seconds",
                "`phalanx submit --array 0-9999`, median",
                "s",
                at_most=2.0,
                regression=0.5,
            ),
            Figure("slowest_submit_seconds", "the slowest of five", "s", at_most=2.0),
            Figure("list_seconds", "`phalanx ps` with them", "s", at_most=2.0, regression=0.5),
            Figure("cancel_seconds", "all of them cancelled", "s", at_most=5.0, regression=0.5),
            Figure("lines", "lines of an array in `ps`", at_most=1, timed=False),
            Figure("jobs", "jobs of an array", at_least=10_000, timed=False),
        ),
        minutes=1,
        needs=(Need.QUIET,),
    ),
    Claim(
        name="pipeline",
        says="One file leads from raw text to a registered model; killed at random it repeats no "
        "finished step and comes to the same bytes.",
        command="python -m benchmarks.pipeline --kills 20",
        figures=(
            Figure("seconds", "the whole example", "s", at_most=300, regression=0.3),
            Figure("cached_seconds", "once more, all of it cached", "s", at_most=5, regression=0.3),
            Figure("kills", "kills at random moments", at_least=20, timed=False),
            Figure("repeated", "finished steps that were run again", at_most=0, timed=False),
            Figure("different", "outputs with other bytes", at_most=0, timed=False),
        ),
        minutes=8,
        needs=(Need.QUIET,),
    ),
    Claim(
        name="sweep",
        says="Successive halving finds the best of 27 real trials in a fraction of their "
        "time, also when it is killed; a sweep of 10,000 trials runs through the core.",
        command="python -m benchmarks.sweep",
        figures=(
            Figure(
                "loss_above_best",
                "its best loss above that of all trials",
                "%",
                at_most=0.01,
                timed=False,
            ),
            Figure(
                "time_share",
                "its time, of all trials to their end",
                "%",
                at_most=0.3,
                regression=0.2,
            ),
            Figure(
                "step_share",
                "its steps, of all trials to their end",
                "%",
                at_most=0.3,
                timed=False,
            ),
            Figure("kills", "kills at random moments", at_least=1, timed=False),
            Figure("twice", "trials that were run twice", at_most=0, timed=False),
            Figure("simulated_trials", "simulated trials", at_least=10_000, timed=False),
            Figure("simulated_cpu_seconds", "CPU for them", "s", at_most=120, regression=0.3),
            Figure(
                "simulated_above_best",
                "their best loss above the best possible",
                "%",
                at_most=0.01,
                timed=False,
            ),
            Figure("simulated_violations", "rules that were broken", at_most=0, timed=False),
            Figure("simulated_wrong_rungs", "rungs of another size", at_most=0, timed=False),
        ),
        minutes=8,
        needs=(Need.QUIET,),
    ),
    Claim(
        name="suite",
        says="All tests of `make test` run within twelve minutes on two cores.",
        command="python -m benchmarks.suite",
        figures=(
            Figure("passed", "tests that passed", at_least=9_000, timed=False),
            Figure("failed", "tests that failed", at_most=0, timed=False),
            Figure("minutes", "minutes", "min", at_most=12.0, regression=0.2),
        ),
        minutes=12,
        needs=(Need.QUIET,),
    ),
)
