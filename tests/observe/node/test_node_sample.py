"""Looks at a node's devices."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from phalanx.cluster.policy import PricePolicy
from phalanx.observe.node.gpu_sample import GPU
from phalanx.observe.node.node_sample import HOST, NodeSample, Sampler
from phalanx.observe.store import query
from phalanx.observe.store.metric_store import MetricStore
from phalanx.observe.store.recorder import Recorder

SECOND = 1_000_000_000


def test_this_machines_numbers_are_read(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path, gpus=False)
    sampler.look()
    host, gpus = sampler.look()
    assert set(host) <= set(HOST)
    assert 0 < host["memory_used_bytes"] < host["memory_total_bytes"]
    assert host["disk_free_bytes"] > 0
    assert gpus == {}


def write_network(proc: Path, received: int) -> None:
    (proc / "net").mkdir(exist_ok=True)
    zeros = "0 " * 6
    lines = ["Inter-|", " face |", f"    lo: 999 {zeros}0 999 {zeros}0"]
    lines.append(f"  eth0: {received} 0 3 0 0 0 0 0 50 0 4 0 0 0 0 0")
    (proc / "net" / "dev").write_text("\n".join(lines))


def test_counters_become_rates_and_a_reset_gives_none(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path, proc=tmp_path, gpus=False)
    write_network(tmp_path, 1000)
    assert "network_receive_bytes_per_second" not in sampler.look()[0]
    write_network(tmp_path, 5000)
    host = sampler.look()[0]
    assert host["network_receive_bytes_per_second"] > 0
    assert host["network_errors"] == 7
    write_network(tmp_path, 10)
    assert "network_receive_bytes_per_second" not in sampler.look()[0]


def test_infiniband_is_counted_over_all_ports(tmp_path: Path) -> None:
    counters = [tmp_path / f"mlx5_{n}" / "ports" / "1" / "counters" for n in range(2)]
    for folder in counters:
        folder.mkdir(parents=True)
        (folder / "symbol_error").write_text("2\n")
    sampler = Sampler(tmp_path, proc=tmp_path, infiniband=tmp_path, gpus=False)
    for words in (1000, 3000):
        for folder in counters:
            (folder / "port_rcv_data").write_text(f"{words}\n")
            (folder / "port_xmit_data").write_text(f"{3 * words}\n")
        host = sampler.look()[0]
    assert host["infiniband_errors"] == 4
    received = host["infiniband_receive_bytes_per_second"]
    assert received > 0
    assert host["infiniband_transmit_bytes_per_second"] == pytest.approx(3 * received)
    (counters[0] / "port_rcv_data").write_text("nonsense")
    assert "infiniband_errors" not in sampler.look()[0]


@pytest.mark.parametrize("text", ["", "garbage", "cpu x y z", "MemTotal: many kB"])
def test_files_that_make_no_sense_cost_their_own_numbers(tmp_path: Path, text: str) -> None:
    for name in ("stat", "meminfo", "loadavg", "vmstat"):
        (tmp_path / name).write_text(text)
    write_network(tmp_path, 1)
    host, _ = Sampler(tmp_path, proc=tmp_path, gpus=False).look()
    assert "disk_free_bytes" in host
    assert "memory_used_bytes" not in host


def test_samples_come_back_by_gpu_and_hostile_ones_do_no_harm(tmp_path: Path) -> None:
    store = MetricStore(tmp_path / "m.sqlite")
    recorder = Recorder(store, PricePolicy())
    for second in range(1, 31):
        gpus = {name: (float(second), math.nan) for name in GPU}
        host = {"load": float(second), "nonsense": 1.0}
        sample = NodeSample(node=0, time_ns=second * SECOND, host=host, gpus=gpus)
        recorder.sample(sample, "a", 10**18)
    wide = dict.fromkeys(GPU, (1.0,) * 100000)
    recorder.sample(NodeSample(node=0, time_ns=1, host={}, gpus=wide), "a", 10**18)
    uneven = {GPU[0]: (1.0, 2.0), GPU[1]: (1.0,)}
    recorder.sample(NodeSample(node=0, time_ns=31 * SECOND, host={}, gpus=uneven), "a", 10**18)
    store.flush(everything=True)
    found = query.devices(store, "node:a", (0, 10**18), 300)
    assert found.host["load"].value[:30] == [float(second) for second in range(1, 31)]
    assert found.gpus["gpu_power_watts"][0][:30] == [float(second) for second in range(1, 31)]
    assert found.gpus["gpu_power_watts"][1][0] is None
    assert len(found.time) == 31
