"""One description of a machine: what was read, who said it, and what could not be read."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest
from msgspec import structs

from phalanx.config import ConfigError
from phalanx.hardware.probe import (
    Fact,
    HardwareRecorder,
    Known,
    MachineReader,
    NodeDescription,
    ReadError,
    RecordedReader,
    bad_description,
    describe,
)
from phalanx.hardware.probe.description import MOST_ROWS, changed_facts
from phalanx.hardware.probe.reader import number
from phalanx.hardware.probe.site_file import parse_site, site_facts
from tests.hardware.probe.test_parsers import RECORDED

H100, TRAY, A100, CPU = "h100-4-rails", "gb200-nvl72-tray", "a100-pcie", "cpu-only"
H200 = "h200-virtual"  # captured, not written


class Broken(RecordedReader):
    """A recorded machine of which some commands fail."""

    def __init__(self, tree: str, **answers: str | ReadError) -> None:
        super().__init__(RECORDED / tree)
        self._answers = answers

    def run(self, *command: str) -> str:
        answer = self._answers.get(command[0].replace("-", "_"))
        if isinstance(answer, ReadError):
            raise answer
        return answer if answer is not None else super().run(*command)


def described(tree: str, *facts: Fact, before: NodeDescription | None = None) -> NodeDescription:
    return describe(RecordedReader(RECORDED / tree), Known(facts=facts, before=before))


def said(found: NodeDescription, key: str) -> tuple[str | int, str] | None:
    fact = found.fact(key)
    return (fact.value, fact.source) if fact else None


def test_eight_cards_on_four_switches_are_four_rails() -> None:
    found = described(H100)
    assert said(found, "rails") == (4, "infiniband")
    assert said(found, "leaf") == ("su3-rail1", "infiniband")
    assert said(found, "kind") == ("h100", "catalogue")
    assert said(found, "nccl") == ("2.21.5", "sysfs")
    assert said(found, "domain") is None
    rails = {card.name: (card.rail, card.gpus) for card in found.nics if card.rail >= 0}
    assert rails["mlx5_3"] == (1, (1,)) and rails["mlx5_9"] == (1, (5,)) and len(rails) == 8
    assert found.gpus[5].nics == ("mlx5_9",) and found.gpus[5].nvlinks == 18
    assert found.unread == found.warnings == ()


def test_a_tray_is_in_the_domain_of_its_rack() -> None:
    found = described(TRAY)
    assert said(found, "domain") == ("b1c5a40e-6f2d-4d2c-8a57-3f0e9d1c7a22.32766", "nvidia-smi")
    assert said(found, "rails") == (4, "infiniband")
    assert said(found, "kind") == ("gb200", "catalogue")
    # No card is behind a PCIe switch with a GPU: each GPU takes one of its own socket.
    assert [card.name for card in found.nics if card.rail >= 0] == [
        *("mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5")
    ]


def test_two_cards_on_one_switch_are_one_rail() -> None:
    found = described(A100)
    assert said(found, "rails") == (1, "lldp")
    assert said(found, "leaf") == ("tor-b2", "lldp")
    assert said(found, "kind") == ("a100-pcie", "catalogue")
    assert {card.name: card.gpus for card in found.nics} == {
        "eno1": (),
        "mlx5_0": (0, 1, 2, 3),
        "mlx5_1": (4, 5, 6, 7),
    }


def test_a_captured_virtual_machine_says_what_it_has() -> None:
    found = described(H200)
    assert said(found, "kind") == ("h200", "catalogue")
    assert said(found, "gpu_count") == (1, "nvidia-smi")
    assert said(found, "driver") == ("580.159.04", "nvidia-smi")
    assert said(found, "nccl") == ("2.28.3", "sysfs")
    assert said(found, "power_limit_watts") == (700, "nvidia-smi")
    (gpu,) = found.gpus
    assert gpu.nvlinks == 0 and gpu.nics == ()
    # Its one card is virtual and has no rate: no rail follows from it.
    assert said(found, "rails") is None and said(found, "leaf") is None
    assert found.unread == ("lldpctl: not there",) and found.warnings == ()


def test_a_machine_without_gpus_lacks_nothing() -> None:
    found = described(CPU)
    assert found.gpus == () and found.unread == () and found.warnings == ()
    assert said(found, "kind") is None and said(found, "cpus") == (16, "sysfs")
    assert said(found, "leaf") == ("tor-c1", "lldp")


def test_without_switches_each_card_is_a_rail() -> None:
    reader = Broken(H100, smpquery=ReadError("smpquery", "Permission denied"))
    found = describe(reader, Known())
    assert said(found, "rails") == (8, "sysfs") and said(found, "leaf") is None
    assert found.unread == ("smpquery: Permission denied",)


def test_cables_that_do_not_follow_the_gpus_are_told() -> None:
    class Crossed(RecordedReader):
        def run(self, *command: str) -> str:
            text = super().run(*command)
            return text.replace("rail1", "rail2") if "mlx5_6" in command else text

    found = describe(Crossed(RECORDED / H100), Known())
    assert said(found, "rails") == (4, "infiniband")
    (warning,) = found.warnings
    assert warning.startswith("GPU 4 is near mlx5_6, which is on rail 1 and not 0")


def test_the_site_is_believed_before_the_tools_and_an_option_before_the_site() -> None:
    site = parse_site('[[node]]\nmatch = "gpu-*"\nleaf = "a"\nrack = "r1"\nrails = 2\n', "site")
    facts = (*site_facts(site, "gpu-7"), Fact("leaf", "mine", "agent option"))
    found = described(H100, *facts)
    assert said(found, "leaf") == ("mine", "agent option")
    assert said(found, "rails") == (2, "site file")
    assert said(found, "rack") == ("r1", "site file")
    labels = (Fact("leaf", "block-3", "kubernetes"), Fact("driver", "1.0", "kubernetes"))
    found = described(H100, *labels)
    assert said(found, "leaf") == ("block-3", "kubernetes")  # whoever runs the site knows better
    assert said(found, "driver") == ("550.90.07", "nvidia-smi")  # but not than the driver itself


def test_labels_stand_in_for_a_driver_that_does_not_answer() -> None:
    reader = Broken(H100, nvidia_smi=ReadError("nvidia-smi -q -x", "did not end within 10 s"))
    found = describe(reader, Known(facts=(Fact("product", "NVIDIA-H100-80GB-HBM3", "kubernetes"),)))
    assert said(found, "kind") == ("h100", "catalogue")
    assert "nvidia-smi -q -x: did not end within 10 s" in found.unread


@pytest.mark.parametrize(
    "answer",
    ["", "\x00\xff garbage", ReadError("nvidia-smi", "ended with 9"), "<nvidia_smi_log/>"],
)
def test_a_broken_driver_costs_what_it_would_have_said(answer: str | ReadError) -> None:
    found = describe(Broken(H100, nvidia_smi=answer, lldpctl="{", ibstat="?"), Known())
    assert said(found, "cpus") == (224, "sysfs") and found.gpus == ()
    assert any("lldpctl" in line for line in found.unread)


def test_what_was_read_once_holds_while_the_driver_does_not_answer() -> None:
    before = described(H100)
    reader = Broken(H100, nvidia_smi=ReadError("nvidia-smi", "did not end within 10 s"))
    after = describe(reader, Known(before=before))
    assert after.gpus == before.gpus and said(after, "kind") == ("h100", "catalogue")
    assert said(after, "rails") == (4, "infiniband")
    assert after.unread


def test_a_link_that_is_down_moves_the_node_nowhere() -> None:
    class Down(RecordedReader):
        def run(self, *command: str) -> str:
            if "mlx5_0" in command:
                raise ReadError("smpquery", "timeout")
            return super().run(*command)

        def text(self, path: str) -> str:
            if path == "/sys/class/infiniband/mlx5_0/ports/1/state":
                return "1: DOWN"
            if path == "/sys/class/infiniband/mlx5_0/ports/1/rate":
                return "10 Gb/sec (4X SDR)"
            return super().text(path)

    after = describe(Down(RECORDED / H100), Known(before=described(H100)))
    assert said(after, "rails") == (4, "infiniband")
    assert said(after, "leaf") == ("su3-rail1", "infiniband")
    assert not next(card for card in after.nics if card.name == "mlx5_0").active


def test_an_unknown_product_is_said_and_has_a_kind_all_the_same() -> None:
    text = (RECORDED / H100 / "commands" / "nvidia-smi_-q_-x").read_text()

    class Unknown(RecordedReader):
        def run(self, *command: str) -> str:
            text = super().run(*command)
            return text.replace("H100 80GB HBM3", "X900 Ultra (Rev. 2)")

    assert "H100" in text
    found = describe(Unknown(RECORDED / H100), Known())
    assert said(found, "kind") == ("nvidia-x900-ultra-rev.-2", "nvidia-smi")
    (warning,) = found.warnings
    assert '"NVIDIA X900 Ultra (Rev. 2)" is not in the catalogue' in warning
    given = describe(Unknown(RECORDED / H100), Known(facts=(Fact("kind", "x", "agent option"),)))
    assert said(given, "kind") == ("x", "agent option") and given.warnings == ()


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_program_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "nvidia-smi", "sleep 60 & sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    began = time.monotonic()
    with pytest.raises(ReadError, match=r"nvidia-smi -q -x: did not end within 0\.2 s"):
        MachineReader(0.2).run("nvidia-smi", "-q", "-x")
    assert time.monotonic() - began < 50


def test_programs_that_fail_are_told_with_their_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "ibstat", "echo one; echo no umad >&2; exit 3")
    (tmp_path / "lldpctl").write_text("#!/bin/sh\n")  # not executable
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(ReadError, match="ibstat: ended with 3: no umad"):
        MachineReader().run("ibstat")
    with pytest.raises(ReadError, match="lldpctl: not there"):
        MachineReader().run("lldpctl", "-f", "json")
    with pytest.raises(ReadError, match="not there"):
        MachineReader().text(str(tmp_path / "none"))
    with pytest.raises(ReadError, match="Is a directory"):
        MachineReader().text(str(tmp_path))


@pytest.mark.parametrize("tree", [H100, TRAY, A100, CPU, H200])
def test_a_recording_of_a_recording_is_the_same_machine(tree: str, tmp_path: Path) -> None:
    recorder = HardwareRecorder(RecordedReader(RECORDED / tree), tmp_path)
    first = describe(recorder, Known())
    recorder.close()
    assert describe(RecordedReader(tmp_path), Known()) == first == described(tree)


def test_this_machine_is_described() -> None:
    found = describe(MachineReader(), Known())
    assert said(found, "cpus") is not None and bad_description(found) == ""


def test_descriptions_are_bounded() -> None:
    good = described(H100)
    assert bad_description(good) == ""
    for name, most in MOST_ROWS.items():
        if row := getattr(good, name):
            large = structs.replace(good, **{name: row[:1] * (most + 1)})
            assert bad_description(large).startswith(name)
    for value in ("x" * 513, 1 << 63):
        bad = structs.replace(good, facts=(Fact("leaf", value, "lldp"),))
        assert "at most" in bad_description(bad)
    listed = structs.replace(good.gpus[0], paths=("X",) * 300)
    assert "a list of 300" in bad_description(structs.replace(good, gpus=(listed,)))


def test_changes_are_told_in_words() -> None:
    old = described(H100)
    new = described(H100, Fact("driver", "570.1", "agent option"))
    assert changed_facts(old, old) == []
    assert changed_facts(old, new) == ["driver 550.90.07 -> 570.1"]
    assert "gpus changed" in changed_facts(old, described(CPU))


@pytest.mark.parametrize(
    ("text", "key"),
    [("[[node]]\nleaf = 1\n", "node"), ("[[node]]\nmatch='x'\nleef='a'\n", "node"), ("=", "site")],
)
def test_a_wrong_site_file_is_refused_with_its_key(text: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_site(text, "site.toml")
    assert key in str(caught.value)


def test_the_last_entry_that_says_a_thing_is_believed() -> None:
    text = """
    [[node]]
    match = "*"
    leaf = "a"
    features = ["nvlink", "ssd"]
    [[node]]
    match = "n7"
    leaf = "b"
    """
    found = {fact.key: fact.value for fact in site_facts(parse_site(text, "site"), "n7")}
    assert found == {"leaf": "b", "features": "nvlink,ssd"}


def test_settings_of_the_kernel_can_be_read() -> None:
    """Files below /proc/sys refuse a read of several megabytes at once."""
    assert MachineReader().text("/proc/sys/kernel/osrelease") == os.uname().release


def test_a_card_with_a_damaged_inforom_hides_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-smi tells all that it is asked for, warns, and ends with 14."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    program(tmp_path, "nvidia-smi", "echo all of it; exit 14")
    assert "all of it" in MachineReader().run("nvidia-smi", "-q", "-x")
    program(tmp_path, "nvidia-smi", "echo all of it; exit 15")  # a card is lost
    with pytest.raises(ReadError, match="ended with 15"):
        MachineReader().run("nvidia-smi", "-q", "-x")


@pytest.mark.parametrize("text", ["²", "٣", "1²"])
def test_digits_of_other_scripts_are_no_number(text: str) -> None:
    assert number(text) == (1 if text.startswith("1") else 0)
