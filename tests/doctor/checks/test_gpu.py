"""Checks of GPUs. The good one is a captured H200; what is bad has one of its fields changed."""

from __future__ import annotations

import re

import pytest
from msgspec import structs

from phalanx.doctor.checks.evidence import ProcessFacts
from tests.doctor.checks.played import H200_VIRTUAL, HARDWARE, Case, played, prove

QUERY = "$ nvidia-smi -q -x"
CAPTURED = (H200_VIRTUAL / "commands/nvidia-smi_-q_-x").read_text()
NVLINK = (HARDWARE / "h100-4-rails/commands/nvidia-smi_nvlink_-s").read_text()
TOPOLOGY = (HARDWARE / "h100-4-rails/commands/nvidia-smi_topo_-m").read_text()
H100_QUERY = (HARDWARE / "h100-4-rails/commands/nvidia-smi_-q_-x").read_text()
H100 = HARDWARE / "h100-4-rails"
ONLY_DEVICE = {"/dev/nvidia0": ""}  # a GPU is there, and no program says anything about it
DOCKER, DOCKER_FILE = {"/usr/bin/dockerd": ""}, "/etc/docker/daemon.json"
RDMA = {"/sys/class/infiniband/mlx5_0": ""}
ERRORS = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-50e01a9e-c158-1a9a-6775-f43b695da2a8)
     Link 0: Replay Errors: 0
     Link 0: Recovery Errors: 0
     Link 0: CRC Errors: {crc}
"""
PEERS = """\
      GPU0    GPU1
 GPU0  X       {one}
 GPU1  {one}      X

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""
BRIDGE = """\
15:01.0 PCI bridge: PLX Technology, Inc. PEX 88000 (rev b0) (prog-if 00 [Normal decode])
	Capabilities: [148 v1] Access Control Services
		ACSCap:	SrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
		ACSCtl:	{control}

18:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)
	Control: I/O- Mem+ BusMaster+
"""
ACS_OFF = "SrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-"
ACS_ON = "SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-"
CUDA_TORCH = ProcessFacts(packages={"torch": "2.9.0+cu128", "nvidia-cuda-runtime-cu12": "12.8.90"})
PINNED = ProcessFacts(
    packages=CUDA_TORCH.packages | {"nvidia-nccl-cu12": "2.27.5", "nvidia-cudnn-cu12": "9.10.2.21"},
    wanted={"nvidia-nccl-cu12": "2.27.5", "nvidia-cudnn-cu12": "9.10.2.21"},
)
BOOST = """\
+-------------------------------------------------------------------------+
| GPU Boost Slider                                                        |
| GPU     Slider              Max Value       Current Value               |
|=========================================================================|
|   0     vboost                  4                   {first}                   |
{others}
+-------------------------------------------------------------------------+
"""
CPUS = ProcessFacts(cpus=tuple(range(16)))
IOMMU_GROUP = "/sys/bus/pci/devices/0000:00:06.0/iommu_group/type"


def boost(first: int) -> str:
    """The sliders of eight cards."""
    row = "|   {}     vboost                  4                   0                   |"
    return BOOST.format(first=first, others="\n".join(row.format(gpu) for gpu in range(1, 8)))


def captured(old: str, new: str) -> dict[str, str]:
    """The captured query with one text changed."""
    assert old in CAPTURED
    return {QUERY: CAPTURED.replace(old, new)}


def field(name: str, old: str, new: str) -> dict[str, str]:
    return captured(f"<{name}>{old}</{name}>", f"<{name}>{new}</{name}>")


CASES = [
    Case(
        check="gpu.persistence",
        good={},
        bad=field("persistence_mode", "Enabled", "Disabled"),
        mends="nvidia-smi -i 0 -pm 1",
        undoes="nvidia-smi -i 0 -pm 0",
    ),
    Case(
        check="gpu.power",
        good={},
        bad=field("current_power_limit", "700.00 W", "600.00 W"),
        mends="nvidia-smi -i 0 -pl 700",
        undoes="nvidia-smi -i 0 -pl 600",
    ),
    Case(
        check="gpu.clocks",
        good={},
        bad=captured(
            "<applications_clocks>\n\t\t\t<graphics_clock>1980 MHz",
            "<applications_clocks>\n\t\t\t<graphics_clock>1200 MHz",
        ),
        mends="nvidia-smi -i 0 -rac",
        undoes="nvidia-smi -i 0 -ac 3201,1200",
    ),
    Case(
        check="gpu.throttle",
        good={},
        bad=field("clocks_event_reason_hw_power_brake_slowdown", "Not Active", "Active"),
        mends="power supplies",
    ),
    Case(
        check="gpu.temperature",
        good={},
        bad=field("gpu_temp_tlimit", "57 C", "-1 C"),
        mends="inlet",
    ),
    Case(
        check="gpu.ecc",
        good={},
        bad=captured(
            "<volatile>\n\t\t\t\t<sram_correctable>0</sram_correctable>",
            "<volatile>\n\t\t\t\t<sram_uncorrectable>2</sram_uncorrectable>",
        ),
        mends="reset the GPU",
    ),
    Case(
        check="gpu.remap",
        good={},
        bad=field("remapped_row_pending", "No", "Yes"),
        mends="reset the GPU",
    ),
    Case(
        check="gpu.mig",
        good={},
        bad=field("current_mig", "Disabled", "Enabled"),
        mends="nvidia-smi -i 0 -mig 0",
        undoes="nvidia-smi -i 0 -mig 1",
    ),
    Case(
        check="gpu.compute_mode",
        good={},
        bad=field("compute_mode", "Default", "Prohibited"),
        mends="nvidia-smi -i 0 -c DEFAULT",
        undoes="nvidia-smi -i 0 -c PROHIBITED",
    ),
    Case(
        check="gpu.pcie",
        good={},
        bad=field("current_link_width", "16x", "8x"),
        mends="reseat",
    ),
    Case(
        check="gpu.pcie_replays",
        good={},
        bad=field("replay_counter", "0", "4711"),
        mends="riser",
    ),
    Case(
        check="gpu.bar1",
        good={},
        bad=field("total", "262144 MiB", "256 MiB"),
        mends="Resizable BAR",
    ),
    Case(
        check="gpu.dvfs",
        good={},
        bad={
            QUERY: H100_QUERY.replace(
                "<performance_state>P0</performance_state>",
                "<power_smoothing>Enabled</power_smoothing>"
                "<performance_state>P0</performance_state>",
                1,
            )
        },
        mends="same settings",
    ),
    Case(
        check="gpu.cpu_ratio",
        good={},
        good_process=CPUS,
        bad={},
        bad_process=ProcessFacts(cpus=(0, 1)),
        missing=ONLY_DEVICE,
        mends="more cores",
    ),
    Case(
        check="gpu.versions",
        good={},
        good_process=CUDA_TORCH,
        bad=field("cuda_version", "13.0", "11.8"),
        mends="driver for CUDA 12",
    ),
    Case(
        check="gpu.libraries",
        good={},
        good_process=PINNED,
        bad={},
        bad_process=structs.replace(
            PINNED, packages=PINNED.packages | {"nvidia-nccl-cu12": "2.21.5"}
        ),
        missing=ONLY_DEVICE,
        mends="pip install nvidia-nccl-cu12==2.27.5",
    ),
    Case(
        check="gpu.containers",
        good=DOCKER
        | {DOCKER_FILE: '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}'},
        bad=DOCKER | {DOCKER_FILE: '{"log-driver": "json-file"}'},
        missing=ONLY_DEVICE | DOCKER | {DOCKER_FILE: "{"},
        mends="nvidia-ctk cdi generate",
    ),
    Case(
        check="gpu.nvlink",
        good={"$ nvidia-smi nvlink -s": NVLINK},
        bad={
            "$ nvidia-smi nvlink -s": NVLINK.replace("Link 3: 26.562 GB/s", "Link 3: <inactive>", 1)
        },
        mends="reset",
    ),
    Case(
        check="gpu.nvlink_errors",
        good={"$ nvidia-smi nvlink -e": ERRORS.format(crc=0)},
        bad={"$ nvidia-smi nvlink -e": ERRORS.format(crc=17)},
        mends="whether they grow",
    ),
    Case(
        check="gpu.fabric",
        good=captured(
            "<state>N/A</state>\n\t\t\t<status>N/A</status>",
            "<state>Completed</state>\n\t\t\t<status>Success</status>",
        ),
        bad=captured("<state>N/A</state>", "<state>In Progress</state>"),
        mends="systemctl restart nvidia-fabricmanager",
        undoes="systemctl restart nvidia-fabricmanager",
    ),
    Case(
        check="gpu.peers",
        below=H100,
        good={"$ nvidia-smi topo -p2p r": PEERS.format(one="OK")},
        bad={"$ nvidia-smi topo -p2p r": PEERS.format(one="CNS")},
        mends="gpu.acs",
    ),
    Case(
        check="gpu.acs",
        good={"$ lspci -vvv": BRIDGE.format(control=ACS_OFF)},
        bad={"$ lspci -vvv": BRIDGE.format(control=ACS_ON)},
        missing=ONLY_DEVICE
        | {"$ lspci -vvv": "15:01.0 PCI bridge\n\tCapabilities: <access denied>"},
        mends="setpci -s 15:01.0 ECAP_ACS+0x6.w=0000",
        undoes="setpci -s 15:01.0 ECAP_ACS+0x6.w=001d",
    ),
    Case(
        check="gpu.iommu",
        good={
            "/proc/cmdline": "quiet iommu=pt",
            "/sys/class/iommu/dmar0": "",
            IOMMU_GROUP: "identity",
        },
        bad={"/proc/cmdline": "quiet", "/sys/class/iommu/dmar0": "", IOMMU_GROUP: "DMA-FQ"},
        mends="iommu=pt",
    ),
    Case(
        check="gpu.nics",
        below=H100,
        good={},
        bad={"$ nvidia-smi topo -m": TOPOLOGY.replace("PIX", "SYS")},
        missing=ONLY_DEVICE | RDMA,
        mends="GPUs' switches",
    ),
    Case(
        check="gpu.cpus",
        below=H100,
        good={},
        good_process=ProcessFacts(cpus=tuple(range(224))),
        bad={},
        bad_process=ProcessFacts(cpus=tuple(range(56))),
        mends="cpuset",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.check)
def test_good_bad_and_missing_evidence(case: Case) -> None:
    below = case.below or H200_VIRTUAL
    missing = case.missing or ONLY_DEVICE
    fields = {name: getattr(case, name) for name in case.__struct_fields__}
    prove(Case(**{**fields, "below": below, "missing": missing}))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.check)
def test_a_machine_without_gpus_is_not_judged(case: Case) -> None:
    assert played(case.check, {}).verdict == "skip"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.check)
def test_a_driver_that_says_nothing_is_unknown(case: Case) -> None:
    failing = {"$ nvidia-smi -q -x": "!ended with 9: NVIDIA-SMI has failed"}
    found = played(case.check, ONLY_DEVICE | RDMA | failing)
    # Whether containers get a card is no matter of the driver's.
    assert found.verdict == ("skip" if case.check == "gpu.containers" else "unknown"), found


def test_the_captured_card_passes_what_it_can_be_asked() -> None:
    verdicts = {
        case.check: played(case.check, {}, CPUS, below=H200_VIRTUAL).verdict for case in CASES
    }
    assert set(verdicts.values()) <= {"pass", "skip", "unknown"}, verdicts
    assert sum(verdict == "pass" for verdict in verdicts.values()) >= 13, verdicts


@pytest.mark.parametrize(
    ("packages", "verdict"),
    [
        ({"torch": "2.9.0+cpu"}, "fail"),
        ({"torch": "2.9.0+cu130"}, "pass"),
        ({"torch": "2.9.0", "nvidia-cuda-runtime": "13.0.48"}, "pass"),
        ({"torch": "3.0.0+cu140"}, "fail"),
        ({"torch": "2.9.0"}, "unknown"),
    ],
)
def test_torch_must_be_built_for_a_cuda_that_the_driver_knows(
    packages: dict[str, str], verdict: str
) -> None:
    found = played("gpu.versions", {}, ProcessFacts(packages=packages), below=H200_VIRTUAL)
    assert found.verdict == verdict, found


def test_a_module_of_another_driver_is_found() -> None:
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
    tree = {"/proc/driver/nvidia/version": version}
    found = played("gpu.versions", tree, CUDA_TORCH, below=H200_VIRTUAL)
    assert found.verdict == "fail" and found.measured["module"] == "570.86.15"


def test_an_idle_link_rests_and_a_slot_of_an_older_generation_is_found() -> None:
    resting = field("current_link_gen", "5", "1")
    assert played("gpu.pcie", resting, below=H200_VIRTUAL).verdict == "pass"
    busy = {QUERY: resting[QUERY].replace("<gpu_util>0 %", "<gpu_util>97 %")}
    assert played("gpu.pcie", busy, below=H200_VIRTUAL).verdict == "warn"
    slot = field("max_link_gen", "5", "4")
    found = played("gpu.pcie", slot, below=H200_VIRTUAL)
    assert found.measured["gpu 0"] == "generation 4 of 5"


def test_mps_in_the_environment_is_named() -> None:
    process = ProcessFacts(environment={"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"})
    found = played("gpu.compute_mode", {}, process, below=H200_VIRTUAL)
    assert found.verdict == "warn" and "CUDA_MPS_PIPE_DIRECTORY" in found.suggestion


def test_ecc_that_is_off_is_mended_by_a_command() -> None:
    found = played("gpu.ecc", field("current_ecc", "Enabled", "Disabled"), below=H200_VIRTUAL)
    assert found.verdict == "fail" and found.steps[0].do == "nvidia-smi -i 0 -e 1"


def test_hardware_is_not_judged_inside_a_virtual_machine() -> None:
    tree = {"$ lspci -vvv": BRIDGE.format(control=ACS_ON)}
    assert played("gpu.acs", tree, below=H200_VIRTUAL, profiles=("vm",)).verdict == "skip"
    assert played("gpu.acs", tree, below=H200_VIRTUAL, profiles=("metal", "container")).steps


def test_a_matrix_that_leaves_a_gpu_out_decides_nothing() -> None:
    cut = "\n".join(line for line in TOPOLOGY.splitlines() if not line.startswith("GPU3"))
    for check in ("gpu.nics", "gpu.cpus"):
        found = played(check, {"$ nvidia-smi topo -m": cut}, below=H100)
        assert found.verdict == "unknown" and "GPUs" in str(found.measured["missing"])


def test_a_library_that_torch_wants_and_lacks_is_named() -> None:
    without = ProcessFacts(packages={"torch": "2.9.0+cu128"}, wanted=PINNED.wanted)
    found = played("gpu.libraries", {}, without, below=H200_VIRTUAL)
    assert found.measured["nvidia-cudnn-cu12"] == "not installed, torch wants 9.10.2.21"
    # Built from source, or by conda: nothing says what it was built with.
    found = played("gpu.libraries", {}, CUDA_TORCH, below=H200_VIRTUAL)
    assert found.verdict == "unknown" and "names no version" in str(found.measured["missing"])


def test_boost_sliders_are_reported_and_those_that_differ_are_named() -> None:
    asked = "$ nvidia-smi boost-slider -l"
    alike = played("gpu.dvfs", {asked: boost(0)}, below=H100)
    assert alike.verdict == "pass" and "vboost 0 of 4" in str(alike.measured["settings"])
    differ = played("gpu.dvfs", {asked: boost(1)}, below=H100)
    assert differ.verdict == "warn" and "vboost 1 of 4" in str(differ.measured["gpu 0"])
    for answer in ("!Not Supported", "garbage"):
        found = played("gpu.dvfs", {asked: answer}, below=H100)
        assert found.verdict == "pass" and "vboost not told" in str(found.measured["settings"])


MIRROR = """\
[plugins."io.containerd.grpc.v1.cri".registry.mirrors."nvcr.io/nvidia"]
endpoint = ["https://mirror.example"]
"""
IMPORTS = 'imports = ["/etc/containerd/conf.d/*.toml"]\n'
RENAMED = """\
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.gpu.options]
BinaryName = "/usr/bin/nvidia-container-runtime"
"""


@pytest.mark.parametrize(
    "text", ["[]", "null", "7", '"nvidia"', '{"runtimes": null}', '{"runtimes": [1]}', "[" * 20_000]
)
def test_a_file_of_docker_that_is_none_ends_no_check(text: str) -> None:
    found = played("gpu.containers", DOCKER | {DOCKER_FILE: text}, below=H200_VIRTUAL)
    assert found.verdict in ("unknown", "warn"), found


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_warning_of_the_driver_beside_its_answer_hides_nothing(where: str) -> None:
    warning = "WARNING: infoROM is corrupted at gpu 0000:18:00.0\n"
    text = warning + CAPTURED if where == "before" else CAPTURED + warning
    assert played("gpu.persistence", {QUERY: text}, below=H200_VIRTUAL).verdict != "unknown"


def test_a_driver_that_has_no_application_clocks_any_more_is_not_asked_for_them() -> None:
    gone = "Requested functionality has been deprecated"
    text = re.sub(
        r"(<(default_)?applications_clocks>).*?(</(default_)?applications_clocks>)",
        lambda match: re.sub(r">[^<>\s][^<>]*<", f">{gone}<", match[0]),
        CAPTURED,
        flags=re.DOTALL,
    )
    assert gone in text
    assert played("gpu.clocks", {QUERY: text}, below=H200_VIRTUAL).verdict == "skip"


def test_containers_get_their_cards_by_any_of_three_ways() -> None:
    containerd = {"/usr/bin/containerd": ""}
    runtimes = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]\n'
    beside = {"/etc/containerd/conf.d/99-nvidia.toml": runtimes}
    for tree, verdict in [
        ({}, "skip"),  # nothing here starts containers
        (DOCKER, "warn"),
        (DOCKER | {"/var/run/cdi/nvidia.yaml": ""}, "pass"),
        (containerd | {"/etc/containerd/config.toml": runtimes}, "pass"),
        (containerd | {"/etc/containerd/config.toml": "version = 2\n"}, "warn"),
        # As nvidia-ctk writes it since 1.18: a file beside the main one.
        (containerd | beside, "pass"),
        (containerd | {"/etc/containerd/conf.d/50-mirror.toml": "version = 2\n"}, "warn"),
        (containerd | beside | {"/etc/containerd/config.toml": "version = 2\n"}, "warn"),
        (containerd | beside | {"/etc/containerd/config.toml": IMPORTS}, "pass"),
        # A mirror of NVIDIA's registry, or a runtime of somebody else, gives no card.
        (containerd | {"/etc/containerd/config.toml": MIRROR}, "warn"),
        (containerd | {"/etc/containerd/config.toml": RENAMED}, "pass"),
        (DOCKER | {DOCKER_FILE: '{"registry-mirrors": ["https://nvidia.example"]}'}, "warn"),
        (
            DOCKER
            | {DOCKER_FILE: '{"runtimes": {"gpu": {"path": "/usr/bin/nvidia-container-runtime"}}}'},
            "pass",
        ),
    ]:
        assert played("gpu.containers", tree, below=H200_VIRTUAL).verdict == verdict, tree
    inside = played("gpu.containers", DOCKER, below=H200_VIRTUAL, profiles=("metal", "container"))
    assert inside.verdict == "skip"
