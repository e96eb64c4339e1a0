"""A check of a setting: a pure function from evidence to a judgement, and what is said with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from shlex import quote
from typing import Literal

from msgspec import Struct

from phalanx.doctor.checks.evidence import NodeEvidence
from phalanx.doctor.finding import Finding, Measured, MendStep, Severity, Verdict
from phalanx.hardware.probe.reader import ReadError

Profile = Literal["metal", "vm", "cloud", "container"]
PROFILES: tuple[Profile, ...] = ("metal", "vm", "cloud", "container")
# A virtual machine has no say in it: its host has.
HARDWARE: tuple[Profile, ...] = ("metal", "container")
CLOUDS = ("amazon ec2", "google", "microsoft corporation", "oraclecloud", "alibaba cloud")


class Judgement(Struct, frozen=True, kw_only=True):
    """What a check makes of the evidence; steps and advice where it is bad."""

    verdict: Literal["good", "bad", "skip"]
    measured: Measured = {}
    steps: tuple[MendStep, ...] = ()
    advice: str = ""  # what a person does that no command can; of a skipped check, why


def good(**measured: float | int | str) -> Judgement:
    """It is as it should be."""
    return Judgement(verdict="good", measured=measured)


def bad(measured: Measured, *steps: MendStep, advice: str = "") -> Judgement:
    """It is not; how to mend it."""
    return Judgement(verdict="bad", measured=measured, steps=steps, advice=advice)


def skip(why: str) -> Judgement:
    """There is nothing to decide here."""
    return Judgement(verdict="skip", advice=why)


Judge = Callable[[NodeEvidence], Judgement]


class SettingCheck(Struct, frozen=True, kw_only=True):
    """One check. ``why``: what it costs when it is wrong."""

    id: str  # "os.thp"
    severity: Severity
    expected: str
    why: str
    judge: Judge
    profiles: tuple[Profile, ...] = PROFILES
    commands: tuple[tuple[str, ...], ...] = ()  # whose output it wants, to be started early
    cause: str = ""  # of cluster/causes.py, of a critical one

    @property
    def group(self) -> str:
        """The part of the machine that it looks at."""
        return self.id.partition(".")[0]


class CheckList:
    """The checks of one module, in order."""

    def __init__(self) -> None:
        self.checks: list[SettingCheck] = []

    def add(
        self,
        id: str,
        severity: Severity,
        *,
        expected: str,
        why: str,
        profiles: tuple[Profile, ...] = PROFILES,
        commands: tuple[tuple[str, ...], ...] = (),
        cause: str = "",
    ) -> Callable[[Judge], Judge]:
        """Make a check of a function."""

        def take(judge: Judge) -> Judge:
            self.checks.append(
                SettingCheck(
                    id=id,
                    severity=severity,
                    expected=expected,
                    why=why,
                    judge=judge,
                    profiles=profiles,
                    commands=commands,
                    cause=cause,
                )
            )
            return judge

        return take


def profiles_of(evidence: NodeEvidence) -> tuple[Profile, ...]:
    """What this machine is: one of metal, vm and cloud, and a container on it or not."""
    vendor = evidence.optional("/sys/class/dmi/id/sys_vendor").lower()
    virtual = " hypervisor" in evidence.optional("/proc/cpuinfo")
    machine: Profile = "vm" if virtual else "metal"
    if virtual and vendor.startswith(CLOUDS):
        machine = "cloud"
    environment = evidence.process.environment
    contained = (
        evidence.exists("/.dockerenv")
        or evidence.exists("/run/.containerenv")
        or "KUBERNETES_SERVICE_HOST" in environment
        or "container" in environment
    )
    return (machine, "container") if contained else (machine,)


def decide(check: SettingCheck, evidence: NodeEvidence, profiles: Iterable[Profile]) -> Finding:
    """A check's finding; missing evidence is "unknown", never "pass"."""
    outside = [profile for profile in profiles if profile not in check.profiles]
    if outside:
        return _finding(check, "skip", expected=f"(not decided in profile {outside[0]})")
    try:
        judged = check.judge(evidence)
    except ReadError as error:
        hint = "" if evidence.process.root else "; root may see more"
        denied = any(word in error.why for word in ("ermission", "not permitted", "must be root"))
        return _finding(
            check,
            "unknown",
            measured={"missing": f"{error}{hint if denied else ''}"},
            expected=check.expected,
        )
    except Exception as error:  # evidence of a form that nobody thought of ends no other check
        said = f"cannot be understood: {type(error).__name__}: {error}"[:200]
        return _finding(check, "unknown", measured={"missing": said}, expected=check.expected)
    if judged.verdict == "skip":
        return _finding(check, "skip", expected=f"({judged.advice})")
    if judged.verdict == "good":
        return _finding(check, "pass", measured=judged.measured, expected=check.expected)
    commands = [step.do for step in judged.steps]
    return Finding(
        check=check.id,
        verdict="fail" if check.severity == "critical" else "warn",
        measured=judged.measured,
        expected=check.expected,
        suggestion="; ".join([*commands, *([judged.advice] if judged.advice else [])]),
        cause=check.cause,
        severity=check.severity,
        why=check.why,
        steps=judged.steps,
    )


def _finding(
    check: SettingCheck, verdict: Verdict, *, expected: str, measured: Measured | None = None
) -> Finding:
    return Finding(check=check.id, verdict=verdict, measured=measured or {}, expected=expected)


def write(was: dict[str, str], value: str) -> tuple[MendStep, ...]:
    """Steps that write a value into files, and what each had back."""
    by_value: dict[str, list[str]] = {}
    for path, before in was.items():
        by_value.setdefault(before, []).append(path)
    return tuple(
        step for before, paths in by_value.items() for step in write_all(paths, before, value)
    )


def write_all(paths: list[str], before: str, value: str) -> tuple[MendStep, ...]:
    """A step that writes a value into files that have the same now; names may have a ``*``."""
    return (MendStep(_tee(value, paths), _tee(before, paths)),)


def _tee(value: str, paths: list[str]) -> str:
    # Names in them may be somebody's, as those of interfaces are.
    quoted = ["*".join(quote(each) if each else "" for each in path.split("*")) for path in paths]
    if len(paths) == 1 and "*" not in paths[0]:
        return f"echo {quote(value)} > {quoted[0]}"
    return f"echo {quote(value)} | tee {' '.join(quoted)} > /dev/null"


def set_sysctl(name: str, value: str, before: str) -> MendStep:
    """A step that sets a key of the kernel's."""
    quoted = [f'"{name}={text}"' if " " in text else f"{name}={text}" for text in (value, before)]
    return MendStep(f"sysctl -w {quoted[0]}", f"sysctl -w {quoted[1]}")


def sysctl_path(name: str) -> str:
    """Its file."""
    return f"/proc/sys/{name.replace('.', '/')}"
