"""One job inside an allocation of another engine: from its agents to its end or its next turn.

Runs beside the agents: keeps a controller (or uses one elsewhere), submits the job once, tells the
core which nodes the engine wants back, and turns the engine's warning into a checkpoint.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Literal
from urllib.parse import quote

from msgspec import Struct, structs

from phalanx.cluster.jobs.job import ENDED, JobState
from phalanx.config import ConfigError
from phalanx.control.backends.job_output import JobOutput
from phalanx.control.backends.need import Need
from phalanx.control.backends.own_controller import CertificateError, OwnController
from phalanx.control.backends.site import Nowhere, Site, SiteQuestions
from phalanx.control.backends.stored_run import OUTPUT_FILE
from phalanx.control.client.client import Client, ClientError
from phalanx.control.server.http.submission import RequestedWork, submission
from phalanx.control.wire.api_types import (
    MOST_WHY,
    Done,
    DrainIn,
    JobDetail,
    JobList,
    JobOut,
    NodeList,
    NodeOut,
    Readmit,
    Status,
)

AGAIN = 75  # exit code: not done, to be continued in another allocation
CANCELLED = 143  # exit code: the engine ends the allocation, and waits for nobody
POLL_SECONDS = 0.1
OUTPUT_SECONDS = 5.0  # for the last lines that ranks printed
JOIN_SECONDS = 120.0  # for the agents of a gang
ENDED_FILE = "ended"  # in the state, for agents whose engine does not end them
SPARE_SECONDS = 60.0  # more, for those that would only stand by

log = logging.getLogger("phalanx.lead")


class LeadError(Exception):
    """The job cannot run in this allocation, and why."""


class LeadOptions(Struct, frozen=True, kw_only=True):
    """How a job is led."""

    state: Path  # on storage that every later allocation sees as well
    url: str
    wanted: RequestedWork
    node_gpus: int
    slots: int  # nodes that the gang needs
    policy: Path | None = None
    own_server: bool = True
    output: Literal["stdout", "stderr"] = "stdout"  # of what ranks print; stderr: and a file
    feature: str = ""  # that tells this allocation's nodes from others at a shared controller


def options_in(
    run: Path, url: str, wanted: RequestedWork, need: Need, policy: Path | None
) -> LeadOptions:
    """How the job of a run's folder is led, on what was needed for it."""
    environment = {**wanted.environment, "PHALANX_RUN": run.name}
    made = structs.replace(
        wanted, environment=environment, traffic=need.traffic, spares=need.spares
    )
    return LeadOptions(
        state=run / "control",
        url=url,
        wanted=made,
        node_gpus=need.gpus_per_node,
        slots=need.slots,
        policy=policy,
        output="stderr",  # the other one is for the answer
    )


class BatchLeader:
    """``run`` returns the exit code of the batch script."""

    def __init__(self, options: LeadOptions, site: Site | None = None) -> None:
        self.options = options
        self.site: Site = site or Nowhere()
        self.state = options.state
        self._controller: OwnController | None = None
        if options.own_server:
            self._controller = OwnController(options.state, options.url, options.policy)
        self._leaving = ""  # why
        self._emptied: dict[str, str] = {}  # nodes that we asked to be empty
        self._questions = SiteQuestions()
        self.quarantined: list[str] = []  # nodes that did harm, for whoever asks for nodes next

    def run(self) -> int:
        """Until the job has ended (0 or 1), or must wait for another allocation (AGAIN)."""
        try:
            self._spares()  # refuses before anything is started
            self.start()
            return self.finish()
        finally:
            self.end()

    @property
    def leaving(self) -> str:
        """The signal that told us to leave; "": none did."""
        return self._leaving

    def start(self) -> None:
        """Start the controller and listen to the engine's warnings."""
        for warning in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(warning, self._warned)
        self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._controller is not None:
            try:
                self._controller.start()
            except CertificateError as error:
                raise LeadError(str(error)) from None

    def finish(self) -> int:
        """What ``run`` does once the controller starts; ends it."""
        try:
            spares = self._spares()
            self.client = self._connect()
            self._settle_nodes()
            joined = self._wait_for_nodes()
            if self._leaving and not self._known():
                return CANCELLED if self._over() else AGAIN  # there is nothing to save
            earlier = self._known()
            number = self._submit(earlier, max(0, min(spares, joined - self.options.slots)))
            client = Client(self.options.url, self.state)
            outs: list[BinaryIO] = [sys.stdout.buffer]
            if self.options.output == "stderr":
                outs = [sys.stderr.buffer, (self.state.parent / OUTPUT_FILE).open("ab")]
            output = JobOutput(client, number, outs, seen=bool(earlier))
            code = self._follow(number)
            output.finish(OUTPUT_SECONDS if code != AGAIN else 0.0)
            if code not in (AGAIN, CANCELLED):
                (self.state / ENDED_FILE).write_text(f"{code}\n")
            return code
        finally:
            self.end()

    def _warned(self, number: int, frame: FrameType | None) -> None:
        self._leaving = signal.Signals(number).name

    def _spares(self) -> int:
        """How many of the nodes stand by: fewer than asked for in a small allocation."""
        have, need = len(self.site.nodes()), self.options.slots
        if have < need:
            raise LeadError(
                f"the allocation has {have} nodes and the gang needs {need}: ask for {need} and "
                f"{self.options.wanted.spares} spares"
            )
        spares = min(self.options.wanted.spares, have - need)
        if spares < self.options.wanted.spares:
            log.warning("only %d of %d spares were allocated", spares, self.options.wanted.spares)
        return spares

    # The controller.

    def end(self) -> None:
        """End the controller, where it is ours."""
        if self._controller is not None:
            self._controller.end()

    def _look_after_controller(self) -> None:
        if self._controller is not None:
            self._controller.look_after()

    def _connect(self) -> Client:
        deadline = time.monotonic() + JOIN_SECONDS
        while True:
            said = self._controller.last_words if self._controller is not None else ""
            if said:
                raise LeadError(f"the controller does not start: {said}")
            with suppress(ClientError):
                client = Client(self.options.url, self.state)
                client.get("/v1/status", Status)
                return client
            if time.monotonic() > deadline or self._leaving:
                raise LeadError(f"no controller answers at {self.options.url}")
            time.sleep(POLL_SECONDS)

    def _ask(self, call: Callable[[], object]) -> bool:
        """Ask the controller for something it may refuse, or not be there for."""
        try:
            call()
        except ClientError as error:
            log.warning("%s", error)
            return False
        return True

    # Nodes.

    def _nodes(self) -> dict[str, NodeOut]:
        found = self.client.get("/v1/nodes", NodeList, limit=20_000).nodes
        return {node.name: node for node in found}

    def _settle_nodes(self) -> None:
        """Nodes of an earlier allocation get no work; those that are back are taken again."""
        allocated = self.site.nodes()
        for name, node in self._nodes().items() if self.options.own_server else ():
            if name not in allocated and node.state in ("healthy", "spare", "suspect"):
                self._empty(name, "it is not part of this allocation")
            elif name in allocated and node.state == "draining":
                self._readmit(name)

    def _empty(self, name: str, why: str) -> None:
        log.info("%s is to be empty: %s", name, why)
        path = f"/v1/nodes/{quote(name, safe='')}/drain"
        if self._ask(lambda: self.client.post(path, DrainIn(why=why[:MOST_WHY]), Done)):
            self._emptied[name] = why

    def _readmit(self, name: str) -> None:
        log.info("%s may be used again", name)
        path = f"/v1/nodes/{quote(name, safe='')}/readmit"
        if self._ask(lambda: self.client.post(path, Readmit(), Done)):
            self._emptied.pop(name, None)

    def _wait_for_nodes(self) -> int:
        """How many agents have joined: all, or at least the gang's."""
        began = time.monotonic()
        nodes_here, count = self.site.nodes(), 0
        while not self._leaving:
            self._look_after_controller()
            with suppress(ClientError):
                there = {name for name, node in self._nodes().items() if node.connected}
                count = len(there.intersection(nodes_here))
                waited = time.monotonic() - began
                if count == len(nodes_here):
                    log.info("%d agents joined after %.1f s", count, waited)
                    break
                if count >= self.options.slots and waited > SPARE_SECONDS:
                    missing = sorted(set(nodes_here) - there)
                    log.warning("without spares %s, whose agents have not joined", missing)
                    break
                if waited > JOIN_SECONDS:
                    raise LeadError(self._who_is_missing(there))
            time.sleep(POLL_SECONDS)
        return count

    def _who_is_missing(self, there: set[str]) -> str:
        here = self.site.nodes()
        missing, strangers = sorted(set(here) - there), sorted(there - set(here))
        sentence = f"{', '.join(missing[:5])}: no agent joined within {JOIN_SECONDS:.0f} s"
        if strangers and self.options.own_server:
            return (
                f"{sentence}, but {', '.join(strangers[:5])} did, which the engine does not name: "
                "agents must be called as their engine calls their nodes (leave --name out)"
            )
        return f"{sentence}; see {self.state}/nodes/{missing[0]}"

    def _ask_site(self) -> None:
        """What the engine's administrator wants of the nodes, told to the core."""
        unwanted = self._questions.unwanted(self.site)
        if unwanted is None:
            return
        for name, why in unwanted.items():
            if name not in self._emptied:
                self._empty(name, why)
        for name in [each for each in self._emptied if each in self.site.nodes()]:
            if name not in unwanted:
                self._readmit(name)

    # The job.

    def _submit(self, number: int, spares: int) -> int:
        """Put the job into the queue, once; ``number``: known, and let in again."""
        if number:
            if self._job(number).state == JobState.PENDING:
                self._ask(lambda: self.client.post(f"/v1/jobs/{number}/release", None, Done))
            return number
        wanted = structs.replace(
            self.options.wanted, spares=spares, constraint=self.options.feature
        )
        # Whoever asked the engine for these nodes has decided already.
        try:
            made = structs.replace(submission(wanted, self.options.node_gpus), confirmed=True)
        except ConfigError as error:  # of what only this node can see: files of its own
            raise LeadError(str(error)) from None
        number = self.client.post("/v1/jobs", made, Done).jobs[0]
        self._number_file.write_text(str(number))
        log.info("job %d: %s", number, wanted.title)
        return number

    @property
    def _number_file(self) -> Path:
        return self.state / "job"

    def _known(self) -> int:
        """The job's number where it was submitted in an earlier turn; 0: it was not."""
        if self.options.own_server:
            known = self.client.get("/v1/jobs", JobList, state="all").jobs
            return known[0].id if known else 0
        return int(self._number_file.read_text()) if self._number_file.exists() else 0

    def _job(self, number: int) -> JobOut:
        return self.client.get(f"/v1/jobs/{number}", JobDetail).job

    def _follow(self, number: int) -> int:
        seen = ""
        while not self._leaving:
            self._look_after_controller()
            with suppress(ClientError):
                job = self._job(number)
                if job.state != seen:
                    log.info("job %d is %s: %s", number, job.state, job.why.text)
                    seen = job.state
                if job.state in ENDED:
                    self._note_quarantined()
                    return 0 if job.state == JobState.DONE else 1
                self._ask_site()
            time.sleep(POLL_SECONDS)
        return self._leave(number)

    def _leave(self, number: int) -> int:
        """The engine wants its nodes back: checkpoint, then out of the queue until the next."""
        if self._over():
            log.info("%s: the engine ends this allocation", self._leaving)
            return CANCELLED
        log.info("%s: a checkpoint, and on in the next allocation", self._leaving)
        asked = asked_to_hold = False
        while True:
            self._look_after_controller()
            with suppress(ClientError):
                job = self._job(number)
                if job.state in ENDED:
                    return 0 if job.state == JobState.DONE else 1
                if job.state in (JobState.RUNNING, JobState.FORMING) and not asked:
                    asked = self._ask(
                        lambda: self.client.post(f"/v1/jobs/{number}/requeue", None, Done)
                    )
                elif job.state in (JobState.PENDING, JobState.DRAINING) and not asked_to_hold:
                    asked_to_hold = self._ask(
                        lambda: self.client.post(f"/v1/jobs/{number}/hold", None, Done)
                    )
                elif job.state == JobState.PENDING:
                    log.info("step %d is on disk", job.durable)
                    self._note_quarantined()
                    return AGAIN
                elif job.state == JobState.FORMING:
                    asked = False  # it was quicker than we
            time.sleep(POLL_SECONDS / 5)

    def _over(self) -> bool:
        try:
            return self.site.over()
        except Exception as error:  # an engine that does not answer may well wait for us
            log.warning("%s", error)
            return False

    def _note_quarantined(self) -> None:
        """For the next allocation: nodes that did harm."""
        found = self._nodes().items()
        self.quarantined = [name for name, node in found if node.state == "quarantined"]
        (self.state / "exclude").write_text(",".join(self.quarantined))
