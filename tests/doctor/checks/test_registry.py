"""Every check is proved on good, bad and missing evidence, and says what it has to say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx.doctor.checks.check import PROFILES, decide, profiles_of
from phalanx.doctor.checks.evidence import NodeEvidence, ProcessFacts, read_process
from phalanx.doctor.checks.registry import SETTINGS
from phalanx.doctor.checks.run import Source, check_settings, open_evidence
from phalanx.doctor.selection import GROUPS
from tests.doctor.checks import test_gpu, test_network, test_os, test_storage
from tests.doctor.checks.played import CPU_VIRTUAL, H200_VIRTUAL, Case, PlayedReader

MODULES = (test_os, test_gpu, test_network, test_storage)


def test_every_check_has_its_cases() -> None:
    cases = [case.check for module in MODULES for case in module.CASES]
    assert sorted(cases) == sorted(SETTINGS)


def test_every_check_says_why_in_a_sentence_and_what_is_expected() -> None:
    for check in SETTINGS.values():
        assert re.fullmatch(r"(os|gpu|network|storage)\.[a-z0-9_]+", check.id)
        assert check.group in GROUPS
        assert check.why.endswith(".") and check.expected
        assert set(check.profiles) <= set(PROFILES)
        assert bool(check.cause) == (check.severity == "critical"), check.id


def test_a_machine_of_which_nothing_can_be_read_passes_nothing() -> None:
    nothing = NodeEvidence(PlayedReader({}, None), ProcessFacts())
    found = {check.id: decide(check, nothing, ()).verdict for check in SETTINGS.values()}
    assert set(found.values()) == {"unknown", "skip"}, found


class GarbledReader:
    """A machine whose files and tools are there and say nothing that can be understood."""

    def __init__(self, reader: PlayedReader) -> None:
        self._reader = reader
        self.names, self.link = reader.names, reader.link

    def run(self, *command: str) -> str:
        text = self._reader.run(*command)
        return re.sub(r">([^<>\n\t]+)</", ">garbage</", text) if "<gpu " in text else "garbage"

    def text(self, path: str) -> str:
        return self._reader.text(path) and "garbage"


# Decided on what the process knows, or on which files there are, or only reported.
WITHOUT_TEXT = {
    *("os.clock", "os.threads", "network.gpudirect", "network.interface", "network.nccl"),
    *("network.hostname", "gpu.dvfs", "gpu.cpu_ratio", "gpu.libraries"),
}
ANOTHER_WORD_IS_WRONG = {"os.governor"}
NOT_THIS_KIND = {"network.mtu", "network.roce"}  # a link that is not known to be up is not judged


@pytest.mark.parametrize(
    "case", [case for module in MODULES for case in module.CASES], ids=lambda case: case.check
)
def test_what_is_not_understood_is_unknown(case: Case) -> None:
    below = case.below or (H200_VIRTUAL if case in test_gpu.CASES else None)
    reader = GarbledReader(PlayedReader(case.good, below))
    with NodeEvidence(reader, case.good_process) as evidence:
        found = decide(SETTINGS[case.check], evidence, ("metal",))
    expected = "unknown"
    if case.check in WITHOUT_TEXT:
        expected = "pass"
    elif case.check in ANOTHER_WORD_IS_WRONG:
        expected = "warn"
    elif case.check in NOT_THIS_KIND:
        expected = "skip"
    assert found.verdict == expected, found


def test_profiles_are_seen_in_the_evidence() -> None:
    def seen(tree: dict[str, str], **process: dict[str, str]) -> tuple[str, ...]:
        return profiles_of(NodeEvidence(PlayedReader(tree, None), ProcessFacts(**process)))

    virtual = {"/proc/cpuinfo": "flags : fpu hypervisor lahf_lm"}
    amazon = virtual | {"/sys/class/dmi/id/sys_vendor": "Amazon EC2"}
    assert seen({}) == ("metal",)
    assert seen(virtual) == ("vm",)
    assert seen(amazon) == ("cloud",)
    assert seen({"/sys/class/dmi/id/sys_vendor": "Amazon EC2"}) == ("metal",)  # a .metal instance
    assert seen(virtual | {"/.dockerenv": ""}) == ("vm", "container")
    kubernetes = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert seen(amazon, environment=kubernetes) == ("cloud", "container")


def test_this_machine_is_read_and_what_was_recorded_is_judged_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "machine"
    with open_evidence(Source(folder=tmp_path, record=folder)) as evidence:
        first = list(check_settings(evidence, tuple(SETTINGS)))
    with open_evidence(Source(folder=tmp_path, recorded=folder)) as evidence:
        second = list(check_settings(evidence, tuple(SETTINGS)))
    assert [(each.check, each.verdict) for each in first] == [
        (each.check, each.verdict) for each in second
    ]
    assert sum(each.verdict == "pass" for each in first) >= 10, first


def test_a_recorded_folder_keeps_no_secret_of_the_environment() -> None:
    environment = {"NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": "x", "OMP_NUM_THREADS": "4"}
    process = read_process(Path("/tmp"), environment)
    assert process.environment == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}


def test_the_captured_machine_is_judged() -> None:
    with open_evidence(Source(folder=Path("/"), recorded=CPU_VIRTUAL)) as evidence:
        found = {each.check: each for each in check_settings(evidence, tuple(SETTINGS))}
    assert {name for name, each in found.items() if each.verdict == "warn"} == {
        "os.nofile",
        "os.clock",
        "network.buffers",
        "network.hostname",
    }
    assert not [each for each in found.values() if each.verdict == "fail"]
