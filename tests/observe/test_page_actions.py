"""What people do on the page, in a real browser: as administrator, as user and as reader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchmarks.played_runs import play_runs
from tests.control.servers import WORK, ServerProcess
from tests.observe.browser import READY, Tab, axe_core, browser, chromium, tab
from tests.observe.page_site import Site
from tests.receivers import HttpReceiver

pytestmark = pytest.mark.timeout(500)  # a server and a browser on whatever machine
RUNS, STEPS = 6, 40
VIEWS = (
    *("fleet", "jobs", f"job/{RUNS}", "node/n0", "goodput", "events", "queue", "runs?jobs=2,3"),
    *("plan", "simulate", "alerts", "submit", "sweeps", "pipelines"),
)
JOB = """name = "drafted"
[model]
preset = "tiny"
[data]
source = "synthetic"
[train]
stepz = 40
device = "cpu"
[parallel]
data = 2
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    chromium()
    state: Path = tmp_path_factory.mktemp("site") / "server"
    play_runs(state, RUNS, STEPS)
    options = ("--policy", str(state / "policy.toml"), "--requests-per-second", "0")
    with ServerProcess(state, *options) as server:
        yield Site(server)


@pytest.fixture(scope="module")
def chrome(site: Site) -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture
def at(site: Site, chrome: Any, request: pytest.FixtureRequest) -> Iterator[Tab]:
    """A visitor of a role (admin, where a test names none) of whom nothing may go wrong."""
    role = getattr(request, "param", "admin")
    with tab(chrome, site.server.url) as opened:
        opened.sign_in(site.tokens[role], "jobs")
        yield opened
        # The browser itself tells of every order that the server refuses.
        assert [each for each in opened.problems if "409 (Conflict)" not in each] == []
        assert opened.elsewhere == []


@pytest.mark.parametrize("at", ["admin", "user"], indirect=True)
def test_a_job_file_is_checked_priced_and_submitted(site: Site, at: Tab) -> None:
    page = at.page
    at.show("submit")
    page.fill("textarea", JOB)
    page.get_by_text("is no known key").wait_for()
    assert page.inner_text(".gutter .wrong") == "7"
    assert page.is_disabled("button:has-text('Submit')")
    page.click(".problems button:has-text('line 7')")
    page.keyboard.type("steps = 40")
    submit = page.locator("button.primary:has-text('Submit')")
    page.wait_for_function("() => !document.querySelector('.submit button').disabled")
    before = page.inner_text(".side .figures")
    assert "$" in before and "2ranks" in before
    page.focus("#draft-gpus")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.get_by_text("--world-size 4 --set parallel.data=0").wait_for()
    page.wait_for_function("() => !document.querySelector('.submit button').disabled")
    assert page.inner_text(".side .figures") != before
    submit.click()
    page.wait_for_function("() => location.hash.startsWith('#/job/')")
    detail = site.get(f"/v1/jobs/{page.url.rsplit('/', 1)[1]}")
    assert detail["job"]["name"] == "drafted" and detail["spec"]["gang"]["replicas"] == 4
    assert detail["job"]["team"] == ("default" if detail["job"]["user"] != "ann" else "text")
    page.click("text=Submit a copy")
    page.wait_for_function("() => document.querySelector('textarea')?.value.includes('drafted')")


@pytest.mark.parametrize("at", ["read"], indirect=True)
def test_a_reader_sees_what_would_be_done_and_may_do_none_of_it(site: Site, at: Tab) -> None:
    page = at.page
    at.show("submit")
    page.fill("textarea", JOB.replace("stepz", "steps"))
    page.get_by_text("it can run").wait_for()
    page.get_by_text("it has the role of a reader").wait_for()
    assert page.is_disabled("button.primary:has-text('Submit')")
    at.show(f"job/{RUNS}")
    page.locator(".acts button").first.wait_for()
    assert all(each.is_disabled() for each in page.locator(".acts button").all())
    button = page.locator(".whatif button:has-text('Carry it out')")
    assert button.is_disabled() and "reader" in (button.get_attribute("title") or "")
    body = {"spec": {"name": "x"}, "work": WORK}
    assert site.server.call("POST", "/v1/jobs", body, token=site.tokens["read"])[0] == 403


@pytest.mark.parametrize("at", ["user"], indirect=True)
def test_an_order_has_a_reason_a_command_and_a_way_back(site: Site, at: Tab) -> None:
    job, page = site.submit("waits", "user"), at.page
    at.show(f"job/{job}")
    page.click(".acts button:has-text('Resume')")
    page.fill("dialog.ask input[name=why]", "its data's ready")
    command = page.inner_text("dialog.ask code")
    assert command == f"""phalanx release {job} --why 'its data'"'"'s ready'"""
    page.click("dialog.ask button:has-text('Release')")
    page.click(".toast button:has-text('Undo')")
    page.get_by_text("Taken back: nothing was sent").wait_for()
    assert site.get(f"/v1/jobs/{job}")["job"]["held"]
    page.click(".acts button:has-text('Resume')")
    page.fill("dialog.ask input[name=why]", "its data's ready")
    page.keyboard.press("Enter")
    page.click(".toast button:has-text('Now')")
    page.locator(".toast.good").last.wait_for()
    assert not site.get(f"/v1/jobs/{job}")["job"]["held"]
    (note,) = site.get(f"/v1/runs/{job}")["notes"]
    assert (note["by"], note["text"]) == ("ann", "released: its data's ready")
    page.click(".acts button:has-text('Cancel')")
    page.click("dialog.ask button:has-text('Cancel it')")
    page.locator(".toast:has-text('Cancel job')").get_by_text("in 1 s").wait_for()
    site.server.wait_for(f"/v1/jobs/{job}", lambda each: each["job"]["state"] == "cancelled")


def test_on_a_phone_the_name_of_a_column_never_lies_under_its_value(site: Site, at: Tab) -> None:
    at.page.set_viewport_size({"width": 390, "height": 844})
    at.show("queue")

    def height(label: str) -> float:
        return float(at.page.locator(f'td[data-label="{label}"]').first.bounding_box()["height"])

    assert height("may be asked to leave") > 1.2 * height("priority")  # it has two lines


def test_an_administrator_scales_drains_and_empties_a_node(site: Site, at: Tab) -> None:
    page = at.page
    at.show(f"job/{RUNS}")
    page.click(".acts button:has-text('Scale')")
    page.fill("dialog.ask input[name=replicas]", "999999")
    assert f"phalanx scale {RUNS} 999999" in page.inner_text("dialog.ask code")
    page.click("dialog.ask button:has-text('Scale it')")
    page.click(".toast button:has-text('Now')")
    page.locator(".toast.bad").wait_for()  # the server says why that cannot be
    page.click(".acts button:has-text('Drain')")
    page.click("dialog.ask button:has-text('Drain')")
    page.click(".toast button:has-text('Now')")
    site.server.wait_for(f"/v1/jobs/{RUNS}", lambda each: each["job"]["state"] == "draining")
    node = site.get("/v1/nodes")["nodes"][-1]["name"]
    at.show(f"node/{node}")
    page.click(".acts button:has-text('Drain')")
    page.fill("dialog.ask input[name=why]", "a fan is loud")
    page.keyboard.press("Enter")
    page.click(".toast button:has-text('Now')")
    found = site.server.wait_for(
        f"/v1/nodes/{node}", lambda each: each["node"]["state"] != "healthy"
    )
    assert "a fan is loud" in found["node"]["why"]["text"]
    page.locator(".acts button:has-text('Resume')").wait_for()


ROWS = ".runtable tbody tr:not(.group)"
SERIES = "document.querySelector('section[aria-label=Loss] canvas').chart.series"


def test_runs_are_filtered_ordered_grouped_and_the_address_is_the_view(site: Site, at: Tab) -> None:
    page = at.page
    at.show("runs")
    assert page.locator(ROWS).count() >= RUNS
    page.fill("input[aria-label='Filter runs']", "tag=baseline step>5")
    page.wait_for_function(f"() => document.querySelectorAll('{ROWS}').length === 1")
    assert "5 run-5" in page.inner_text(ROWS)
    page.fill("input[aria-label='Filter runs']", "learning_rate>=2e-4 run-")
    page.wait_for_function(f"() => document.querySelectorAll('{ROWS}').length === 5")
    page.click("th button:has-text('loss')")
    page.locator("th[aria-sort=descending]:has-text('loss')").wait_for()
    page.click("th button:has-text('loss')")
    page.locator("th[aria-sort=ascending]:has-text('loss')").wait_for()
    losses = [float(each) for each in page.locator(f"{ROWS} td:nth-child(6)").all_inner_texts()]
    assert losses == sorted(losses) and len(losses) == 5
    page.select_option("select[aria-label='Group by']", "team")
    page.locator(".runtable tr.group").first.wait_for()
    assert page.locator(".runtable tr.group").count() == 3
    page.click(".runtable tr.group button >> nth=0")
    told = page.inner_text(".runtable")
    page.reload()
    page.locator(".runtable tr.group").first.wait_for()
    assert "group=team" in page.url and "sort=loss" in page.url
    assert page.input_value("input[aria-label='Filter runs']") == "learning_rate>=2e-4 run-"
    assert len(page.inner_text(".runtable")) > len(told)  # folded groups are not kept


def test_curves_of_runs_share_axis_smoothing_and_zoom(site: Site, at: Tab) -> None:
    page = at.page
    at.show("runs?jobs=5,2")
    page.wait_for_function(f"() => {SERIES}.length === 2")
    steps = page.evaluate(f"{SERIES}[0].x")
    high = page.evaluate(
        "document.querySelector('section[aria-label=Loss] canvas').chart.ranges().high"
    )
    assert max(page.evaluate(f"{SERIES}[0].y")) > 2 * high, "the spike is left to the edge"
    page.click("text=Tokens >> nth=0")
    page.wait_for_function(f"() => {SERIES}[0].x[0] > 1000")
    tokens = page.evaluate(f"{SERIES}[0].x")
    assert tokens == [step * (1 << 20) for step in steps]
    page.click("text=FLOPs")
    page.wait_for_function(f"() => {SERIES}[0].x[0] > 1e9")
    page.click("text=Steps >> nth=0")
    page.focus("#smoothing")
    page.keyboard.press("End")
    page.wait_for_function(f"() => {SERIES}.length === 4")
    assert page.evaluate(f"Math.max(...{SERIES}[1].y)") < high * 1.2, "outliers do not pull"
    page.locator("section[aria-label=Loss] canvas").scroll_into_view_if_needed()
    box = page.locator("section[aria-label=Loss] canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60)
    page.mouse.up()
    page.wait_for_function("() => location.hash.includes('zoom=')")
    zooms = page.evaluate(
        "[...document.querySelectorAll('.overlay canvas')].map((each) => each.chart.zoom?.length)"
    )
    assert set(zooms) == {2}
    page.click("label:has-text('Own work of ranks')")
    band = "document.querySelector('section[aria-label^=\"Own work\"] canvas').chart.series"
    page.wait_for_function(f"() => {band}.length === 2")
    assert page.evaluate(f"{band}[0].max.every((most, i) => most >= {band}[0].min[i])")
    shown = page.inner_text("section[aria-label='What differs']")
    assert "optimizer.learning_rate" in shown and "phalanx runs diff 5 2" in shown


@pytest.mark.parametrize("at", ["user"], indirect=True)
def test_tags_notes_and_saved_views_are_the_teams(site: Site, at: Tab, chrome: Any) -> None:
    page = at.page
    at.show("runs?jobs=4&find=run-4")
    page.fill("input[aria-label='Tag of run 4']", "kept")
    page.fill("input[aria-label='Note about run 4']", "<b>best</b> so far")
    page.click(".chosenruns button:has-text('Add')")
    page.get_by_text("phalanx runs note 4 '<b>best</b> so far'").wait_for()
    run = site.get("/v1/runs/4")
    assert "kept" in run["tags"] and run["notes"][-1]["text"] == "<b>best</b> so far"
    page.click("text=Save view")
    page.fill("input[aria-label='Name of the view']", "best-runs")
    page.keyboard.press("Enter")
    page.get_by_text("Kept: everybody of your team finds it here").wait_for()
    with tab(chrome, site.server.url) as other:
        other.sign_in(site.tokens["read"], "runs")
        assert not other.page.is_visible("text=Save view")
        other.page.select_option("select[aria-label='Saved views']", label="best-runs (ann)")
        other.page.wait_for_function("() => location.hash.includes('find=run-4')")
        other.page.wait_for_function(f"() => document.querySelectorAll('{ROWS}').length === 1")
        assert other.page.is_disabled("input[aria-label='Tag of run 4']")
        assert other.problems == []


def test_an_alert_is_set_tried_silenced_and_told(site: Site, at: Tab) -> None:
    page = at.page
    with HttpReceiver() as hook:
        at.show("alerts")
        page.fill("input[name=name]", "money")
        page.select_option("select[name=kind]", "budget_above")
        page.fill("input[name=threshold]", "0.001")
        page.fill("input[name=targets]", f"slack:{hook.url}/secret, {hook.url}/secret")
        command = page.inner_text(".alertform code")
        assert command.startswith("phalanx alerts set money budget-above --threshold 0.00001")
        page.click("text=Set the alert")
        page.get_by_text("Set: when any job has used 0% of its budget").wait_for()
        row = page.locator("tr:has-text('money')")
        row.get_by_text("Test").click()
        page.get_by_text("it arrived; 127.0.0.1: it arrived").wait_for()
        assert json.loads(hook.got[0]) == {"text": "money: this is a test: all is well"}
        assert json.loads(hook.got[1])["kind"] == "alert"
        assert "secret" not in row.inner_text()
        job = RUNS - 1  # it runs, and has used GPUs
        site.server.call("POST", f"/v1/jobs/{job}/budget", {"gpu_hours": 1000})
        row.get_by_text("true for 1 thing").wait_for()
        page.locator(".list li:has-text('of its budget is used')").first.wait_for()
        site.server.wait_for("/v1/alerts", lambda _: len(hook.got) == 4)
        told = [json.loads(each) for each in hook.got[2:]]  # two are sent at a time
        assert [each["job"] for each in told if "job" in each] == [job]
        row.get_by_text("Silence for 1 h").click()
        row.get_by_text("silent until").wait_for()
        assert site.get("/v1/alerts")["alerts"][0]["silent_until"] > 0
        row.get_by_text("Remove").click()
        assert "phalanx alerts rm money" in page.inner_text("dialog.ask")
        page.click("dialog.ask button:has-text('Remove')")
        page.click(".toast button:has-text('Now')")
        page.get_by_text("No alert is set").wait_for()


def test_who_may_set_which_alert_is_the_servers_word(site: Site) -> None:
    call, tokens = site.server.call, site.tokens
    rule = {"kind": "finding", "finding": "loss_spike", "targets": ["https://internal/x"]}
    assert call("PUT", "/v1/alerts/a", rule, token=tokens["read"])[0] == 403
    status, body = call("PUT", "/v1/alerts/a", rule, token=tokens["user"])
    assert status == 403 and body["error"]["code"] == "target_closed"
    assert call("PUT", "/v1/alerts/a", rule | {"targets": []}, token=tokens["user"])[0] == 200
    assert call("PUT", "/v1/alerts/b", rule)[0] == 200
    shown = call("GET", "/v1/alerts", token=tokens["user"])[1]["alerts"]
    assert shown[1]["rule"]["targets"] == [] and shown[1]["targets"] == ["internal"]
    assert call("DELETE", "/v1/alerts/b", token=tokens["user"])[0] == 403
    for bad in ({"finding": "nothing"}, {"finding": ""}, {"targets": ["mail:ann@example.org"]}):
        assert call("PUT", "/v1/alerts/c", rule | bad)[0] == 409
    for name in ("a", "b"):
        assert call("DELETE", f"/v1/alerts/{name}")[0] == 200


def test_the_samples_of_a_step_are_told_by_their_numbers(site: Site) -> None:
    found = site.get("/v1/jobs/4/batch?step=3&rank=5")
    assert (found["first_sample"], found["samples"]) == (128, 64)
    assert (found["rank_first_sample"], found["rank_samples"]) == (128 + 5 * 8, 8)
    job = site.submit("no-file")
    status, body = site.server.call("GET", f"/v1/jobs/{job}/batch?step=1")
    assert (status, body["error"]["code"]) == (409, "no_batch")


def test_the_palette_goes_anywhere_by_a_few_letters(site: Site, at: Tab) -> None:
    page = at.page
    page.keyboard.press("Control+k")
    page.locator("dialog.palette[open]").wait_for()
    page.keyboard.type("rn-3")
    page.locator("dialog.palette li[aria-selected=true]:has-text('3 run-3')").wait_for()
    page.keyboard.press("Enter")
    page.wait_for_function("() => location.hash === '#/job/3'")
    page.keyboard.press("Meta+k")
    page.keyboard.type("alerts")
    page.keyboard.press("Enter")
    page.wait_for_function("() => location.hash === '#/alerts'")


def test_a_view_is_shared_as_one_file_that_needs_nothing(
    site: Site, at: Tab, chrome: Any, tmp_path: Path
) -> None:
    at.show("runs?jobs=2,3")
    at.page.wait_for_function("() => document.querySelector('[data-drawn=\"2,3\"]')")
    with at.page.expect_download() as waiting:
        at.page.click("button:has-text('Share')")
    file = tmp_path / "view.html"
    waiting.value.save_as(file)
    text = file.read_text()
    assert "default-src 'none'" in text and "<script" not in text
    assert site.tokens["admin"] not in text and "/#/runs?jobs=2" in text
    with tab(chrome, site.server.url) as reader:
        reader.page.goto(file.as_uri())
        assert "run-3" in reader.page.inner_text("body")
        pictures = "[...document.images].filter((each) => each.naturalWidth > 100).length"
        assert reader.page.evaluate(pictures) >= 2
        assert reader.page.locator("button, input, select").count() == 0
        assert [each for each in reader.requested if each.startswith("http")] == []
        assert reader.problems == []


@pytest.mark.soak
@pytest.mark.parametrize(("size", "dark"), [("desk", False), ("desk", True), ("phone", False)])
def test_no_view_has_a_barrier_that_axe_finds(
    site: Site, chrome: Any, size: str, dark: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """WCAG 2.1 A and AA, by axe-core, which npm fetches."""
    source = axe_core(tmp_path_factory.getbasetemp() / "axe")
    found: dict[str, Any] = {}
    with tab(chrome, site.server.url, size, dark) as opened:
        opened.sign_in(site.tokens["admin"])
        for view in VIEWS:
            opened.show(view)
            found |= {view: wrong} if (wrong := opened.barriers(source)) else {}
        opened.page.keyboard.press("Control+k")
        found |= {"palette": wrong} if (wrong := opened.barriers(source)) else {}
    assert found == {}


EARLY = "Object.keys(phalanxEarly.answers)"


@pytest.mark.parametrize("view", ["fleet", "jobs", "runs", "alerts"])
def test_a_view_asks_early_for_what_it_needs_and_for_nothing_else(
    site: Site, at: Tab, view: str
) -> None:
    at.show(view)
    at.requested.clear()
    at.page.reload()
    at.page.wait_for_function(READY, arg=f"{view}/")
    assert at.page.evaluate(EARLY) == []
    asked = [urlsplit(each) for each in at.requested]
    scripts = [each.path.rsplit("/", 1)[1] for each in asked if each.path.endswith(".js")]
    assert f"{view}.js" in scripts and "simulate.js" not in scripts
    at.page.wait_for_function("() => document.querySelector('link[href$=\"views/simulate.js\"]')")


def test_what_is_filtered_and_zoomed_stands_in_the_address(site: Site, at: Tab) -> None:
    page = at.page
    at.show("jobs?show=ended&find=run-2")
    page.wait_for_function("() => document.querySelectorAll('tr.link').length === 1")
    page.click("button:has-text('All')")
    page.wait_for_function("() => location.hash === '#/jobs?find=run-2'")
    at.show("fleet?colour=job&only=healthy&find=0")
    assert page.input_value("input[aria-label='Find a node']") == "0"
    page.wait_for_function("() => document.querySelector('canvas.map').map.found?.size > 0")
    box = page.locator("canvas.map").bounding_box()
    assert box is not None
    at.show("goodput")
    stack = page.locator("section[aria-label='Over time'] canvas")
    box = stack.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60)
    page.mouse.up()
    page.wait_for_function("() => /from=\\d+&to=\\d+/.test(location.hash)")
    page.click("text=All of the time")
    page.wait_for_function("() => location.hash === '#/goodput'")


def test_what_an_address_says_is_taken_back_again(site: Site, at: Tab) -> None:
    page = at.page
    at.show("events?job=1&show=all")
    page.locator(".tag.other:has-text('job 1')").wait_for()
    assert page.locator(".event[data-kind=Submit]").count() == 1
    page.click("a[aria-label='Show all events']")
    page.wait_for_function("() => document.querySelectorAll('.event[data-kind=Submit]').length > 1")
    assert page.locator(".tag.other").count() == 0
    page.click("button:has-text('Trouble')")
    page.wait_for_function("() => location.hash === '#/events?show=trouble'")
    page.goto(f"{site.server.url}/#/plan?model=llama3-8b&gpus=64")
    page.wait_for_function("() => document.querySelector('#plan-model')?.value === 'llama3-8b'")
    page.goto(f"{site.server.url}/#/plan?model=llama3-70b&gpus=1024")
    page.wait_for_function("() => document.querySelector('#plan-model')?.value === 'llama3-70b'")
    page.goto(f"{site.server.url}/#/%")  # cut off
    page.wait_for_function(READY, arg="fleet/")


def test_a_view_that_was_left_keeps_nobody_waiting(site: Site, at: Tab) -> None:
    page, held = at.page, []
    page.route("**/v1/plan/choices", lambda route: held.append(route))
    page.goto(f"{site.server.url}/#/plan")
    page.locator("#plan-gpus").wait_for()
    try:
        at.show("queue")
        with page.expect_response("**/v1/plan"):
            held.pop().continue_()
    finally:
        for each in held:
            each.abort()
    assert page.evaluate("location.hash") == "#/queue"  # it writes no address any more


@pytest.mark.parametrize("first", ["the live socket", "an answer"])
def test_who_signs_in_again_hears_of_what_happens(site: Site, chrome: Any, first: str) -> None:
    made = site.server.call("POST", "/v1/tokens", {"name": "guest", "role": "user"})[1]
    delete = ("DELETE", f"/v1/tokens/{made['token']['id']}")
    with tab(chrome, site.server.url) as opened:
        page = opened.page
        opened.sign_in(made["secret"], "jobs")
        page.locator(".live:has-text('live')").wait_for()
        if first == "an answer":
            page.route("**/v1/views", lambda route: (site.server.call(*delete), route.continue_()))
        with page.expect_response("**/v1/views"):
            page.keyboard.press("Control+k")
        if first == "the live socket":
            site.server.call(*delete)
        page.get_by_text("this token is not good any more").wait_for()
        assert page.locator("dialog[open]").count() == 0
        # What a timer asks for after that has no token at all, and changes nothing of the form.
        api = "import(`${base}/lib/api.js`)"
        page.evaluate(
            f"(base) => {api}.then((api) => api.get('/v1/jobs').catch(() => 0))",
            page.get_attribute("meta[name=page-base]", "content"),
        )
        assert page.get_by_text("this token is not good any more").is_visible()
        page.fill("#token", site.tokens["user"])
        with page.expect_websocket() as socket:
            page.keyboard.press("Enter")
        assert socket.value.url.endswith("/v1/live")
        page.wait_for_function(READY, arg="jobs/")


def test_the_palette_leads_to_views_while_the_server_is_away(site: Site, chrome: Any) -> None:
    with tab(chrome, site.server.url) as opened:
        page = opened.page
        opened.sign_in(site.tokens["read"], "jobs")
        page.wait_for_function("() => document.querySelector('link[href$=\"views/alerts.js\"]')")
        page.route("**/v1/views", lambda route: route.abort())
        page.keyboard.press("Control+k")
        page.keyboard.type("alerts")
        page.keyboard.press("Enter")
        page.wait_for_function("() => location.hash === '#/alerts'")
        assert [each for each in opened.problems if "net::ERR" not in each] == []


DRAWN = """async (base) => {
  const names = ["chart", "stack", "heatmap", "format"];
  const [{ Chart }, { Stack }, { HeatMap }, format] = await Promise.all(
    names.map((name) => import(`${base}/lib/${name}.js`)));
  const drawn = [], pen = CanvasRenderingContext2D.prototype, { fillText } = pen;
  const before = { left: 0, center: 0.5, right: 1 };
  pen.fillText = function (text, x, y) {
    const wide = this.measureText(text).width, left = x - before[this.textAlign] * wide;
    const room = this.canvas.getBoundingClientRect().width;
    drawn.push([text, left >= 0 && left + wide <= room]);
    return fillText.apply(this, arguments);
  };
  const told = (made, act) => {
    document.querySelector("#main").append(made.node);
    act(made);
    drawn.length = 0;
    made.paint();
    return [...drawn];
  };
  const ns = (seconds) => seconds * 1e9, hundred = Array.from({ length: 100 }, (_, i) => i);
  const clock = { x: "at", formatX: (seconds) => format.clock(ns(seconds)) };
  const line = (format, low, high, more = {}, first = 0) => told(
    new Chart({ label: "l", format, ...more }),
    (chart) => chart.show([{
      name: "l", x: hundred.map((i) => first + i), y: hundred.map((i) => low + i * (high - low)),
    }]));
  const bin = (from, to) => ({ from, to, buckets: { productive: 4 * ns(to - from) } });
  const ranks = { steps: [5, 6], rows: "rank", ranks: [0, 1], nodes: ["a", "b"] };
  return {
    seconds: line(format.span, 1.1, 1.1004), milliseconds: line(format.span, 0.01, 0.010007),
    shares: line(format.tickPercent, 0.99, 0.990005), times: line(format.short, 1, 2, clock, 1e9),
    fine: told(new Stack(), (stack) => stack.show([bin(0, 30), bin(30, 60)])),
    long: told(new Stack(), (stack) => stack.show([bin(0, 86400), bin(86400, 3 * 86400)])),
    heat: told(new HeatMap(), (heat) => heat.show({ ...ranks, step_seconds: [[1, 1], [1, 2]] })),
  };
}"""


UNITS = """async (base) => {
  const names = ["scale", "format"];
  const [{ clockTicks }, { quantity }] = await Promise.all(
    names.map((name) => import(`${base}/lib/${name}.js`)));
  return [clockTicks(95, 420, 4), [25.3e9, 800, 0].map((value) => quantity(value, "B"))];
}"""


def test_times_have_ticks_at_whole_minutes_and_units_stand_apart(site: Site, at: Tab) -> None:
    base = at.page.get_attribute("meta[name=page-base]", "content")
    assert at.page.evaluate(UNITS, base) == [[120, 240, 360], ["25.3 GB", "800 B", "0 B"]]


def test_a_job_that_ended_before_its_first_step_awaits_nothing(site: Site, at: Tab) -> None:
    job = site.submit("ends")
    assert site.server.call("POST", f"/v1/jobs/{job}/cancel", {})[0] in (200, 202)
    at.show(f"job/{job}")
    at.wait_for_text("It ended before a rank told of a step.")
    assert " yet" not in at.text()


def test_what_never_reported_a_step_has_no_empty_curves_and_no_goodput(site: Site, at: Tab) -> None:
    job = site.submit("silent")
    at.show(f"job/{job}")
    assert "0.0 %" not in at.text()
    assert site.server.call("POST", f"/v1/jobs/{job}/cancel", {})[0] in (200, 202)
    at.show("jobs")
    at.show(f"job/{job}")
    at.wait_for_text("goodput")
    titles = [each.inner_text() for each in at.page.locator("h2").all() if each.is_visible()]
    assert "Logs" in titles and not {"Loss", "MFU", "Step time by rank"} & set(titles)


def test_what_does_not_exist_is_one_sentence_and_a_way_back(site: Site, at: Tab) -> None:
    for view, sentence in (("job/4242", "There is no job 4242"), ("node/nowhere", "There is no")):
        at.show(view)
        assert sentence in at.text() and "–" not in at.text()
    at.page.get_by_text("See fleet").click()
    at.wait_for_text("Needs attention")
    at.problems[:] = [each for each in at.problems if "404 (Not Found)" not in each]


def test_on_a_phone_the_view_is_marked_where_one_sees_it_and_a_lost_server_takes_a_line(
    site: Site, at: Tab
) -> None:
    at.page.set_viewport_size({"width": 390, "height": 844})
    at.show("alerts")
    right = at.page.evaluate(
        "() => document.querySelector('[aria-current]').getBoundingClientRect().right"
    )
    assert right <= 390
    tall = """() => {
      const live = document.querySelector(".live");
      live.classList.add("away");
      live.textContent = "the server is away, trying again";
      return document.querySelector(".top").offsetHeight;
    }"""
    assert at.page.evaluate(tall) < 120  # pixels; a column of single words has twice as many


def test_axes_are_named_and_no_two_ticks_read_the_same(site: Site, at: Tab) -> None:
    base = at.page.get_attribute("meta[name=page-base]", "content")
    found = at.page.evaluate(DRAWN, base)
    texts = {name: [text for text, _ in each] for name, each in found.items()}
    assert [text for each in found.values() for text, fits in each if not fits] == []
    for name, unit in (("seconds", " s"), ("milliseconds", " ms"), ("shares", " %")):
        ticks = [text for text in texts[name] if text.endswith(unit)]
        assert len(ticks) > 2 and len(set(ticks)) == len(ticks), ticks
        assert "step" in texts[name]
    assert "at" in texts["times"] and "step" in texts["heat"]
    assert {"0 %", "100 %"} <= set(texts["fine"])
    assert {"GPUs", "0", "4"} <= set(texts["long"])
    assert any(text.startswith("1970-01-0") for text in texts["long"])  # days have dates


def test_pure_parts_of_the_page_do_what_they_say(site: Site, at: Tab) -> None:
    base = at.page.get_attribute("meta[name=page-base]", "content")
    found = at.page.evaluate(
        """async (base) => {
          const [curves, filter, logs, incident, command] = await Promise.all(
            ["lib/curves", "lib/runfilter", "lib/logpane", "views/incident", "lib/command"].map(
              (name) => import(`${base}/${name}.js`)));
          const run = { job: 7, name: "a", user: "u", team: "t", state: "done", tags: ["x"],
            last: { loss: 2.5 }, settings: { "optimizer.learning_rate": 1e-3 } };
          return {
            smooth: curves.smooth([1, null, 3], 0.5),
            along: curves.along([0, 10], [100, 200], 5),
            few: curves.usualRange([1, 2, 3]),
            fits: ["loss<3", "learning_rate=0.001", "tag=x done", "tag!=x", "mfu>0", "zzz"].map(
              (text) => filter.matching([run], text).length),
            error: logs.firstError(["0 errors", "ok", "RuntimeError: x"]),
            none: logs.firstError(["no error", "errors: 0", "fine"]),
            others: incident.alternatives("swap with 72 or requeue with 7219"),
            from: [[], [{ kind: "GangReady", time_ns: 7e9, body: { step: 5 } }]].map(
              (events) => incident.continuedFrom({ committed: 3 }, events, 6)),
            labels: incident.labelled([0, 0.1, 0.2, 10], 10, 1000, 70).map(({ away }) => away),
            quoted: command.shellWords("a b", "it's", "plain=1", ""),
          };
        }""",
        base,
    )
    assert found["smooth"] == [1, None, pytest.approx(7 / 3)]
    assert found["along"] == 150 and found["few"] is None
    assert found["fits"] == [1, 1, 1, 0, 0, 0]
    assert (found["error"], found["none"]) == (2, -1)
    assert found["others"] == [{"rung": "swap", "loss": 72}, {"rung": "requeue", "loss": 7219}]
    assert found["from"] == [3, 5]
    assert found["labels"] == [0, 0, 50, 0]
    assert found["quoted"] == """'a b' 'it'"'"'s' plain=1"""
