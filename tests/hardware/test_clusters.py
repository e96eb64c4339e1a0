"""Clusters: names, parts, files, and figures that are computed from others."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.hardware import (
    catalogue,
    cluster,
    fabrics,
    gpu,
    gpus_by_key,
    links,
    lookup,
    nics,
    nodes,
    parse_count,
    pcie_bandwidth,
)
from phalanx.hardware.tables import table


@pytest.mark.parametrize(
    ("generation", "lanes", "gigabytes"),
    [(3, 16, 15.75), (4, 16, 31.51), (5, 16, 63.02), (5, 8, 31.51), (6, 16, 121.0)],
)
def test_pcie_rates_follow_from_transfers_and_line_code(
    generation: int, lanes: int, gigabytes: float
) -> None:
    assert pcie_bandwidth(generation, lanes) / 1e9 == pytest.approx(gigabytes, abs=0.005)


@pytest.mark.parametrize(
    ("name", "domain_gigabytes", "network_gigabytes"),
    [
        ("a100-1024", 300, 25),
        ("h100-16k", 450, 50),
        ("h800-2048", 200, 50),
        ("b200-64", 900, 50),
        ("b300-64", 900, 100),
        ("gb200-nvl72-576", 900, 50),
        ("mi300x-64", 448, 50),
        ("jean-zay", 100, 6.25),
    ],
)
def test_rates_of_a_gpu_are_one_way(
    name: str, domain_gigabytes: float, network_gigabytes: float
) -> None:
    found = cluster(name)
    assert found.domain_bandwidth / 1e9 == pytest.approx(domain_gigabytes)
    assert found.network_bandwidth / 1e9 == pytest.approx(network_gigabytes)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512", 512),
        ("16k", 16384),
        ("16K", 16384),
        ("24k", 24576),
        ("128k", 131072),
        ("100k", 100_000),
        ("10k", 10_000),
        ("", None),
        ("k", None),
        ("1.5k", None),
        ("-8", None),
    ],
)
def test_counts_as_people_write_them(text: str, count: int | None) -> None:
    assert parse_count(text) == count


def test_an_nvl72_cluster_has_trays_in_a_wide_domain() -> None:
    found = cluster("gb200-nvl72-4608")
    assert (found.gpus_per_node, found.domain_gpus, found.nodes) == (4, 72, 1152)


def test_a_part_of_a_node_is_a_cluster() -> None:
    found = cluster("h200-2")
    assert (found.gpus_per_node, found.domain_gpus, found.nodes) == (2, 2, 1)
    assert found.watts_per_gpu == pytest.approx(cluster("h200-8").watts_per_gpu)


def test_cooler_gpus_draw_their_difference_less() -> None:
    hot, cool = cluster("llama3-512"), cluster("grand-teton-500w-512")
    assert hot.node_watts - cool.node_watts == pytest.approx(8 * (700 - 500))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h10-16k", '"h100-16k"'),
        ("selen-512", '"selene-512"'),
        ("h100", "say how many"),
        ("h100-100", "try 96 or 104"),
        ("selene-9000", "has 4,480 GPUs"),
        ("h100-0", "1 to 10,000,000"),
        ("h100--8", "no such cluster"),
        ("", "no such cluster"),
        ("nowhere.toml", "no such file"),
    ],
)
def test_a_wrong_cluster_is_refused_with_a_way_out(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cluster(name)


def test_an_unknown_gpu_is_refused_with_near_names() -> None:
    with pytest.raises(ConfigError, match='"h100"'):
        gpu("h1000")


def test_a_gpu_is_found_by_any_of_its_names() -> None:
    assert gpu("h100") is gpu("H100-SXM") is gpu("NVIDIA H100 80GB HBM3")
    assert lookup("h100") is None  # the trainer asks by device name only


def test_a_file_describes_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(
        'gpu = "h100"\ngpus = 2048\nnic = "roce-200"\nnics_per_gpu = 0.5\n'
        'fabric = "fat-tree"\npod_gpus = 512\noversubscription = 4\nprice_per_gpu_hour = 1.9\n',
        encoding="utf-8",
    )
    found = cluster(str(path))
    assert found.name == "site"
    assert found.network_bandwidth == pytest.approx(12.5e9)
    assert (found.fabric.pod_gpus, found.fabric.oversubscription) == (512, 4)
    assert found.price_per_gpu_hour == 1.9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('gpu = "h100"\ngpus = 8\nnicks = "ndr"\n', "no known key"),
        ('gpu = "h100"\ngpus = -8\n', ">= 1"),
        ('gpu = "h100"\n', "gpus: is missing"),
        ('gpu = "h101"\ngpus = 8\n', '"h100"'),
        ('gpu = "h100"\ngpus = 8\nnic = "ndrr"\n', '"ndr"'),
        ('gpu = "h100"\ngpus = 8\npue = 0.5\n', ">= 1"),
        ('gpu = "h100"\ngpus = 64\npod_gpus = 5\n', "whole nodes of 8"),
        ('gpu = "h100"\ngpus = 64\ndomain_gpus = 5\n', "even parts of one"),
        ('gpu = "h100"\ngpus = 64\noversubscription = 0.5\n', "1 or more"),
        ("gpu = \n", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        cluster(str(path))


def test_every_entry_names_parts_that_exist() -> None:
    for device in catalogue():
        node = nodes()[device.node]
        assert node.link in links() and node.nic in nics() and node.fabric in fabrics()
        for key in device.keys:
            assert cluster(f"{key}-{node.gpus * 4}").gpu is device
    for site in table("clusters.toml"):
        assert cluster(site).gpus > 0


def test_short_names_are_listed_once() -> None:
    assert len(gpus_by_key()) == sum(len(device.keys) for device in catalogue())


def test_servers_are_rated_above_their_gpus() -> None:
    for node in nodes().values():
        assert node.watts > node.gpus * node.gpu_watts, node.name


@pytest.mark.parametrize(
    ("ends", "hops"), [(2, 1), (64, 1), (65, 3), (2048, 3), (2049, 5), (65536, 5)]
)
def test_a_tree_grows_a_level_where_its_ports_run_out(ends: int, hops: int) -> None:
    assert fabrics()["fat-tree"].hops(ends) == hops


def test_a_packets_headers_cost_roce_more_than_infiniband() -> None:
    assert nics()["roce-400"].payload_share < nics()["ndr"].payload_share < 1


def test_a_mixed_fleet_is_told_to_be_planned_by_kind() -> None:
    with pytest.raises(ConfigError, match="plan each kind of GPU by itself"):
        cluster("h100-8+a100-8")
