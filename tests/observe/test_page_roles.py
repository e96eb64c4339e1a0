"""Every action of the page in a real browser, as every role: what it does, and whom it is refused.

Who may do something does it, and the server knows of it; who may not sees buttons that say why they
do nothing, or none; and the server refuses the same without the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.played_runs import play_runs
from tests.control.servers import ServerProcess
from tests.observe.browser import Tab, browser, chromium, tab
from tests.observe.page_site import Site

pytestmark = pytest.mark.timeout(900)  # a server and a browser on whatever machine
RUNS, STEPS, NODES, SILENT = 4, 8, 64, 20
ANYBODY, WRITERS, ADMINS = ("admin", "user", "read"), ("admin", "user"), ("admin",)
JOB = """name = "drafted"
[model]
preset = "tiny"
[data]
source = "synthetic"
[train]
steps = 4
device = "cpu"
"""
RULE = {"kind": "finding", "finding": "loss_spike", "targets": []}
ELASTIC = {"slot_gpus": 1, "replicas": 2, "least_replicas": 1, "most_replicas": 4}


class Order(NamedTuple):
    """What the server is asked for by a button; ``done`` looks whether it is."""

    name: str
    allowed: tuple[str, ...]
    method: str
    path: str
    body: Any = None


# In the order in which they make sense: J is a job that waits, held; E an elastic one; N a node;
# Q what the core asks; A an alert.
ORDERS = (
    Order(
        "submit",
        WRITERS,
        "POST",
        "/v1/jobs",
        {"spec": {"name": "x"}, "work": {"kind": "Script", "argv": ["true"]}},
    ),
    Order("release", WRITERS, "POST", "/v1/jobs/{J}/release", {}),
    Order("hold", WRITERS, "POST", "/v1/jobs/{J}/hold", {}),
    Order("scale", WRITERS, "POST", "/v1/jobs/{E}/scale", {"replicas": 3}),
    Order("requeue", WRITERS, "POST", "/v1/jobs/{E}/requeue", {}),
    Order("drain", WRITERS, "POST", "/v1/jobs/{E}/drain", {}),
    Order("cancel", WRITERS, "POST", "/v1/jobs/{J}/cancel", {}),
    Order("drain a node", ADMINS, "POST", "/v1/nodes/{N}/drain", {"why": "x"}),
    Order("resume a node", ADMINS, "POST", "/v1/nodes/{N}/readmit", {}),
    Order("answer", ADMINS, "POST", "/v1/questions/{Q}", {"approve": False}),
    Order("tag", WRITERS, "PUT", "/v1/runs/1/tags", {"tags": ["x"]}),
    Order("note", WRITERS, "POST", "/v1/runs/1/notes", {"text": "x"}),
    Order("save a view", WRITERS, "PUT", "/v1/views/x", {"address": "#/runs"}),
    Order("set an alert", WRITERS, "PUT", "/v1/alerts/{A}", RULE),
    Order("try an alert", WRITERS, "POST", "/v1/alerts/{A}/test"),
    Order("silence an alert", WRITERS, "POST", "/v1/alerts/{A}/silence", {"minutes": 5}),
    Order("remove an alert", WRITERS, "DELETE", "/v1/alerts/{A}"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    state: Path = tmp_path_factory.mktemp("roles") / "server"
    play_runs(state, RUNS, STEPS, nodes=NODES, silent=SILENT)
    options = ("--policy", str(state / "policy.toml"), "--requests-per-second", "0")
    with ServerProcess(state, *options) as server:
        yield Site(server)


@pytest.fixture(scope="module")
def chrome(site: Site) -> Iterator[Any]:
    chromium()
    with browser() as running:
        yield running


def question(site: Site) -> int:
    return int(site.get("/v1/status")["questions"][0]["question"])


def test_the_server_refuses_whatever_the_page_does_not_offer(site: Site) -> None:
    """Without a browser: no order of the page depends on the page's own judgement."""
    job = site.submit("waits", "user")
    names = {"J": job, "E": job, "N": "n3", "Q": question(site), "A": "mine"}
    for order in ORDERS:
        path = order.path.format(**names)
        for role in ANYBODY:
            if role not in order.allowed:
                status, body = site.server.call(
                    order.method, path, order.body, token=site.tokens[role]
                )
                assert (status, body["error"]["code"]) == (403, "wrong_role"), (order.name, role)


class Visit:
    """A visitor of one role, what they click, and what the server says of it."""

    def __init__(self, site: Site, at: Tab, role: str) -> None:
        self.site, self.at, self.page, self.role = site, at, at.page, role
        self.done: list[str] = []

    def order(self, label: str, verb: str, command: str, why: str = "", **fields: str) -> None:
        """Press a button, give a reason, read the command, and do not wait for the undo."""
        self.page.click(f".acts button:has-text('{label}'), .notice button:has-text('{label}')")
        given = fields | ({"why": why} if why else {})
        for name, value in given.items():
            self.page.fill(f"dialog.ask input[name={name}]", value)
        assert command in self.page.inner_text("dialog.ask code")
        self.page.click(f"dialog.ask button:has-text('{verb}')")
        self.page.locator(".toast").last.get_by_text("Now").click()
        self.page.locator(".toast.good").last.wait_for()
        self.page.evaluate("() => document.querySelectorAll('.toast').forEach((e) => e.remove())")

    def expect(self, name: str, path: str, true: Callable[[Any], Any]) -> None:
        """Until the server says so too."""
        self.site.server.wait_for(path, true)
        self.done.append(name)

    def refused(self, selector: str, reason: str) -> None:
        """All such buttons are there, do nothing and say why."""
        self.page.locator(selector).first.wait_for()
        for button in self.page.locator(selector).all():
            assert button.is_disabled() and reason in (button.get_attribute("title") or "")


def has_event(kind: str, **facts: Any) -> Callable[[Any], bool]:
    """Whether a job's log has an order."""
    return lambda found: any(
        each["kind"] == kind and facts.items() <= each["body"].items() for each in found["events"]
    )


def submits(visit: Visit) -> None:
    page = visit.page
    visit.at.show("submit")
    page.fill("textarea", JOB)
    page.get_by_text("it can run").wait_for()
    assert page.inner_text(".submit code").startswith("phalanx submit")
    if visit.role == "read":
        page.get_by_text("it has the role of a reader").wait_for()
        assert page.is_disabled("button.primary:has-text('Submit')")
        return
    page.wait_for_function("() => !document.querySelector('.submit button').disabled")
    page.click("button.primary:has-text('Submit')")
    page.wait_for_function("() => location.hash.startsWith('#/job/')")
    number = page.url.rsplit("/", 1)[1]
    visit.expect("submit", f"/v1/jobs/{number}", lambda each: each["job"]["name"] == "drafted")
    visit.site.server.call("POST", f"/v1/jobs/{number}/cancel", {})


def orders_a_job_that_waits(visit: Visit) -> None:
    writer = visit.role if visit.role != "read" else "admin"
    job = visit.site.submit("waits", writer)
    path = f"/v1/jobs/{job}"
    visit.at.show(f"job/{job}")
    if visit.role == "read":
        visit.refused(".acts button", "it has the role of a reader")
        return
    visit.order("Resume", "Release", f"phalanx release {job} --why ready", why="ready")
    visit.expect("release", path, lambda each: not each["job"]["held"])
    notes = visit.site.get(f"/v1/runs/{job}")["notes"]
    assert notes[-1]["text"] == "released: ready"


def orders_a_job_in_the_queue(visit: Visit) -> None:
    if visit.role == "read":
        return
    # The whole fleet, of which others hold nodes: it waits as long as the test likes.
    job = visit.site.submit(
        "large", visit.role, held=False, gang={"slot_gpus": 8, "replicas": 8 * NODES}
    )
    path = f"/v1/jobs/{job}"
    visit.at.show(f"job/{job}")
    visit.order("Hold", "Hold", f"phalanx hold {job}")
    visit.expect("hold", path, lambda each: each["job"]["held"])
    visit.page.locator(".acts button:has-text('Resume')").wait_for()
    visit.order("Cancel", "Cancel it", f"phalanx cancel {job} --why wrong", why="wrong")
    visit.expect("cancel", path, lambda each: each["job"]["state"] == "cancelled")


def orders_a_job_that_holds_nodes(visit: Visit) -> None:
    writer = visit.role if visit.role != "read" else "admin"
    job = visit.site.submit("elastic", writer, held=False, gang=ELASTIC)
    path = f"/v1/jobs/{job}"
    visit.site.server.wait_for(path, lambda each: each["job"]["state"] != "pending")
    visit.at.show(f"job/{job}")
    if visit.role == "read":
        visit.refused(".acts button", "it has the role of a reader")
        return
    visit.order("Scale", "Scale it", f"phalanx scale {job} 3 --why more", why="more", replicas="3")
    visit.expect("scale", f"/v1/events?job={job}", has_event("Scale", replicas=3))
    visit.order("Requeue", "Requeue", f"phalanx requeue {job}")
    visit.expect("requeue", f"/v1/events?job={job}", has_event("Requeue", job=job))
    other = visit.site.submit("leaves", visit.role, held=False, gang=ELASTIC)
    path = f"/v1/jobs/{other}"
    visit.site.server.wait_for(path, lambda each: each["job"]["state"] != "pending")
    visit.at.show(f"job/{other}")
    visit.order("Drain", "Drain", f"phalanx drain {other}")
    visit.expect(
        "drain", path, lambda each: each["job"]["held"] or each["job"]["state"] == "draining"
    )
    for each in (job, other):
        visit.site.server.call("POST", f"/v1/jobs/{each}/cancel", {})


def empties_a_node(visit: Visit) -> None:
    node = visit.site.get("/v1/nodes")["nodes"][10]["name"]
    path = f"/v1/nodes/{node}"
    visit.at.show(f"node/{node}")
    if visit.role != "admin":
        visit.refused(".acts button", "This is for administrators.")
        return
    visit.order("Drain", "Drain", f"phalanx drain {node} --why loud", why="loud")
    visit.expect("drain a node", path, lambda each: "loud" in each["node"]["why"]["text"])
    visit.page.locator(".acts button:has-text('Resume')").wait_for()
    visit.order("Resume", "Resume", f"phalanx resume {node} --why quiet", why="quiet")
    visit.expect("resume a node", path, lambda each: each["node"]["state"] != "draining")


def answers(visit: Visit) -> None:
    visit.at.show("fleet")
    number = question(visit.site)
    visit.page.get_by_text("Somebody must decide").wait_for()
    if visit.role != "admin":
        visit.refused(".notice button", "This is for administrators.")
        return
    command = f"phalanx answer {number} --keep --why 'a switch'"
    visit.order("Keep them", "Keep them", command, why="a switch")
    visit.expect("answer", "/v1/status", lambda each: not each["questions"])
    told = visit.site.get("/v1/events?limit=1000")["events"]
    (answer,) = [each for each in told if each["kind"] == "Answer"]
    name = visit.site.get("/v1/whoami")["token"]["name"]
    assert (answer["body"]["by"], answer["body"]["why"]) == (name, "a switch")


def marks_runs(visit: Visit) -> None:
    page, name = visit.page, visit.role
    visit.at.show("runs?jobs=1")
    if visit.role == "read":
        page.locator("input[aria-label='Tag of run 1']").wait_for()
        assert page.is_disabled("input[aria-label='Tag of run 1']")
        assert page.is_disabled(".chosenruns button:has-text('Add')")
        assert not page.is_visible("text=Save view")
        return
    page.fill("input[aria-label='Tag of run 1']", name)
    page.fill("input[aria-label='Note about run 1']", f"by {name}")
    page.click(".chosenruns button:has-text('Add')")
    page.get_by_text(f"phalanx runs note 1 'by {name}'").wait_for()
    visit.expect("tag", "/v1/runs/1", lambda each: name in each["tags"])
    visit.expect("note", "/v1/runs/1", lambda each: each["notes"][-1]["text"] == f"by {name}")
    page.click("text=Save view")
    page.fill("input[aria-label='Name of the view']", f"of-{name}")
    page.keyboard.press("Enter")
    page.get_by_text(f"phalanx page 'runs?jobs=1' --save of-{name}").wait_for()
    kept = lambda each: f"of-{name}" in [view["name"] for view in each["views"]]  # noqa: E731
    visit.expect("save a view", "/v1/views", kept)


def sets_an_alert(visit: Visit) -> None:
    page, name = visit.page, f"of-{visit.role}"
    visit.at.show("alerts")
    if visit.role == "read":
        assert not page.is_visible("text=Set the alert")
        return
    page.fill("input[name=name]", name)
    page.click("text=Set the alert")
    row = page.locator(f"tr:has-text('{name}')")
    row.wait_for()
    of = lambda each: [rule for rule in each["alerts"] if rule["name"] == name]  # noqa: E731
    visit.expect("set an alert", "/v1/alerts", of)
    row.get_by_text("Test").click()
    page.get_by_text("It tells nobody: this page lists it.").wait_for()
    visit.expect("try an alert", "/v1/alerts", of)
    row.get_by_text("Silence for 1 h").click()
    row.get_by_text("silent until").wait_for()
    visit.expect("silence an alert", "/v1/alerts", lambda each: of(each)[0]["silent_until"] > 0)
    row.get_by_text("Remove").click()
    page.click("dialog.ask button:has-text('Remove')")
    page.locator(".toast").last.get_by_text("Now").click()
    visit.expect("remove an alert", "/v1/alerts", lambda each: not of(each))


STEPS_OF_A_VISIT = (
    *(submits, orders_a_job_that_waits, orders_a_job_in_the_queue, orders_a_job_that_holds_nodes),
    *(empties_a_node, marks_runs, sets_an_alert, answers),
)


@pytest.mark.soak
@pytest.mark.parametrize("role", ["read", "user", "admin"])  # the last one answers what is asked
def test_every_action_as_every_role(site: Site, chrome: Any, role: str) -> None:
    with tab(chrome, site.server.url) as opened:
        opened.sign_in(site.tokens[role], "jobs")
        visit = Visit(site, opened, role)
        for step in STEPS_OF_A_VISIT:
            step(visit)
        assert set(visit.done) == {each.name for each in ORDERS if role in each.allowed}
        assert opened.problems == [] and opened.elsewhere == []
