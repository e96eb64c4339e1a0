"""Workers get the GPU, cores and memory that are near each other, and share nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.control.agent.spawn.binding import (
    NodeTopology,
    held_gpus,
    parse_list,
    prefer_memory,
    ranges,
    read_machine,
    seats,
    visible,
)
from tests.ranks import run_alone

CORES = tuple(range(16))
# Two sockets; GPUs 0 and 1 on the second one, as boards often have it.
BOARD = NodeTopology(CORES, {0: CORES[:8], 1: CORES[8:]}, (1, 1, 0, 0), ("0", "1", "2", "3"))


def make_tree(root: Path) -> None:
    for node, cores in enumerate(("0-7", "8-15")):
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    for number, numa in ((0x3B, 1), (0x5E, 1), (0x86, 0), (0xAF, -1)):
        address = f"0000:{number:02x}:00.0"
        (root / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
        device = root / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{numa}\n")


def test_a_machine_is_read_from_the_kernels_files(tmp_path: Path) -> None:
    make_tree(tmp_path)
    found = read_machine(tmp_path, cores=tuple(range(2, 16)))
    assert found.numa == {0: tuple(range(2, 8)), 1: tuple(range(8, 16))}
    assert found.gpus == (1, 1, 0, -1)
    assert found.names == ("0", "1", "2", "3")
    chosen = read_machine(tmp_path, cores=CORES, shown="2,GPU-5e1f")
    assert (chosen.gpus, chosen.names) == ((0, -1), ("2", "GPU-5e1f"))


def test_this_machine_can_be_read() -> None:
    found = read_machine()
    assert found.cores and set(found.cores) == os.sched_getaffinity(0)


def test_workers_sit_near_their_gpus_and_share_no_core() -> None:
    found = seats(4, 0, 4, BOARD, "numa")
    assert [seat.numa for seat in found] == [1, 1, 0, 0]
    assert [seat.cores for seat in found] == [CORES[8:12], CORES[12:], CORES[:4], CORES[4:8]]
    assert str(found[0]) == "GPU 0, cores 8-11, NUMA node 1"


def test_two_jobs_on_one_node_share_no_gpu_and_no_core() -> None:
    one, other = seats(2, 0b0101, 4, BOARD, "numa"), seats(2, 0b1010, 4, BOARD, "numa")
    assert [seat.gpu for seat in one] == [0, 2] and [seat.gpu for seat in other] == [1, 3]
    cores = [core for seat in (*one, *other) for core in seat.cores]
    assert len(cores) == len(set(cores)) == 16


def test_a_job_sees_only_the_gpus_it_holds_in_the_order_of_its_ranks() -> None:
    told = visible(held_gpus(0b1010, BOARD))
    assert told["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert visible(held_gpus(0, NodeTopology((0, 1), {}))) == {}


def test_without_gpus_cores_are_dealt_out() -> None:
    plain = NodeTopology(CORES, {0: CORES})
    assert [seat.cores for seat in seats(2, 0, 2, plain, "numa")] == [CORES[:8], CORES[8:]]
    assert [seat.cores for seat in seats(2, 0, 2, plain, "none")] == [(), ()]


def test_more_workers_than_cores_are_not_bound() -> None:
    assert {seat.cores for seat in seats(8, 0, 8, NodeTopology((0, 1), {}), "cores")} == {()}


@pytest.mark.parametrize("text", ["0-3,8", "5", "0-1,4-7,12"])
def test_lists_of_cores_are_read_and_written(text: str) -> None:
    assert ranges(parse_list(text)) == text


def test_memory_of_a_node_can_be_preferred() -> None:
    assert run_alone(prefer_memory, -1) is False
    assert run_alone(prefer_memory, 0) in (True, False)  # containers may forbid it
