"""Signs of trouble become typed facts: from records as real machines write them."""

from __future__ import annotations

import asyncio
import os
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from phalanx.cluster.causes import CAUSES
from phalanx.cluster.protocol.messages import THIS_NODE, DeviceError, LocalFact, NodeNotice
from phalanx.control.agent.config import FaultOptions
from phalanx.control.agent.faults import FaultSources
from phalanx.control.agent.faults.gpu_watch import event_fault, gpu_faults
from phalanx.control.agent.faults.host import (
    NoticeSource,
    oom_kills,
    own_group,
    parse_notice,
)
from phalanx.control.agent.faults.kernel_log import (
    KernelLog,
    OomKill,
    fault_of,
    parse_record,
    pci_address,
)
from phalanx.control.agent.faults.links import link_faults, read_links
from phalanx.control.agent.faults.xid import XIDS
from phalanx.doctor.gpus import GpuFacts

RECORDS = [
    line.split("\t", 1)
    for line in (Path(__file__).parent / "fixtures" / "kmsg.txt").read_text().splitlines()
    if not line.startswith("#")
]
GPUS = {pci_address("0000:3b:00"): 0, pci_address("00000000:86:00.0"): 1}


@pytest.mark.parametrize(("expected", "line"), RECORDS)
def test_a_record_of_the_kernel_means(expected: str, line: str) -> None:
    record = parse_record(line)
    found = fault_of(record, GPUS) if record is not None else None
    match found:
        case None:
            said = "-"
        case OomKill(pid=pid):
            said = f"oom {pid}"
        case DeviceError(cause=cause):
            assert cause in CAUSES
            said = cause
    assert said == expected


def test_an_xid_names_its_gpu() -> None:
    lines = [line for _, line in RECORDS if "Xid (PCI:0000:86:00): 48" in line]
    record = parse_record(lines[0])
    assert record is not None
    found = fault_of(record, GPUS)
    assert isinstance(found, DeviceError) and found.gpu == 1 and "Xid 48" in found.detail


def test_every_xid_has_a_cause_of_the_table() -> None:
    assert {cause for cause, _ in XIDS.values() if cause} <= CAUSES.keys()


def test_a_log_is_read_on_from_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("".join(f"{line}\n" for _, line in RECORDS[:7]))
    heard: list[object] = []
    log = KernelLog(path, GPUS, heard.append)
    log.read()
    assert heard == []  # what was there before is history
    with path.open("a") as file:
        for _, line in RECORDS[2:4]:
            file.write(line[:20])  # a record may come in parts
            file.flush()
            log.read()
            file.write(line[20:] + "\n")
            file.flush()
            log.read()
    log.close()
    assert [each.pid for each in heard if isinstance(each, OomKill)] == [48213, 512]
    assert "48213" in log.killed[48213]


def net(root: Path, name: str, *, state: str = "up", downs: int = 0, errors: int = 0) -> None:
    folder = root / "net" / name
    (folder / "statistics").mkdir(parents=True, exist_ok=True)
    (folder / "device").mkdir(exist_ok=True)
    (folder / "operstate").write_text(f"{state}\n")
    (folder / "carrier_down_count").write_text(f"{downs}\n")
    (folder / "statistics" / "rx_errors").write_text(f"{errors}\n")


def infiniband(root: Path, name: str, *, state: str = "4: ACTIVE", downs: int = 0) -> None:
    port = root / "infiniband" / name / "ports" / "1"
    (port / "counters").mkdir(parents=True, exist_ok=True)
    (port / "state").write_text(f"{state}\n")
    (port / "counters" / "link_downed").write_text(f"{downs}\n")
    (port / "counters" / "symbol_error").write_text("0\n")


def test_a_dead_rail_of_several_makes_the_node_slower(tmp_path: Path) -> None:
    for name in ("mlx5_0", "mlx5_1", "mlx5_2"):
        infiniband(tmp_path, name)
    before = read_links(tmp_path)
    infiniband(tmp_path, "mlx5_1", state="1: DOWN", downs=1)
    (found,) = link_faults(before, read_links(tmp_path), 10.0)
    assert (found.cause, found.rail) == ("nic", 1)
    (found,) = link_faults(before, read_links(tmp_path), 10.0, {"mlx5_0/1": 0, "mlx5_1/1": 3})
    assert (found.cause, found.rail) == ("nic", 3)  # as the node describes itself
    assert CAUSES["nic"].effect == "goes_on"


def test_the_only_card_down_stops_the_node(tmp_path: Path) -> None:
    net(tmp_path, "eth0")
    (tmp_path / "net" / "lo").mkdir()  # no device behind it
    before = read_links(tmp_path)
    assert list(before) == ["eth0"]
    net(tmp_path, "eth0", state="down", downs=1)
    (found,) = link_faults(before, read_links(tmp_path), 10.0)
    assert found.cause == "network_link"


def test_flapping_and_broken_packets_are_found_and_one_blip_is_not(tmp_path: Path) -> None:
    net(tmp_path, "eth0")
    before = read_links(tmp_path)
    net(tmp_path, "eth0", downs=1, errors=5)
    assert link_faults(before, read_links(tmp_path), 10.0) == []
    net(tmp_path, "eth0", downs=4)
    assert "4 times" in link_faults(before, read_links(tmp_path), 10.0)[0].detail
    net(tmp_path, "eth0", errors=50_000)
    assert "5000 errors a second" in link_faults(before, read_links(tmp_path), 10.0)[0].detail


def test_a_card_that_was_down_from_the_start_is_nobodys_business(tmp_path: Path) -> None:
    net(tmp_path, "eth0")
    net(tmp_path, "eth1", state="down")
    before = read_links(tmp_path)
    assert link_faults(before, read_links(tmp_path), 10.0) == []


def gpu(index: int, **more: int | bool) -> GpuFacts:
    return GpuFacts(index=index, name="NVIDIA H100 80GB HBM3", driver="550.54.15", **more)  # type: ignore[arg-type]


def test_what_became_worse_on_a_gpu_is_told_once() -> None:
    healthy = [gpu(0, uncorrected=0), gpu(1, uncorrected=0), gpu(2), gpu(3), gpu(4)]
    worse = [
        gpu(0, uncorrected=2),
        gpu(1, uncorrected=0, throttle=0x40, degrees=94),
        gpu(2, links_down=1),
        gpu(3, throttle=0x4),  # its power cap: how it is meant to run
    ]
    found = [(fault.cause, fault.gpu) for fault in gpu_faults(healthy, worse)]
    assert found == [("hbm_ecc", 0), ("thermal", 1), ("nvlink", 2), ("gpu_unavailable", 4)]
    assert gpu_faults(worse, worse) == []


def test_events_of_nvml_become_faults() -> None:
    nvml = SimpleNamespace(nvmlEventTypeXidCriticalError=8, nvmlEventTypeDoubleBitEccError=2)
    found = event_fault(8, 79, 3, nvml)
    assert found is not None and (found.cause, found.gpu) == ("gpu_unavailable", 3)
    assert event_fault(8, 13, 3, nvml) is None  # the program's own fault
    ecc = event_fault(2, 0, 1, nvml)
    assert ecc is not None and ecc.cause == "hbm_ecc"
    assert event_fault(16, 0, 1, nvml) is None


def test_kills_are_counted_in_both_versions_of_control_groups(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 31\noom 4\noom_kill 3\n")
    assert oom_kills(tmp_path) == 3
    old = tmp_path / "old"
    (old / "memory").mkdir(parents=True)
    text = "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"
    (old / "memory" / "memory.oom_control").write_text(text)
    assert oom_kills(old) == 7
    assert oom_kills(tmp_path / "nowhere") == 0
    table = tmp_path / "cgroup"
    table.write_text("12:cpu:/a\n3:memory:/job/7\n")
    assert own_group(table) == "/job/7"
    table.write_text("0::/system.slice/phalanx.service\n")
    assert own_group(table) == "/system.slice/phalanx.service"


NOW = 1_700_000_000_000_000_000


@pytest.mark.parametrize(
    ("text", "seconds", "cause"),
    [
        ('{"action": "terminate", "time": "2023-11-14T22:15:20Z"}', 120.0, "host_maintenance"),
        ('{"deadline_seconds": 30, "cause": "power"}', 30.0, "power"),
        ('{"deadline_seconds": -5, "cause": "gremlins"}', 0.0, "host_maintenance"),
        ("2023-11-14T22:13:30+00:00", 10.0, "host_maintenance"),
        ("45", 45.0, "host_maintenance"),
        ("TRUE", 120.0, "host_maintenance"),
        ("{ not json", 120.0, "host_maintenance"),
    ],
)
def test_a_notice_in_any_of_its_forms(text: str, seconds: float, cause: str) -> None:
    found = parse_notice(text, NOW)
    assert found is not None
    assert ((found.deadline_ns - NOW) / 1e9, found.cause) == (seconds, cause)


@pytest.mark.parametrize("text", ["", "  \n", "FALSE", "None", "[]"])
def test_no_notice(text: str) -> None:
    assert parse_notice(text, NOW) is None


class Site(BaseHTTPRequestHandler):
    body = b""

    def do_GET(self) -> None:
        self.send_response(200 if self.body else 404)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_notice_comes_by_file_command_or_address(tmp_path: Path) -> None:
    assert NoticeSource().look() == []
    path = tmp_path / "notice"
    assert NoticeSource(file=str(path)).look() == []
    path.write_text("")
    assert NoticeSource(file=str(path)).look()  # that it is there says enough
    assert NoticeSource(command=("echo", "30")).look()
    assert NoticeSource(command=("false",)).look() == []
    assert NoticeSource(command=(str(tmp_path / "no-such-program"),)).look() == []
    server = HTTPServer(("127.0.0.1", 0), Site)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/notice"
    try:
        assert NoticeSource(url=url).look() == []
        Site.body = b'{"deadline_seconds": 5}'
        assert NoticeSource(url=url).look()
    finally:
        server.shutdown()
        server.server_close()
    assert NoticeSource(url=url).look() == []


def test_sources_report_each_fault_once(tmp_path: Path) -> None:
    kmsg, notice = tmp_path / "kmsg", tmp_path / "notice"
    kmsg.write_text("")
    net(tmp_path, "eth0")
    options = FaultOptions(
        kernel_log=str(kmsg),
        sysfs=str(tmp_path),
        cgroup=str(tmp_path),
        mounts=(str(tmp_path / "gone"),),
        notice_file=str(notice),
        poll_seconds=0.05,
    )
    heard: list[LocalFact] = []

    async def listen() -> None:
        sources = FaultSources(options, heard.append, links=True)
        await sources.start()
        with kmsg.open("a") as file:
            for _, line in RECORDS:
                file.write(line + "\n")
        net(tmp_path, "eth0", state="down")
        notice.write_text("60")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(causes(heard)) < 13:
            await asyncio.sleep(0.05)
        assert "Killed process 512 " in sources.ran_out_of_memory(512)
        assert sources.ran_out_of_memory(512) == ""
        (tmp_path / "memory.events").write_text("oom_kill 1\n")
        assert "control group" in sources.ran_out_of_memory(77)
        sources.close()

    asyncio.run(listen())
    assert {"gpu_unavailable", "dram", "pcie", "network_link", "filesystem_mount"} <= causes(heard)
    assert sum(isinstance(fact, NodeNotice) for fact in heard) == 1
    links = [
        fact for fact in heard if isinstance(fact, DeviceError) and fact.cause == "network_link"
    ]
    assert len(links) == 1


def causes(heard: list[LocalFact]) -> set[str]:
    return {fact.cause for fact in heard if isinstance(fact, DeviceError | NodeNotice)}


def test_a_kernel_log_that_is_a_device_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    heard: list[LocalFact] = []

    async def listen() -> None:
        keep = os.open(path, os.O_RDWR)  # a pipe without a writer would be at its end
        sources = FaultSources(
            FaultOptions(kernel_log=str(path), poll_seconds=60), heard.append, links=False
        )
        await sources.start()
        os.write(keep, f"{RECORDS[5][1]}\n".encode())
        deadline = time.monotonic() + 60
        while not heard and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        sources.close()
        os.close(keep)

    asyncio.run(listen())
    assert causes(heard) == {"gpu_unavailable"}


def test_a_notice_is_told_again_only_when_the_node_goes_sooner() -> None:
    heard: list[LocalFact] = []
    sources = FaultSources(FaultOptions(), heard.append, links=False)
    second = 10**9
    for at_ns in (100 * second, 100 * second, 160 * second, 100 * second - 1, 40 * second):
        sources.report(NodeNotice(node=THIS_NODE, deadline_ns=at_ns))
    told = [fact.deadline_ns for fact in heard if isinstance(fact, NodeNotice)]
    assert told == [100 * second, 40 * second]
