"""The page in a real browser, fed by a real run on a cluster of processes with kills."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from phalanx.control.client.client import Client
from phalanx.data import ShardWriter
from phalanx.testing.local_cluster import TrialCluster
from tests.commands import run_phalanx
from tests.control.jobs import write_job
from tests.observe.browser import Tab, axe_core, browser, chromium, tab

pytestmark = pytest.mark.timeout(500)  # a cluster and a browser on whatever machine
STEPS = 100_000  # more than any machine makes in the time of these tests
STEP_SECONDS = 0.8  # the cores are the browser's
VIEWS = ("goodput", "events", "queue", "sweeps", "runs?jobs=1", "plan", "simulate")
STATES = "document.querySelector('canvas.map').map.fleet"


class Run:
    """A job that runs on two nodes and a spare; one of its workers was killed."""

    def __init__(self, cluster: TrialCluster, job: int) -> None:
        self.cluster, self.job = cluster, job
        self.commits = cluster.commits(job, 4)

    def wait_steps(self, count: int) -> None:
        """Until so many more steps are safe."""
        newest = self.commits.newest()
        until = (newest.step if newest else 0) + count
        self.cluster.wait(lambda: (n := self.commits.newest()) and n.step >= until, "steps", 180)

    def kill_worker(self, slot: int) -> None:
        """SIGKILL, and wait until the gang goes on."""
        generation = self.cluster.job(self.job)["generation"]
        self.cluster.signal_worker(slot, self.job, signal.SIGKILL)
        self.cluster.wait(lambda: self.commits.first_after(generation), "the run to go on", 180)

    def say(self, *words: str) -> str:
        """What a command of the command line prints."""
        done = run_phalanx(*words, "--state", str(self.cluster.state), seconds=400)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def token(self) -> str:
        return (self.cluster.state / "admin.token").read_text().strip()

    def events(self) -> list[dict[str, Any]]:
        return list(self.cluster.get(f"/v1/events?job={self.job}&limit=1000")["events"])


def validated_job(root: Path) -> Path:
    """A job whose validations, evaluations and checkpoints fall on the same steps."""
    path = write_job(root, "watched", STEPS)
    with ShardWriter(root / "unseen", 64, 0) as writer:
        writer.write([1, 2, 3, 4, 5])
        writer.end_document()
        writer.finish()
    text = path.read_text().replace("every = 0", "every = 5")
    text += f'\n[evaluate]\nevery = 5\nperplexity = {{ unseen = "{root / "unseen"}" }}\n'
    text = text.replace("sequence = 32", "sequence = 32\nvalidation_fraction = 0.1")
    path.write_text(text.replace("[train]", "[train]\nvalidate_every = 5\nvalidate_samples = 4"))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The run that all tests look at."""
    chromium()
    root = tmp_path_factory.mktemp("stage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CHAOS", "1")  # workers let themselves be slowed down
        with TrialCluster(root, nodes=2, gpus_per_node=2, spares=1) as cluster:
            found = Run(cluster, cluster.submit(str(validated_job(root))))
            found.wait_steps(5)
            cluster.pace(found.job, STEP_SECONDS)
            found.kill_worker(1)
            yield found


@pytest.fixture(scope="module")
def chrome(run: Run) -> Iterator[Any]:
    """One browser for all tests; every test is a new visitor."""
    with browser() as running:
        yield running


@pytest.fixture
def at(run: Run, chrome: Any) -> Iterator[Tab]:
    """A browser of which nothing may go wrong, and which asks nobody else for anything."""
    with tab(chrome, run.cluster.url) as opened:
        yield opened
        assert opened.problems == []
        assert opened.elsewhere == []


def test_a_login_link_signs_in_once_and_leaves_the_address(run: Run, chrome: Any) -> None:
    link = run.cluster.client.post("/v1/login-links", None, dict)["url"]
    with tab(chrome, run.cluster.url) as first:
        first.page.goto(link + f"/job/{run.job}")
        first.wait_for_text("watched")
        code = link.rsplit("/", 1)[1]
        assert first.page.url == f"{run.cluster.url}/#/job/{run.job}"
        assert code not in first.page.evaluate("JSON.stringify([sessionStorage, localStorage])")
        assert not any(code in each for each in first.requested)
        first.page.reload()
        first.wait_for_text("watched")
        assert first.problems == []
    with tab(chrome, run.cluster.url) as second:
        second.page.goto(link)
        second.wait_for_text("This link was used already")


def test_a_page_ends_with_the_token_that_it_was_opened_with(
    run: Run, chrome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = run.cluster.client
    mine = client.post("/v1/tokens", {"name": "guest", "role": "read"}, dict)
    monkeypatch.setenv("PHALANX_TOKEN", mine["secret"])
    link = Client(run.cluster.url, run.cluster.state).post("/v1/login-links", None, dict)["url"]
    with tab(chrome, run.cluster.url) as opened:
        opened.page.goto(link + "/jobs")
        opened.wait_for_text("watched")
        client.delete(f"/v1/tokens/{mine['token']['id']}", dict)
        opened.wait_for_text("this token is not good any more")


def test_a_wrong_token_is_refused_and_the_right_one_opens_the_fleet(run: Run, chrome: Any) -> None:
    with tab(chrome, run.cluster.url) as opened:
        opened.page.goto(run.cluster.url)
        opened.page.fill("#token", "phx_admin_guess")
        opened.page.keyboard.press("Enter")
        opened.wait_for_text("this token is not known here")
        opened.page.fill("#token", run.token)
        opened.page.keyboard.press("Enter")
        opened.wait_for_text("Needs attention")


def test_a_second_tab_of_the_same_visitor_needs_no_token(run: Run, at: Tab) -> None:
    at.sign_in(run.token)
    other = at.page.context.new_page()
    other.goto(f"{run.cluster.url}/#/jobs")
    other.get_by_text("watched").first.wait_for()


def test_the_fleet_shows_every_node_and_leads_to_its_history(run: Run, at: Tab) -> None:
    at.sign_in(run.token)
    label = at.page.get_attribute("canvas.map", "aria-label")
    assert "3 nodes" in label
    at.page.focus("canvas.map")
    at.page.keyboard.press("ArrowRight")
    at.page.keyboard.press("Enter")
    at.wait_for_text("History")
    assert "/#/node/" in at.page.url


def test_a_killed_worker_appears_as_an_incident_while_one_looks(run: Run, at: Tab) -> None:
    at.sign_in(run.token, f"job/{run.job}")
    before = at.page.locator(".finding").count()
    node = run.cluster.node_of(0, run.job).name
    run.kill_worker(0)
    at.page.wait_for_function("n => document.querySelectorAll('.finding').length > n", arg=before)
    newest = at.page.locator(".finding").first
    newest.get_by_text("The next step was complete after").wait_for()
    assert "SIGKILL" in newest.inner_text() and node in newest.inner_text()
    newest.get_by_text("Evidence").click()
    newest.get_by_text("root cause class").wait_for()
    newest.locator(".picture canvas").first.wait_for()


def test_an_incident_has_a_page_with_its_decision_and_the_first_error(run: Run, at: Tab) -> None:
    at.sign_in(run.token, f"job/{run.job}")
    at.page.locator("a:has-text('Open the incident')").last.click()
    at.page.locator(".timeline .mark:has-text('next step')").wait_for()
    said = at.text()
    assert "SIGKILL" in said and "(taken)" in said and "next best" in said
    assert f"phalanx logs {run.job} --rank" in said
    at.page.get_by_text(f"phalanx data order job-{run.job}.toml --step").wait_for()
    assert "--set faults.causes.worker_killed=" in said and "--replay 1" in said
    at.page.fill("input[aria-label=Ranks]", "0-3")
    at.page.keyboard.press("Enter")
    at.page.wait_for_function(
        "() => [0, 1, 2, 3].every((rank) => "
        "document.querySelector('pre.log[role=log]').innerText.includes(`[${rank}] `))"
    )


@pytest.mark.soak
@pytest.mark.parametrize(("size", "dark"), [("desk", False), ("desk", True), ("phone", False)])
def test_an_incident_has_no_barrier_that_axe_finds(
    run: Run, chrome: Any, size: str, dark: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = axe_core(tmp_path_factory.getbasetemp() / "axe")
    if not run.cluster.get(f"/v1/jobs/{run.job}/incidents")["findings"]:
        run.kill_worker(0)
    with tab(chrome, run.cluster.url, size, dark) as opened:
        opened.sign_in(run.token, f"job/{run.job}")
        opened.page.locator("a:has-text('Open the incident')").last.click()
        opened.page.locator(".timeline .mark:has-text('next step')").wait_for()
        assert opened.barriers(source) == []


def test_an_incident_ends_with_the_first_step_of_the_gang_that_formed_again(run: Run) -> None:
    def incidents() -> list[dict[str, Any]]:
        found = run.cluster.get(f"/v1/jobs/{run.job}/incidents")["findings"]
        return [each for each in found if each["kind"] == "incident"]

    def curve() -> dict[str, Any]:
        names = f"/v1/jobs/{run.job}/metrics?names=generation"
        return dict(run.cluster.get(names)["series"]["generation"])

    run.cluster.wait(
        lambda: (found := incidents()) and "resumed_seconds" in found[0]["evidence"], "its end", 120
    )
    incident = incidents()[0]
    told = incident["evidence"]
    run.cluster.wait(lambda: told["generation"] in curve()["value"], "its steps to be stored", 120)
    steps = curve()
    first = steps["time"][steps["value"].index(told["generation"])]
    # A busy server may hear that the gang was restored after it has made a step.
    resumed = max(first - incident["time"], told["restored_seconds"])
    assert told["resumed_seconds"] == pytest.approx(resumed, abs=0.02)
    assert told["restored_seconds"] > 0


def test_logs_are_searched_and_read_since_a_time(run: Run, at: Tab) -> None:
    job = str(run.job)
    whole = run.say("logs", job, "--rank", "0", "--tail-kb", "16384").splitlines()
    assert run.say("logs", job, "--rank", "0", "--since", "2h").splitlines()[:5] == whole[:5]
    word = next(word for line in whole for word in line.split() if len(word) > 5 and word.isalpha())
    found = run.say("logs", job, "--rank", "0", "--grep", word).splitlines()
    assert found and all(word in line for line in found)
    at.sign_in(run.token, f"job/{job}?log={word.upper()}")
    at.page.wait_for_function(
        "word => { const lines = document.querySelector('pre.log[role=log]').innerText.trim();"
        " return lines && lines.split('\\n').every((each) => each.includes(word)); }",
        arg=word,
    )
    at.page.fill("input[aria-label='Search the logs']", "no such line anywhere")
    at.page.wait_for_function("() => location.hash.includes('log=no')")


def test_every_rank_of_a_step_is_fetched_from_the_nodes(run: Run, at: Tab) -> None:
    at.sign_in(run.token, f"job/{run.job}")
    at.page.click("text=Every rank of one step")
    at.wait_for_text("4 records, slowest first")
    step = int(at.page.input_value("details.closer input"))
    shown = at.page.locator("details.closer tbody tr")
    assert sorted(int(row.split()[0]) for row in shown.all_inner_texts()) == [0, 1, 2, 3]
    asked = ("steps", str(run.job), "--steps", f"{step}:{step + 1}")
    found = [json.loads(line) for line in run.say(*asked, "--json").splitlines()]
    assert {(each["rank"], each["step"]) for each in found} >= {(r, step) for r in range(4)}
    one = run.say(*asked, "--rank", "2")
    assert one.count(str(step)) >= 1 and "PEER_WAIT" in one
    at.page.fill("details.closer input", "999999999")
    at.page.keyboard.press("Enter")
    at.wait_for_text("no node holds step")


def test_a_profile_comes_from_the_nodes_through_the_server(run: Run, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "p.json"))
    run.say("profile", str(run.job), "--steps", "2", "--ranks", "0,3", *out)
    merged = json.loads((tmp_path / "p.json").read_bytes())
    names = {
        event["args"]["name"].split()[1]
        for event in merged["traceEvents"]
        if event.get("name") == "process_name" and event["args"]["name"].startswith("rank")
    }
    assert names == {"0", "3"}


def test_events_carry_their_decisions_and_reasons(run: Run, at: Tab) -> None:
    at.sign_in(run.token, "events")
    exits = [each for each in run.events() if each["kind"] == "WorkerExited"]
    shown = at.page.locator('.event[data-kind="WorkerExited"]')
    assert shown.count() == len(exits) >= 1
    formed = [
        command["why"]["text"]
        for each in run.events()
        for command in each["commands"]
        if command["kind"] == "Form"
    ]
    assert formed[-1] in at.text()


def test_the_slider_shows_the_fleet_as_it_was(run: Run, at: Tab) -> None:
    first = next(each for each in run.events() if each["kind"] == "GangReady")
    earlier = run.cluster.get("/v1/fleet")["first_ns"]
    at.sign_in(run.token, f"events?at={earlier}")
    assert run.job not in at.page.evaluate(f"() => {STATES}.job")
    at.show(f"events?at={first['time_ns'] + 300_000_000}")
    at.page.wait_for_function(f"job => {STATES}?.job.includes(job)", arg=run.job)
    assert at.page.evaluate(f"{STATES}.jobs[0].generation") == 1
    at.page.click("text=Back to now")
    at.page.wait_for_function(f"() => {STATES}?.sequence > 0")
    assert at.page.evaluate(f"{STATES}.jobs[0].generation") >= 2


def test_names_from_users_are_text_and_never_markup(run: Run, at: Tab) -> None:
    name = "<img src=x onerror='window.harmed=1'><svg onload='window.harmed=2'>"
    spec = {"name": name, "gang": {"slot_gpus": 1, "replicas": 3}}
    body = {"spec": spec, "work": {"kind": "Script", "argv": ["true"]}}
    job = run.cluster.client.post("/v1/jobs", body, dict)["jobs"][0]
    try:
        at.sign_in(run.token, "jobs")
        assert name in at.text()
        for view in (f"job/{job}", "events", "fleet", "queue", f"runs?jobs={run.job},{job}"):
            at.show(view)
            assert at.page.evaluate("window.harmed") is None
        at.wait_for_text(name)  # the list may come after the curves
        assert at.page.evaluate("window.harmed") is None
        assert at.page.locator("#main img, #main script").count() == 0
    finally:
        run.cluster.client.post(f"/v1/jobs/{job}/cancel", None, dict)


def test_the_queue_says_who_waits_and_why(run: Run, at: Tab) -> None:
    spec = {"name": "waiting", "gang": {"slot_gpus": 2, "tensor": 2, "replicas": 3}}
    body = {"spec": spec, "work": {"kind": "Script", "argv": ["true"]}}
    job = run.cluster.client.post("/v1/jobs", body, dict)["jobs"][0]
    try:
        why = lambda: run.cluster.get(f"/v1/jobs/{job}/why")  # noqa: E731
        run.cluster.wait(lambda: why()["waits_for"], "the queue to look at it")
        at.sign_in(run.token, "queue")
        at.wait_for_text("waiting")

        def shown(view: str) -> bool:
            """What is said of it changes with what runs: page and answer of one moment agree."""
            at.show(view)
            now, text = why(), at.text()
            return now["waits_for"]["text"].split(";")[0] in text and now["start"] in text

        for view in ("queue", f"job/{job}"):  # one estimate, wherever one looks
            run.cluster.wait(partial(shown, view), "the page to say what it waits for, until when")
    finally:
        run.cluster.client.post(f"/v1/jobs/{job}/cancel", None, dict)


def test_curves_grow_while_one_looks(run: Run, at: Tab) -> None:
    at.sign_in(run.token, f"job/{run.job}")
    steps = "document.querySelector('.chart canvas').chart.series[0]?.x.length ?? 0"
    at.page.wait_for_function(f"() => {steps} > 3")
    before = at.page.evaluate(steps)
    at.page.wait_for_function(f"before => {steps} > before", arg=before)
    assert at.page.evaluate("document.querySelector('.heat canvas').heat.cells.length") == 4


def test_the_loss_on_unseen_text_is_a_line_on_the_loss(run: Run, at: Tab) -> None:
    at.sign_in(run.token, f"job/{run.job}")
    lines = "document.querySelector('.chart canvas').chart.series"
    at.page.wait_for_function(f"() => {lines}[1]?.x.length > 1")
    steps, values = at.page.evaluate(f"[{lines}[1].x, {lines}[1].y]")
    assert all(step % 5 == 0 for step in steps) and None not in values
    assert "on unseen text" in at.page.locator("dl.figures").first.inner_text()
    found = run.cluster.client.get(f"/v1/runs/{run.job}", dict)["summary"]
    assert found["validation_step"] % 5 == 0 and found["validation_loss"] > 0


def test_scores_are_curves_over_steps(run: Run, at: Tab) -> None:
    at.sign_in(run.token, f"job/{run.job}")
    at.wait_for_text("unseen.perplexity")
    at_name = "(each) => each.innerText.includes('unseen.perplexity')"
    box = f"[...document.querySelectorAll('.curve')].find({at_name})"
    lines = f"{box}.querySelector('canvas').chart.series"
    at.page.wait_for_function(f"() => {lines}[0]?.x.length > 1")
    steps, values = at.page.evaluate(f"[{lines}[0].x, {lines}[0].y]")
    assert all(step % 5 == 0 for step in steps) and None not in values
    found = run.cluster.client.get(f"/v1/runs/{run.job}", dict)["summary"]
    assert found["evaluation_step"] % 5 == 0 and found["scores"]["unseen.tokens"] == 5
    assert "score unseen.perplexity: " in run.say("runs", "show", str(run.job))


def test_a_job_shows_what_was_planned_of_it_beside_what_it_takes(run: Run, at: Tab) -> None:
    at.sign_in(run.token, f"job/{run.job}")
    at.page.wait_for_function(
        "() => document.querySelectorAll('dl.figures')[0].innerText.split('planned').length > 2"
    )  # the step, and the dollars
    detail = run.cluster.get(f"/v1/jobs/{run.job}")
    assert detail["origins"]["step_ns"] == "measured" and detail["origins"]["steps"] == "job"
    assert detail["expected"]["step_ns"] != detail["plan"]["step_ns"]["mid"] > 0


def test_committed_steps_that_were_lost_are_listed_with_the_reason(run: Run, at: Tab) -> None:
    def add_loss(route: Any) -> None:
        answer = route.fetch()
        detail = answer.json()
        why = {"code": "lost", "text": "both nodes that held them died", "facts": {}}
        loss = {"first": 4, "last": 9, "at_ns": detail["job"]["started_ns"], "why": why}
        route.fulfill(response=answer, json=detail | {"lost_steps": 6, "losses": [loss]})

    at.page.route(re.compile(rf"/v1/jobs/{run.job}$"), add_loss)
    at.sign_in(run.token, f"job/{run.job}")
    at.wait_for_text("steps 4 to 9 are lost")
    at.wait_for_text("both nodes that held them died")
    at.wait_for_text("6 committed steps lost")


def test_runs_are_laid_over_each_other_with_their_differences(run: Run, at: Tab) -> None:
    spec = {"name": "other", "gang": {"slot_gpus": 2, "tensor": 2, "replicas": 3}}
    body = {"spec": spec, "work": {"kind": "Script", "argv": ["true"]}}
    job = run.cluster.client.post("/v1/jobs", body, dict)["jobs"][0]
    run.cluster.client.post(f"/v1/jobs/{job}/cancel", None, dict)
    at.sign_in(run.token, f"runs?jobs={run.job},{job}")
    at.wait_for_text("What differs")
    wanted = run.cluster.get(f"/v1/runs/diff?a={run.job}&b={job}")["differences"]
    rows = "document.querySelectorAll('section[aria-label=\"What differs\"] tbody tr:not(.group)')"
    at.page.wait_for_function(f"count => {rows}.length === count", arg=len(wanted))


def test_trials_of_a_sweep_are_lines_over_their_settings(run: Run, at: Tab) -> None:
    def trial(number: int, rung: int, value: float | None) -> dict[str, Any]:
        settings = {"optimizer.learning_rate": f"{10.0**-number}", "optimizer.kind": '"<b>x"'}
        facts = {"step": 9, "value": value, "value_unknown": False, "ran_seconds": 2.0}
        facts |= {"gpus": 0, "ranks": 1, "dollars_per_gpu_hour": 2.0, "state": "done", "why": ""}
        job = 10 * rung + number
        made = {"job": job, "trial": number, "rung": rung, "steps": 9, "settings": settings}
        return made | facts

    def answer(route: Any) -> None:
        rows = [trial(1, 0, 3.0), trial(2, 0, 2.0), trial(3, 0, None), trial(2, 1, 1.5)]
        body = {"sweep": "rates.1", "metric": "loss", "better": "lower", "next_after": 0}
        route.fulfill(json=body | {"trials": rows})

    at.page.route(re.compile(r"/v1/sweeps/rates.1"), answer)
    at.sign_in(run.token, "sweeps/rates.1")
    at.wait_for_text("3 trials, 0 live; loss, lower is better")
    shown = at.page.get_attribute(".parallel canvas", "aria-label")
    assert shown == "2 trials over optimizer.learning_rate; the best is trial 2 with loss 1.5"
    rows = "[...document.querySelectorAll('section[aria-label=Best] tbody tr')]"
    order = at.page.evaluate(f"{rows}.map(row => row.cells[0].innerText.split('\\n')[0])")
    assert order == ["2", "1", "3"]
    assert at.problems == []


def test_a_slider_asks_the_planner_again(run: Run, at: Tab) -> None:
    at.sign_in(run.token, "plan?model=llama3-8b&gpus=64&tokens=1T")
    at.page.wait_for_function("() => document.querySelector('[data-planned]')")
    before = at.page.inner_text(".figures")
    at.page.focus("#plan-gpus")
    at.page.keyboard.press("ArrowRight")
    at.page.wait_for_function(
        "before => document.querySelector('.figures').innerText !== before", arg=before
    )
    assert "gpus=128" in at.page.url
    at.page.focus("#plan-tensor")
    at.page.keyboard.press("End")
    at.page.get_by_role("alert").get_by_text("tensor").wait_for()


def test_a_change_is_asked_about_and_carried_out(run: Run, at: Tab) -> None:
    """What would become of the job beside now; then the gang goes on with another mapping."""
    generation = run.cluster.job(run.job)["generation"]
    at.sign_in(run.token, f"job/{run.job}")
    at.page.fill("input[aria-label='Micro-batch']", "1")
    at.page.click("section[aria-label='What if'] button:has-text('Ask')")
    at.wait_for_text("train.micro_batch = 1; its steps take")
    said = at.page.inner_text("section[aria-label='What if']")
    assert "tokens per second" in said and "micro-batch 1" in said
    at.page.fill("input[aria-label='Micro-batch']", "2")
    assert not at.page.is_visible("text=Carry it out"), "another question is not answered yet"
    at.page.fill("input[aria-label='Micro-batch']", "1")
    at.page.click("section[aria-label='What if'] button:has-text('Ask')")
    assert f"phalanx what-if {run.job} --set train.micro_batch=1" in said
    at.page.click("text=Carry it out")
    order = f"phalanx replan {run.job} --set train.micro_batch=1 --apply"
    assert at.page.inner_text("dialog.ask code") == order
    at.page.fill("dialog.ask input[name=why]", "less memory")
    assert at.page.inner_text("dialog.ask code") == f"{order} --why 'less memory'"
    at.page.click("dialog.ask button:has-text('Change it')")
    at.page.click(".toast button:has-text('Now')")
    at.wait_for_text("changes at a step boundary (train.micro_batch = 1)")
    (note,) = run.cluster.get(f"/v1/runs/{run.job}")["notes"]
    assert note["text"] == "replanned: less memory"

    def goes_on() -> bool:
        shown = run.cluster.job(run.job)
        return bool(shown["generation"] > generation and shown["state"] == "running")

    run.cluster.wait(goes_on, "the changed job to run", 180)
    run.wait_steps(3)


def test_a_change_that_cannot_run_says_why(run: Run, chrome: Any) -> None:
    with tab(chrome, run.cluster.url) as opened:
        opened.sign_in(run.token, f"job/{run.job}")
        opened.page.fill("input[aria-label='Tensor']", "3")
        opened.page.click("section[aria-label='What if'] button:has-text('Ask')")
        opened.wait_for_text("parallel.tensor")
        assert not opened.page.is_visible("text=Carry it out")


def test_a_small_simulation_is_played_and_shown(run: Run, at: Tab) -> None:
    at.sign_in(run.token, "simulate")
    at.page.select_option("select", "llama3-54d")
    at.page.fill("input[aria-label=GPUs]", "512")
    at.page.fill("input[aria-label=Days]", "0.1")
    at.page.click("button:has-text('Play')")
    at.page.get_by_text("Where the GPU time went").wait_for(timeout=300_000)
    assert "no invariant was violated" in at.text()


def test_a_question_of_the_core_is_answered_on_the_page(run: Run, at: Tab) -> None:
    answers: list[Any] = []
    asked = {"question": 4, "about": "eviction", "asked_ns": 1, "causes": ["stuck"]}

    def status(route: Any) -> None:
        answer = route.fetch()
        open_ones = [] if answers else [{**asked, "nodes": ["<b>node-9</b>"]}]
        route.fulfill(response=answer, json={**answer.json(), "questions": open_ones})

    def taken(route: Any) -> None:
        answers.append(route.request.post_data_json)
        route.fulfill(json={"accepted": True})

    at.page.route("**/v1/status", status)
    at.page.route("**/v1/questions/4", taken)
    at.sign_in(run.token)
    at.page.get_by_text("<b>node-9</b> (stuck)").wait_for()
    at.page.click("text=Keep them")
    assert "phalanx answer 4 --keep" in at.page.inner_text("dialog.ask")
    at.page.click("dialog.ask button:has-text('Keep them')")
    at.page.click(".toast button:has-text('Now')")
    at.page.get_by_text("Somebody must decide").wait_for(state="detached")
    assert answers == [{"approve": False, "why": ""}]


def test_a_page_of_an_older_version_says_so(run: Run, at: Tab) -> None:
    def older(route: Any) -> None:
        answer = route.fetch()
        version = answer.text().split('name="page-base" content="/page/')[1].split('"')[0]
        text = answer.text().replace(f'content="/page/{version}"', 'content="/page/older"')
        route.fulfill(response=answer, body=text)

    at.page.route(run.cluster.url + "/", older)
    at.sign_in(run.token)
    at.wait_for_text("this page is of an older version")
    at.page.unroute(run.cluster.url + "/")
    at.page.click("text=Reload")
    at.wait_for_text("Needs attention")
    assert "older version" not in at.text()


def test_the_page_survives_a_restart_of_the_server(run: Run, chrome: Any) -> None:
    with tab(chrome, run.cluster.url) as opened:
        opened.sign_in(run.token, f"job/{run.job}")
        run.cluster.kill_server()
        opened.wait_for_text("the server is away")
        run.cluster.start_server()
        opened.page.wait_for_function(
            "() => document.querySelector('.live').textContent === 'live'"
        )
        step = "Number(document.querySelector('.figure dd').firstChild.textContent.replace(',',''))"
        before = opened.page.evaluate(step)
        opened.page.wait_for_function(f"before => {step} > before", arg=before)
        # The browser itself tells of every connection that failed; nothing else may go wrong.
        assert [
            each for each in opened.problems if not re.search(r"net::ERR|WebSocket", each)
        ] == []


@pytest.mark.parametrize("size", ["phone", "wall"])
def test_no_view_is_wider_than_its_screen(run: Run, chrome: Any, size: str) -> None:
    with tab(chrome, run.cluster.url, size, dark=True) as opened:
        opened.sign_in(run.token)
        for view in ("fleet", "jobs", f"job/{run.job}", *VIEWS):
            opened.show(view)
            wide = opened.page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, view
            narrow = "[...document.querySelectorAll('.curve canvas')].map((e) => e.clientWidth)"
            assert min([each for each in opened.page.evaluate(narrow) if each], default=999) > 250
        assert opened.problems == []


def test_the_ledger_of_an_ended_job_is_the_command_lines_to_the_nanosecond(
    run: Run, at: Tab
) -> None:
    run.cluster.client.post(f"/v1/jobs/{run.job}/cancel", None, dict)
    run.cluster.wait(lambda: run.cluster.job(run.job)["state"] == "cancelled", "the end", 180)
    told = json.loads(run.say("ledger", str(run.job), "--json"))
    at.sign_in(run.token, f"goodput?job={run.job}")
    shown = at.page.evaluate(
        "() => Object.fromEntries([...document.querySelectorAll('.step[data-ns]')]"
        ".map((row) => [row.dataset.name, row.dataset.ns]))"
    )
    paid = shown.pop("paid for")
    assert paid == told["allocation_gpu_ns"] == str(sum(map(int, told["buckets"].values())))
    assert shown == {
        name: ns for name, ns in told["buckets"].items() if int(ns) or name == "productive"
    }
    assert "sum to the allocation exactly" in at.text()
    used = json.loads(run.say("usage", "--by", "team", "--json"))["usage"]
    saved = at.page.locator('section[aria-label="Usage"] a[download]').get_attribute("href") or ""
    assert used and all(f"%2C{row['gpu_ns']}" in saved for row in used)  # its link is the CSV
    at.page.click(".step[data-name=restart] button")
    at.page.wait_for_function("() => location.hash.includes('bucket=restart')")
    at.page.locator('.event[data-kind="WorkerExited"]').first.wait_for()
