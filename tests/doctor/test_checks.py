"""Each check passes where all is well, and fails with evidence where something is wrong."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from phalanx.doctor import CHECKS, CheckOptions, check_node, memory
from phalanx.doctor.collective import CollectiveOutcome, check_collective, judge
from phalanx.doctor.compute import check_product, check_repeats, known_product
from phalanx.doctor.finding import Finding
from phalanx.doctor.gpus import ask_smi, check_driver, check_gpu, check_gpus, parse_smi
from phalanx.doctor.memory import check_memory, graded, judge_link
from phalanx.doctor.storage import (
    check_disk,
    check_mounts,
    network_mounts,
    probe,
    read_table,
)
from phalanx.doctor.system import KernelClock, check_clock, read_clock
from phalanx.hardware.probe.reader import NotThereError, ReadError
from tests.ranks import run_alone

SMI = """\
0, NVIDIA H100 80GB HBM3, 550.54.15, 41, 0, 0, 0, 0x0000000000000000, 5, 5, 16, 16
1, NVIDIA H100 80GB HBM3, 550.54.15, 44, 3, 0, 1, 0x0000000000000000, 5, 5, 16, 16
2, NVIDIA H100 80GB HBM3, 550.54.15, 93, 0, 0, 0, 0x0000000000000040, 5, 5, 8, 16
3, NVIDIA H100 80GB HBM3, 550.54.15, [N/A], [N/A], [N/A], [N/A], 0x0000000000000004, 5, 5, 16, 16
"""


@pytest.mark.parametrize("side", [1, 2, 17, 128])
def test_the_known_answer_is_the_product(side: int) -> None:
    left, right, answer = known_product(side)
    assert torch.equal(left @ right, answer)


def test_one_wrong_bit_in_one_product_fails_the_node() -> None:
    assert check_product("cpu", quick=True).verdict == "pass"
    found = check_product("cpu", quick=True, inject=True)
    assert found.verdict == "fail" and found.measured["wrong_elements"] == 1
    assert found.cause == "silent_corruption"
    assert "(1, 1)" in str(found.measured["first"])


def test_arbitrary_products_repeat_to_the_bit() -> None:
    assert check_repeats("cpu", quick=True).verdict == "pass"


def test_a_collective_reports_both_bandwidths() -> None:
    found = run_alone(check_collective, "gloo", 2)
    assert found.verdict in ("pass", "warn"), found
    assert found.measured["busbw_gb_per_second"] == found.measured["algbw_gb_per_second"]


def test_bus_bandwidth_is_what_each_link_carries() -> None:
    found = judge("nccl", 8_000_000_000, [CollectiveOutcome(2.0, True)] * 8)
    assert found.measured["algbw_gb_per_second"] == 4.0
    assert found.measured["busbw_gb_per_second"] == 7.0


def test_a_wrong_sum_or_a_rank_that_hangs_fails_the_collective() -> None:
    assert (
        judge("gloo", 8, [CollectiveOutcome(1.0, True), CollectiveOutcome(1.0, False)]).cause
        == "silent_corruption"
    )
    hung = judge(
        "gloo", 8, [CollectiveOutcome(1.0, True), CollectiveOutcome(0.0, False, "did not end")]
    )
    assert hung.verdict == "fail" and hung.cause == "system_service"


def test_memory_is_measured_and_graded() -> None:
    (found,) = check_memory("cpu")
    assert float(found.measured["gb_per_second"]) > 0
    assert [graded(share) for share in (0.9, 0.6, 0.3)] == ["pass", "warn", "fail"]


def test_a_link_is_judged_by_what_it_does_under_load() -> None:
    fast, half = (55e9, 54e9), (26e9, 25e9)
    for rates, said, verdict in [
        (fast, "5, 5, 16, 16\n", "pass"),
        (half, "4, 5, 16, 16\n", "warn"),  # it came up a generation below
        (half, "5, 5, 8, 16\n", "warn"),
        (half, "5, 5, 16, 16\n", "warn"),  # whatever it says: half of its rate
        (half, "4, 4, 16, 16\n", "pass"),
        (half, "", "pass"),  # nothing is known of the link
        (half, "[N/A], [N/A], [N/A], [N/A]\n", "pass"),
        (half, "9, 9, 16, 16\n", "pass"),  # of a generation that is not known
        ((7e9, 25e9), "", "warn"),
    ]:
        found = judge_link("cuda:0", rates, said)
        assert (found.verdict, bool(found.suggestion)) == (verdict, verdict == "warn"), said


def test_a_driver_that_hangs_or_is_not_there_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert memory._asked_under_load("GPU-1", lambda: None) == ""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 5, 5, 16, 16\n")
    smi.chmod(0o755)
    assert memory._asked_under_load("GPU-1", lambda: None) == "5, 5, 16, 16\n"
    smi.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr(memory, "ASK_SECONDS", 0.2)
    assert memory._asked_under_load("GPU-1", lambda: None) == ""


def test_a_disk_gives_back_what_was_written_and_leaves_nothing(tmp_path: Path) -> None:
    found = check_disk(tmp_path, quick=True)
    assert found.verdict in ("pass", "warn"), found
    assert float(found.measured["fsync_seconds"]) >= 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_written_fails() -> None:
    found = check_disk(Path("/proc"), quick=True)
    assert found.verdict == "fail" and found.cause == "ssd"


def test_a_full_disk_is_not_taken_for_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("phalanx.doctor.storage.os.fsync", full)
    found = check_disk(tmp_path, quick=True)
    assert found.verdict == "fail" and found.suggestion == "make room"
    assert found.cause != "ssd"
    assert list(tmp_path.iterdir()) == []


def test_network_mounts_are_found_and_probed(tmp_path: Path) -> None:
    table = (
        "proc /proc proc rw 0 0\n"
        "10.0.0.1:/data /mnt/my\\040data nfs4 rw 0 0\n"
        f"weka {tmp_path} wekafs rw 0 0\n"
        "fuse /mnt/f fuse.glusterfs rw 0 0\n"
        "half a line\n"
    )
    assert network_mounts(table) == [Path("/mnt/my data"), tmp_path, Path("/mnt/f")]
    found = check_mounts((), table)
    assert found.verdict == "fail" and found.cause == "filesystem_mount"
    assert "/mnt/my data" in found.measured and str(tmp_path) not in found.measured
    assert check_mounts((tmp_path,), "").verdict == "pass"


def test_a_mount_that_root_may_not_list_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As exports with root_squash do: it is the server that refuses."""

    def refused(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("phalanx.doctor.storage.os.scandir", refused)
    assert probe(tmp_path) == ""


def test_names_of_mounts_are_as_the_kernel_writes_them(tmp_path: Path) -> None:
    table = tmp_path / "mounts"
    table.write_bytes(b"a:/x /mnt/tab\\011and\\134back nfs rw 0 0\nb:/y /mnt/\xff nfs rw 0 0\n")
    found = network_mounts(read_table(table))
    assert found == [Path("/mnt/tab\tand\\back"), Path("/mnt/\udcff")]
    assert read_table(tmp_path / "none") == ""
    told = check_mounts((), read_table(table))
    assert msgspec.json.decode(msgspec.json.encode(told), type=Finding) == told


def test_many_mounts_that_hang_are_waited_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [tmp_path / str(number) for number in range(20)]
    together = threading.Barrier(len(asked))
    monkeypatch.setattr("phalanx.doctor.storage.os.statvfs", lambda _: together.wait())
    monkeypatch.setattr("phalanx.doctor.storage.os.scandir", lambda _: iter(()))
    # One after the other none would ever pass the barrier.
    assert check_mounts(tuple(asked), "").verdict == "pass"


def test_a_mount_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()
    monkeypatch.setattr("phalanx.doctor.storage.os.statvfs", lambda _: stuck.wait())
    assert "no answer" in probe(tmp_path, seconds=0.05)
    stuck.set()


def test_a_clock_that_nobody_keeps_is_a_warning() -> None:
    assert check_clock(KernelClock(True, 0.001)).verdict == "pass"
    assert check_clock(KernelClock(False, 0.0)).verdict == "warn"
    assert check_clock(KernelClock(True, 0.0), server_skew_seconds=7200.0).verdict == "warn"
    assert check_clock(None).verdict == "skip"
    assert read_clock() is not None


LIMITED = """
import resource, sys
from pathlib import Path
from phalanx.doctor.system import check_limits
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
found = check_limits(rdma=Path(sys.argv[1]))
print(found.verdict, found.suggestion)
"""


def test_low_limits_are_named_with_what_to_set(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.startswith("fail ") and "nofile" in said


def test_what_nvidia_smi_prints_is_judged_gpu_by_gpu() -> None:
    facts = parse_smi(SMI)
    assert [fact.uncorrected for fact in facts] == [0, 3, 0, -1]
    found = [check_gpu(fact) for fact in facts]
    assert [each.verdict for each in found] == ["pass", "fail", "warn", "pass"]
    assert found[1].cause == "hbm_ecc"
    assert "PCIe" in found[2].suggestion and "cooling" in found[2].suggestion


def test_a_gpu_that_is_gone_is_missed() -> None:
    found = check_gpus(parse_smi(SMI)[:1], expected=2)
    assert found[-1].verdict == "fail" and found[-1].cause == "gpu_unavailable"
    assert [each.verdict for each in check_gpus([], expected=0)] == ["skip"]


class OneDriver:
    """A driver that knows some fields, or fails."""

    def __init__(self, *, unknown: str = "", failure: str = "", text: str = SMI) -> None:
        self.unknown, self.failure, self.printed = unknown, failure, text

    def run(self, *command: str) -> str:
        if self.failure:
            raise ReadError("nvidia-smi", self.failure)
        if self.unknown and self.unknown in command[1]:
            field = f'ended with 2: Field "{self.unknown}" is not a valid field to query.'
            raise ReadError(" ".join(command), field)
        return self.printed

    def text(self, path: str) -> str:
        raise NotThereError(path)

    link = text

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        return []


def test_an_older_driver_is_asked_in_its_words() -> None:
    assert ask_smi(OneDriver(unknown="clocks_event_reasons.active")) == parse_smi(SMI)


@pytest.mark.parametrize(
    "driver",
    [
        OneDriver(failure="ended with 18: Failed to initialize NVML: Driver/library mismatch"),
        OneDriver(failure="did not end within 30 s"),
        OneDriver(text="Unable to determine the device handle for GPU 0000:1A:00.0"),
        OneDriver(text=""),
    ],
)
def test_a_driver_that_does_not_answer_is_not_taken_for_none(driver: OneDriver) -> None:
    assert [each.verdict for each in check_driver(0, lambda: ask_smi(driver))] == ["unknown"]
    both = check_driver(8, lambda: ask_smi(driver))
    assert [each.verdict for each in both] == ["unknown", "fail"]


def test_a_check_that_throws_is_a_finding_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: CheckOptions) -> list[object]:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setitem(CHECKS, "matmul", broken)  # type: ignore[arg-type]
    report = check_node(
        CheckOptions(node="n", folder=tmp_path, quick=True), ("matmul", "disk", "limits")
    )
    assert report.findings[0].check == "matmul"
    assert len(report.findings) == 3
    assert not report.passed and report.cause == "gpu_fault"
    assert "unspecified launch failure" in report.detail


def test_a_drill_fails_the_check_it_names(tmp_path: Path) -> None:
    options = CheckOptions(node="n", folder=tmp_path, quick=True, inject=("disk", "matmul"))
    report = check_node(options, ("matmul", "disk", "limits"))
    assert {finding.check for finding in report.failed} == {"matmul cpu", "disk"}
