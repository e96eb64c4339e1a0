"""What the tools print, parsed: on recorded outputs, and on what broken tools print."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.hardware.probe.description import Fact
from phalanx.hardware.probe.ethernet import parse_lldp
from phalanx.hardware.probe.gpu_topology import nearest_nics, parse_topology
from phalanx.hardware.probe.host import parse_cpus, parse_memory
from phalanx.hardware.probe.infiniband import parse_ibstat, parse_neighbour
from phalanx.hardware.probe.kubernetes_labels import label_facts, parse_labels
from phalanx.hardware.probe.nvidia_smi import parse_nvlink, parse_query, short_pci
from phalanx.hardware.probe.reader import ReadError

RECORDED = Path(__file__).parent / "recorded"


def printed(tree: str, command: str) -> str:
    return (RECORDED / tree / "commands" / command).read_text()


def test_the_query_names_product_memory_power_and_pcie() -> None:
    smi = parse_query(printed("h100-4-rails", "nvidia-smi_-q_-x"))
    assert (smi.driver, smi.cuda, len(smi.gpus)) == ("550.90.07", "12.4", 8)
    gpu = smi.gpus[1]
    assert (gpu.index, gpu.product, gpu.pci) == (1, "NVIDIA H100 80GB HBM3", "0000:2a:00.0")
    assert (gpu.memory_bytes, gpu.power_limit_watts) == (81559 << 20, 700)
    assert (gpu.pcie_generation, gpu.pcie_lanes) == (5, 16)
    assert (gpu.firmware, gpu.fabric_state) == ("96.00.89.00.01", "Completed")


def test_a_fabric_that_ends_in_the_machine_is_no_domain() -> None:
    assert parse_query(printed("h100-4-rails", "nvidia-smi_-q_-x")).domain == ""
    assert parse_query(printed("a100-pcie", "nvidia-smi_-q_-x")).domain == ""
    tray = parse_query(printed("gb200-nvl72-tray", "nvidia-smi_-q_-x"))
    assert tray.domain == "b1c5a40e-6f2d-4d2c-8a57-3f0e9d1c7a22.32766"
    unfinished = printed("gb200-nvl72-tray", "nvidia-smi_-q_-x").replace("Completed", "In Progress")
    assert parse_query(unfinished).domain == ""


def test_power_limits_of_older_drivers_are_read() -> None:
    smi = parse_query(printed("a100-pcie", "nvidia-smi_-q_-x"))
    assert [gpu.power_limit_watts for gpu in smi.gpus] == [300] * 8


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No devices were found",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        "<nvidia_smi_log><gpu></nvidia_smi_log>",
        "<nvidia_smi_log><gpu",
    ],
)
def test_garbage_is_no_query(text: str) -> None:
    with pytest.raises(ReadError, match="no XML of nvidia-smi"):
        parse_query(text)


def test_a_gpu_of_which_the_driver_says_nothing_is_counted() -> None:
    text = "<nvidia_smi_log><gpu id='x'><product_name>N/A</product_name></gpu></nvidia_smi_log>"
    (gpu,) = parse_query(text).gpus
    assert (gpu.product, gpu.memory_bytes, gpu.pci, gpu.power_limit_watts) == ("", 0, "", 0)


def test_nvlinks_are_counted_and_added_up() -> None:
    links = parse_nvlink(printed("h100-4-rails", "nvidia-smi_nvlink_-s"))
    assert links[7] == (18, 18 * 26_562_000_000)
    one_down = "GPU 0: H100 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
    assert parse_nvlink(one_down) == {0: (1, 26_562_000_000)}
    assert parse_nvlink("") == parse_nvlink("garbage") == {}


def test_the_matrix_tells_which_card_is_near_which_gpu() -> None:
    topology = parse_topology(printed("h100-4-rails", "nvidia-smi_topo_-m"))
    assert topology.paths[0] == ("X", *["NV18"] * 7)
    assert nearest_nics(topology.nics[3]) == ("mlx5_5",)
    assert nearest_nics(topology.nics[7]) == ("mlx5_11",)
    assert (topology.numa[3], topology.numa[4]) == (0, 1)
    assert topology.cpus[4] == "56-111,168-223"


def test_a_matrix_without_cards_has_gpus_all_the_same() -> None:
    head = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\n"
    text = f"{head}GPU0\t X \tSYS\t0-7\t0\nGPU1\tSYS\t X \t0-7\tN/A\n"
    topology = parse_topology(text)
    assert topology.paths == {0: ("X", "SYS"), 1: ("SYS", "X")}
    assert topology.nics == {0: {}, 1: {}} and topology.numa == {0: 0, 1: -1}
    with pytest.raises(ReadError, match="no matrix"):
        parse_topology("Failed to initialize NVML: Driver/library version mismatch")


def test_a_row_that_is_cut_off_costs_only_its_end() -> None:
    text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\t0-7\t0\nGPU1\tSYS\n"
    topology = parse_topology(text)
    assert topology.paths[1] == ("SYS",) and topology.numa[1] == -1


def test_ibstat_lists_every_port() -> None:
    ports = parse_ibstat(printed("h100-4-rails", "ibstat"))
    assert len(ports) == 10
    first = ports[0]
    assert (first.device, first.port, first.firmware) == ("mlx5_0", 1, "28.39.1002")
    assert (first.state, first.gigabits_per_second, first.link_layer) == (
        "Active",
        400,
        "InfiniBand",
    )
    down = next(port for port in ports if port.device == "mlx5_2")
    assert (down.state, down.link_layer) == ("Down", "Ethernet")
    assert parse_ibstat("ibpanic: [9] main: can't open UMAD port") == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Node Description:........MF0;su3-rail1:MQM9700/U1\n", "su3-rail1"),
        (
            "Node Description:....SwitchIB Mellanox Technologies\n",
            "SwitchIB Mellanox Technologies",
        ),
        ("ibwarn: [1] mad_rpc_open_port: can't open UMAD port", ""),
        ("", ""),
    ],
)
def test_a_switch_says_its_name(text: str, name: str) -> None:
    assert parse_neighbour(text) == name


def test_neighbours_by_lldp() -> None:
    assert parse_lldp(printed("a100-pcie", "lldpctl_-f_json")) == {
        "ens3np0": "tor-b2",
        "ens7np0": "tor-b2",
    }
    one = (
        '{"lldp": {"interface": {"eno1": {"chassis": {"id": {"type": "mac", "value": "1c:34"}}}}}}'
    )
    assert parse_lldp(one) == {"eno1": "1c:34"}
    assert parse_lldp('{"lldp": {}}') == {}
    odd = '{"lldp": {"interface": [1, {"eno1": 2}, {"eno2": {"chassis": []}}]}}'
    assert parse_lldp(odd) == {}


@pytest.mark.parametrize("text", ["", "[]", "null", "unable to connect to socket", "[" * 100_000])
def test_garbage_is_no_lldp(text: str) -> None:
    with pytest.raises(ReadError, match="no JSON of lldpctl"):
        parse_lldp(text)


def test_labels_of_kubernetes_say_topology_and_product() -> None:
    text = """
    topology.kubernetes.io/zone="eu-1a"
    topology.kubernetes.io/rack="r7"
    network.topology.nvidia.com/block="b3"
    nvidia.com/gpu.product="NVIDIA-H100-80GB-HBM3"
    nvidia.com/gpu.memory="81559"
    nvidia.com/gpu.count="8"
    nvidia.com/gpu.clique="b1c5a40e.32766"
    """
    facts = {fact.key: fact.value for fact in label_facts(parse_labels(text))}
    assert facts == {
        "leaf": "b3",
        "pod": "eu-1a",
        "rack": "r7",
        "domain": "b1c5a40e.32766",
        "product": "NVIDIA-H100-80GB-HBM3",
        "gpu_count": 8,
        "gpu_memory_bytes": 81559 << 20,
    }
    node = '{"metadata": {"labels": {"topology.kubernetes.io/rack": "r7"}}}'
    assert label_facts(parse_labels(node)) == [Fact("rack", "r7", "kubernetes")]
    with pytest.raises(ReadError, match="no JSON of a node"):
        parse_labels("{")


def test_cores_and_memory_of_the_kernel() -> None:
    files = RECORDED / "h100-4-rails" / "files" / "proc"
    assert parse_cpus((files / "cpuinfo").read_text()) == 224
    assert parse_memory((files / "meminfo").read_text()) == 2113503876 << 10
    assert parse_cpus("") == parse_memory("garbage") == 0


def test_addresses_are_as_sysfs_has_them() -> None:
    assert short_pci("00000000:2A:00.0") == "0000:2a:00.0"
    assert short_pci("00000008:01:00.0") == "0008:01:00.0"
    assert short_pci("nonsense") == ""
