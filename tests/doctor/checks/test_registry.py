"""Every check is proved on good, bad and missing evidence, and says what it has to say."""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.doctor.checks.check import PROFILES, decide, profiles_of
from phalanx.doctor.checks.evidence import NodeEvidence, ProcessFacts, read_process
from phalanx.doctor.checks.registry import SETTINGS
from phalanx.doctor.checks.run import Source, check_settings, open_evidence
from phalanx.doctor.selection import GROUPS
from phalanx.hardware.probe import MachineReader
from tests.doctor.checks import test_gpu, test_network, test_os, test_storage
from tests.doctor.checks.played import CPU_VIRTUAL, PlayedReader


def test_every_check_has_its_cases() -> None:
    modules = (test_os, test_gpu, test_network, test_storage)
    cases = [case.check for module in modules for case in module.CASES]
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


def test_evidence_that_is_garbage_is_unknown_and_stops_nothing() -> None:
    paths = ["/dev/nvidia0", "/sys/class/infiniband/mlx5_0/ports/1/state"]
    with NodeEvidence(MachineReader(), ProcessFacts()) as real:
        for check in SETTINGS.values():
            decide(check, real, ("metal",))
        read = [*real._texts, *paths]
    garbage = dict.fromkeys(read, "\x00 garbage ]")
    with NodeEvidence(PlayedReader(garbage, None), ProcessFacts(cpus=(0,))) as evidence:
        verdicts = [finding.verdict for finding in check_settings(evidence, tuple(SETTINGS))]
    assert len(verdicts) == len(SETTINGS) and "unknown" in verdicts


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
