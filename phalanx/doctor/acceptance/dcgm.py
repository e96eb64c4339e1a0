"""``dcgmi diag``: NVIDIA's own diagnostic of GPUs, where DCGM is installed."""

from __future__ import annotations

import shutil
import subprocess

import msgspec
from msgspec import Struct, field

from phalanx.cluster.causes import Cause
from phalanx.doctor.finding import Finding, Measured

# As its documentation has them, with some patience: level 4 takes an hour or two.
LIMIT_SECONDS = {1: 120.0, 2: 900.0, 3: 3600.0, 4: 10_800.0}
PASSED, SKIPPED, WARNED = ("pass",), ("skip", "skipped", "not run"), ("warn",)


class _Warning(Struct, frozen=True):
    """As DCGM 4 says it; DCGM 3 says the text alone."""

    warning: str = ""


class _Result(Struct, frozen=True):
    status: str
    gpu_ids: str | None = None  # DCGM 2 and 3: "0", "0,1"
    entity_group: str | None = None  # DCGM 4
    entity_id: int | None = None
    warnings: list[_Warning | str] | str = []

    @property
    def device(self) -> str:
        if self.gpu_ids is not None:
            return f"GPU {self.gpu_ids}"
        return f"{self.entity_group} {self.entity_id}" if self.entity_group else ""

    @property
    def said(self) -> str:
        if isinstance(self.warnings, str):
            return self.warnings
        texts = (each if isinstance(each, str) else each.warning for each in self.warnings)
        return "; ".join(filter(None, texts))


class _Test(Struct, frozen=True):
    name: str
    results: list[_Result]


class _Category(Struct, frozen=True):
    category: str
    tests: list[_Test | None]  # DCGM 3 writes null between tests


class _Body(Struct, frozen=True):
    test_categories: list[_Category] = []
    runtime_error: str = ""


class _Diagnostic(Struct, frozen=True):
    new: _Body | None = field(default=None, name="DCGM Diagnostic")
    old: _Body | None = field(default=None, name="DCGM GPU Diagnostic")


class DcgmError(Exception):
    """What it printed is no outcome of a diagnostic."""


def parse_diagnostic(text: str) -> list[Finding]:
    """A finding a test, of what ``dcgmi diag --json`` prints (DCGM 2 to 4)."""
    start = text.find("{")  # lines for people may stand before it
    try:
        told = msgspec.json.decode(text[max(0, start) :].encode(), type=_Diagnostic)
    except msgspec.MsgspecError as error:
        raise DcgmError(f"its output cannot be read: {error}") from None
    body = told.new or told.old
    if body is None:
        raise DcgmError("its output has no diagnostic in it")
    if body.runtime_error:
        raise DcgmError(body.runtime_error)
    tests = [test for each in body.test_categories for test in each.tests if test is not None]
    if not tests:
        raise DcgmError("it ran no test")
    return [_judged(test) for test in tests]


def _judged(test: _Test) -> Finding:
    statuses = {each.device: each.status.lower() for each in test.results}
    counts = list(statuses.values())
    failed = [s for s in counts if s not in (*PASSED, *SKIPPED, *WARNED)]
    warned = [s for s in counts if s in WARNED]
    said = "; ".join(
        f"{each.device}: {each.said or each.status}".removeprefix(": ")
        for each in test.results
        if each.status.lower() not in (*PASSED, *SKIPPED)
    )
    measured: Measured = {"results": len(test.results), "passed": counts.count("pass")}
    if said:
        measured["said"] = said[:500]
    skipped = not any(s not in SKIPPED for s in counts)
    bad = bool(failed or warned)
    return Finding(
        check=f"dcgm {test.name}",
        verdict="fail" if failed else "warn" if warned else "skip" if skipped else "pass",
        measured={} if skipped else measured,
        expected="(DCGM skipped it)" if skipped else "pass on every GPU",
        suggestion="see DCGM's user guide on this test; a field diagnostic decides about a GPU"
        if bad
        else "",
        cause=Cause.GPU_FAULT if failed else "",
    )


def run_diagnostic(level: int) -> list[Finding]:
    """What DCGM finds at a level; that it is not there, or does not run, is a finding too."""
    program = shutil.which("dcgmi")
    if program is None:
        return [Finding(check="dcgm", verdict="skip", expected="(dcgmi is not installed here)")]
    problem = ""
    try:
        done = subprocess.run(
            [program, "diag", "-r", str(level), "--json"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_SECONDS[level],
            check=False,  # it ends with an error where a test failed
        )
        try:
            return parse_diagnostic(done.stdout)
        except DcgmError as error:
            problem = f"{error} {done.stderr.strip()[:200]}".strip()
    except subprocess.TimeoutExpired:
        problem = f"it did not end within {LIMIT_SECONDS[level]:.0f} s"
    except OSError as error:
        problem = error.strerror or str(error)
    return [
        Finding(
            check="dcgm",
            verdict="unknown",
            measured={"problem": problem},
            expected=f"the outcome of `dcgmi diag -r {level}`",
            suggestion="see whether nv-hostengine runs (`systemctl status nvidia-dcgm`)",
        )
    ]
