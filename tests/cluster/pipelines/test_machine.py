"""What a run does next: order, cache, retries, limits, gates, people; and after crashes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.pipelines.events import ENDED, RunCancelled, TaskState, TimePassed
from phalanx.cluster.units import SECOND_NS
from tests.cluster.pipelines.played_run import PlayedRun
from tests.examples import examples


def step(**keys: Any) -> dict[str, Any]:
    return {"command": ["true"], **keys}


CHAIN = {
    "raw": step(inputs={"text": "text.txt"}, outputs={"out": "raw"}),
    "middle": step(inputs={"of": "raw.out"}, outputs={"out": "middle"}),
    "last": step(inputs={"of": "middle.out"}, outputs={"out": "last"}),
}
EVAL = {
    "eval": step(outputs={"scores": "scores.json"}, scores=["loss"]),
    "gate": {"kind": "gate", "require": ["eval.loss <= 3"], "model": "toy"},
    "export": step(after=["gate"]),
}


def test_steps_run_in_the_order_of_what_they_read() -> None:
    run = PlayedRun(CHAIN).begin()
    for name in CHAIN:
        assert list(run.running) == [name]
        run.finish(name)
    assert run.machine.state == "done"


def test_a_second_run_of_the_same_is_cached_and_a_changed_file_runs_what_reads_it() -> None:
    first = PlayedRun(CHAIN).begin()
    for name in CHAIN:
        first.finish(name)
    second = PlayedRun(CHAIN, store=first.store).begin()
    assert set(second.states().values()) == {TaskState.CACHED} and second.started == []
    changed = PlayedRun(CHAIN, store=first.store, inputs={"text.txt": "other"}).begin()
    assert changed.started == ["raw"]


def test_another_command_runs_that_step_and_those_after_it() -> None:
    first = PlayedRun(CHAIN).begin()
    for name in CHAIN:
        first.finish(name)
    other = {**CHAIN, "middle": {**CHAIN["middle"], "command": ["false"]}}
    second = PlayedRun(other, store=first.store).begin()
    assert second.started == ["middle"]
    assert second.states()["raw"] is TaskState.CACHED


def test_limits_and_retries_are_no_part_of_what_a_result_depends_on() -> None:
    first = PlayedRun(CHAIN).begin()
    for name in CHAIN:
        first.finish(name)
    other = {name: {**each, "retries": 3, "timeout_minutes": 5} for name, each in CHAIN.items()}
    assert PlayedRun(other, store=first.store).begin().started == []


def test_a_failure_is_tried_again_after_a_pause_that_doubles() -> None:
    run = PlayedRun({"a": step(retries=2, backoff_seconds=4)}).begin()
    run.fail("a")
    assert run.machine.next_time_ns() == run.time_ns + 4 * SECOND_NS
    run.pass_time(3.9)
    assert not run.running
    run.pass_time(0.1)
    run.fail("a")
    assert run.machine.next_time_ns() == run.time_ns + 8 * SECOND_NS
    run.pass_time(8)
    run.fail("a", "exit code 7")
    assert run.machine.state == "failed" and run.machine.tasks["a"].reason == "exit code 7"
    assert run.started == ["a"] * 3


def test_what_a_task_used_is_all_of_its_attempts() -> None:
    run = PlayedRun({"a": step(retries=1, backoff_seconds=4)}).begin()
    run.time_ns += 100 * SECOND_NS
    run.fail("a")
    run.pass_time(4)
    progress = run.machine.tasks["a"]
    assert progress.used_ns(run.time_ns) == 100 * SECOND_NS
    assert progress.used_ns(run.time_ns + SECOND_NS) == 101 * SECOND_NS  # the second one runs
    run.pass_time(10)
    run.crash()  # and is lost
    run.time_ns += 5 * SECOND_NS
    run.finish("a")
    progress = run.machine.tasks["a"]
    assert progress.used_ns(run.time_ns) == run.machine.spent_ns == 115 * SECOND_NS
    assert progress.took_ns == 5 * SECOND_NS


def test_one_that_waits_for_its_turn_after_its_pause_waits_for_no_time() -> None:
    run = PlayedRun({"a": step(retries=1, backoff_seconds=4), "b": step()}).begin()
    run.fail("a")
    assert list(run.running) == ["b"]
    run.pass_time(5)
    assert run.states()["a"] is TaskState.READY and run.machine.next_time_ns() is None
    run.finish("b")
    assert list(run.running) == ["a"]


def test_the_time_in_which_nobody_drove_a_run_is_not_spent() -> None:
    run = PlayedRun({"a": step()}, budget={"hours": 1.0}).begin()
    run.time_ns += 100 * SECOND_NS
    run.feed(TimePassed(run.time_ns))
    run.time_ns += 86_400 * SECOND_NS
    run.crash()
    assert run.machine.spent_ns == 100 * SECOND_NS and list(run.running) == ["a"]


def test_what_needs_a_failed_step_is_blocked_and_others_go_on() -> None:
    run = PlayedRun({**CHAIN, "other": step(), "told": step(after=["last:fail"])}, parallel=2)
    run.begin().fail("raw")
    run.finish("other")
    run.finish("told")
    assert run.states() == {
        "raw": "failed",
        "middle": "blocked",
        "last": "blocked",
        "other": "done",
        "told": "done",
    }


def test_a_step_after_a_failure_is_skipped_where_nothing_failed() -> None:
    run = PlayedRun({"a": step(), "told": step(after=["a:fail"])}).begin()
    run.finish("a")
    assert run.states()["told"] is TaskState.SKIPPED and run.machine.state == "done"


def test_an_attempt_is_stopped_at_its_time_limit() -> None:
    run = PlayedRun({"a": step(timeout_minutes=2, retries=1)}).begin()
    assert run.machine.next_time_ns() == run.time_ns + 120 * SECOND_NS
    run.pass_time(120)
    assert run.stopped == ["a"] and run.machine.next_time_ns() is None
    run.fail("a", "it was stopped")
    assert run.machine.tasks["a"].reason == "took more than 2 minutes"
    assert run.states()["a"] is TaskState.RETRYING


def test_nothing_starts_once_the_budget_is_spent_and_what_runs_is_stopped() -> None:
    steps = {"a": step(gpus=2), "b": step(gpus=2), "c": step(after=["b"])}
    run = PlayedRun(steps, budget={"gpu_hours": 1.0}).begin()
    assert run.machine.next_time_ns() == run.time_ns + 1800 * SECOND_NS
    run.time_ns += 1000 * SECOND_NS
    run.finish("a")
    assert run.machine.next_time_ns() == run.time_ns + 800 * SECOND_NS
    run.pass_time(800)
    assert run.stopped == ["b"]
    run.fail("b", "it was stopped")
    assert run.machine.tasks["b"].reason == "the budget is spent"
    assert run.states()["c"] is TaskState.BLOCKED and run.machine.state == "failed"


def test_a_gate_lets_through_what_scores_well_and_names_the_score_that_does_not() -> None:
    good = PlayedRun(EVAL, scores={"eval": {"loss": 2.5}}).begin()
    good.finish("eval")
    assert good.states()["gate"] is TaskState.DONE and list(good.running) == ["export"]
    bad = PlayedRun(EVAL, scores={"eval": {"loss": 3.5}}).begin()
    bad.finish("eval")
    assert "eval.loss is 3.5" in bad.machine.tasks["gate"].reason
    assert bad.states()["export"] is TaskState.BLOCKED and bad.machine.state == "failed"


@pytest.mark.parametrize(("loss", "state"), [(2.009, "done"), (2.011, "failed")])
def test_a_gate_compares_with_the_last_release(loss: float, state: str) -> None:
    gate = {"kind": "gate", "require": ["eval.loss <= released + 0.5 %"], "model": "toy"}
    steps = {"eval": EVAL["eval"], "gate": gate}
    run = PlayedRun(steps, scores={"eval": {"loss": loss}}, released={"loss": 2.0}).begin()
    run.finish("eval")
    assert run.states()["gate"] == state


def test_a_step_is_skipped_with_all_that_reads_it_where_its_condition_does_not_hold() -> None:
    steps = {
        "eval": EVAL["eval"],
        "more": step(when=["eval.loss > 3"], outputs={"out": "more"}),
        "last": step(inputs={"of": "more.out"}),
    }
    run = PlayedRun(steps, scores={"eval": {"loss": 2.0}}).begin()
    run.finish("eval")
    assert run.states() == {"eval": "done", "more": "skipped", "last": "skipped"}
    assert run.machine.state == "done"


SEEDS = {
    "train": step(for_each={"seed": [1, 2, 3]}, outputs={"run": "run/{seed}"}),
    "eval": step(
        for_each={"seed": [1, 2, 3]},
        inputs={"run": "train.run"},
        outputs={"scores": "scores/{seed}.json"},
        scores=["loss"],
    ),
    "best": {"kind": "best", "inputs": {"run": "train.run"}, "by": "eval.loss"},
    "export": step(inputs={"run": "best.run"}),
}


@pytest.mark.parametrize(("better", "chosen"), [("lower", 2), ("higher", 1)])
def test_each_value_of_a_list_is_a_task_that_reads_its_own_and_the_best_goes_on(
    better: str, chosen: int
) -> None:
    losses = {1: 3.0, 2: 1.0, 3: 2.0}
    scores = {f"eval[seed={seed}]": {"loss": loss} for seed, loss in losses.items()}
    steps = {**SEEDS, "best": {**SEEDS["best"], "better": better}}
    run = PlayedRun(steps, scores=scores, parallel=3).begin()
    for seed in losses:
        run.finish(f"train[seed={seed}]")
    for seed in losses:
        run.finish(f"eval[seed={seed}]")
    best = run.machine.tasks["best"].result
    trained = run.machine.tasks[f"train[seed={chosen}]"].result
    assert best.outputs["run"] == trained.outputs["run"]
    assert best.scores == {"loss": losses[chosen]}
    assert list(run.running) == ["export"]


def test_a_person_approves_or_rejects_and_an_approval_holds_for_the_same_content() -> None:
    steps = {**CHAIN, "ok": {"kind": "approval", "question": "go?", "after": ["last"]}}
    steps["end"] = step(after=["ok"])
    run = PlayedRun(steps).begin()
    for name in CHAIN:
        run.finish(name)
    assert run.machine.state == "asking"
    run.crash()
    assert run.machine.state == "asking"
    run.answer("ok", approved=True)
    assert list(run.running) == ["end"]
    again = PlayedRun(steps, store=run.store).begin()
    assert again.states()["ok"] is TaskState.CACHED
    other = PlayedRun(steps, store=run.store, inputs={"text.txt": "other"}).begin()
    for name in CHAIN:
        other.finish(name)
    other.answer("ok", approved=False)
    assert other.states()["ok"] is TaskState.FAILED and other.states()["end"] is TaskState.BLOCKED


def test_a_cancelled_run_stops_what_runs_and_forgets_what_comes_late() -> None:
    run = PlayedRun(CHAIN).begin()
    run.feed(RunCancelled(run.time_ns, "ada"))
    assert run.stopped == ["raw"] and set(run.states().values()) == {TaskState.CANCELLED}
    run.finish("raw")
    assert run.machine.state == "cancelled" and run.states()["raw"] is TaskState.CANCELLED


@st.composite
def pipelines(draw: st.DrawFn) -> dict[str, Any]:
    """Steps that read outputs of steps before them, some of several values, some that ask."""
    steps: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 6))):
        before = draw(st.lists(st.sampled_from(sorted(steps)), max_size=2)) if steps else []
        asks = number > 0 and draw(st.integers(0, 5)) == 0
        name = f"s{number}"
        if asks:
            steps[name] = {"kind": "approval", "question": "?", "after": before}
            continue
        made = [each for each in before if "outputs" in steps[each]]
        keys: dict[str, Any] = {
            "inputs": {each: f"{each}.out" for each in made},
            "after": [each for each in before if each not in made],
            "retries": draw(st.integers(0, 2)),
            "outputs": {"out": name},
        }
        if draw(st.booleans()):
            keys["for_each"] = {draw(st.sampled_from(["x", "y"])): [1, 2]}
            keys["outputs"] = {"out": f"{name}/{{{next(iter(keys['for_each']))}}}"}
        steps[name] = step(**keys)
    return steps


def play_to_the_end(
    run: PlayedRun, failures: dict[str, int], draw: Any, crashes: int
) -> dict[str, tuple[TaskState, object]]:
    """Attempts end in any order, with crashes in between; a task fails as often as it is told."""
    run.begin()
    left = dict(failures)
    while run.machine.state in ("running", "asking"):
        asking = [name for name, state in run.states().items() if state is TaskState.ASKING]
        moves = [*run.running, *asking, *(["crash", "lost"] if crashes else [])]
        due_ns = run.machine.next_time_ns()
        move = draw(moves) if moves and not (due_ns and not run.running and not asking) else "wait"
        if move in ("crash", "lost"):
            crashes -= 1
            good = [name for name in run.running if not left.get(name, 0)]
            if move == "lost" and good:  # after its result was stored, before that was recorded
                run.finish(good[0], told=False)
            run.crash()
        elif move == "wait":
            assert due_ns is not None, "nothing runs, nobody is asked, and no time is waited for"
            run.pass_time(max(0, due_ns - run.time_ns) / SECOND_NS)
        elif move in asking:
            run.answer(move, approved=True)
        elif left.get(move, 0):
            left[move] -= 1
            run.fail(move)
        else:
            run.finish(move)
    return {name: (each.state, each.result.outputs) for name, each in run.machine.tasks.items()}


@given(pipelines(), st.data())
@examples(150)
def test_crashes_and_orders_change_no_outcome_and_repeat_no_finished_step(
    steps: dict[str, Any], data: st.DataObject
) -> None:
    parallel = data.draw(st.integers(1, 3))
    names = list(PlayedRun(steps).machine.tasks)
    failures = data.draw(st.dictionaries(st.sampled_from(names), st.integers(0, 3)))
    calm = play_to_the_end(PlayedRun(steps), failures, lambda moves: moves[0], 0)
    run = PlayedRun(steps, parallel=parallel)

    def draw(moves: list[str]) -> str:
        return data.draw(st.sampled_from(moves))

    disturbed = play_to_the_end(run, failures, draw, crashes=data.draw(st.integers(0, 5)))
    finished = {TaskState.CACHED: TaskState.DONE}
    assert {name: (finished.get(state, state), made) for name, (state, made) in calm.items()} == {
        name: (finished.get(state, state), made) for name, (state, made) in disturbed.items()
    }
    assert set(run.states().values()) <= ENDED
