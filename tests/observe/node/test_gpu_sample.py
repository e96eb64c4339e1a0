"""GPUs as NVML and DCGM tell of them, from what such machines said."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.observe.node.dcgm import Dcgm, parse
from phalanx.observe.node.gpu_sample import ALL_LINKS, GPU, Gpus

RECORDED = (Path(__file__).parents[1] / "fixtures" / "dcgm-exporter.txt").read_text()
UUIDS = [f"GPU-{digit * 8}-aaaa-bbbb-cccc-000000000000" for digit in "12"]


class NvmlError(Exception):
    """What a card does not know."""


class RecordedNvml:
    """NVML of two cards, the second without NVLink: there is no such card here."""

    NVMLError = NvmlError

    def __init__(self) -> None:
        self.kib = 1000
        self._answers: dict[str, Callable[..., Any]] = {
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda handle: UUIDS[handle].encode(),
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=90 + handle),
            "nvmlDeviceGetPcieThroughput": lambda handle, counter: 10 + counter,
            "nvmlDeviceGetPcieReplayCounter": lambda handle: 3,
            "nvmlDeviceGetFieldValues": self._fields,
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._answers.get(name, unknown)

    def _fields(self, handle: int, fields: list[tuple[int, int]]) -> list[Any]:
        return unknown() if handle == 1 else [self._field(*each) for each in fields]

    def _field(self, field: int, scope: int) -> Any:
        assert scope == (ALL_LINKS if field in (138, 139) else 0)
        known = {139: self.kib, 138: 2 * self.kib, 38: 1, 52: 4}
        value = SimpleNamespace(ullVal=known.get(field, 0))
        return SimpleNamespace(
            fieldId=field, nvmlReturn=0 if field in known else 3, valueType=3, value=value
        )


def unknown(*_: object) -> Any:
    raise NvmlError("not supported")


def test_links_are_rates_of_their_counters_and_a_card_without_them_leaves_them_out() -> None:
    nvml = RecordedNvml()
    gpus = Gpus(nvml)
    first = gpus.look()
    assert first["gpu_utilization"] == (0.9, 0.91)
    assert first["gpu_pcie_receive_bytes_per_second"] == (11 * 1024, 11 * 1024)
    assert first["gpu_pcie_replays"] == (3.0, 3.0)
    assert first["gpu_nvlink_errors"][0] == 5.0 and math.isnan(first["gpu_nvlink_errors"][1])
    assert math.isnan(first["gpu_nvlink_receive_bytes_per_second"][0])
    nvml.kib = 3000
    second = gpus.look()
    received, sent = (
        second[f"gpu_nvlink_{way}_bytes_per_second"][0] for way in ("receive", "transmit")
    )
    assert received > 0 and sent == pytest.approx(2 * received)
    nvml.kib = 5  # a driver that was loaded anew
    assert math.isnan(gpus.look()["gpu_nvlink_receive_bytes_per_second"][0])
    assert set(second) == set(GPU)


def test_an_exporters_words_reach_the_right_card() -> None:
    first, second = parse(RECORDED, UUIDS)
    assert first == {
        "gpu_sm_activity": 0.871234,
        "gpu_tensor_activity": 0.512,
        "gpu_dram_activity": 0.33,
    }
    assert second == {"gpu_sm_activity": 0.402}  # neither NaN, nor part of a card, nor nonsense
    assert parse(RECORDED, UUIDS[::-1]) == [second, first]
    assert parse(RECORDED, ["", ""]) == [first, second]  # by number where NVML knows no UUID


@pytest.fixture
def exporter() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(RECORDED.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()


def test_activity_stands_beside_what_nvml_knows(exporter: str) -> None:
    found = Gpus(RecordedNvml(), Dcgm(exporter)).look()
    assert found["gpu_sm_activity"] == (0.871234, 0.402)
    assert found["gpu_utilization"] == (0.9, 0.91)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/metrics", "not an address"])
def test_an_exporter_that_is_not_there_costs_one_try(url: str) -> None:
    dcgm = Dcgm(url)
    assert dcgm.look(UUIDS) == [{}, {}]
    dcgm._url = "http://never.asked.invalid/"
    assert dcgm.look(UUIDS) == [{}, {}]


@pytest.mark.parametrize("text", ["", "{", 'DCGM_FI_PROF_SM_ACTIVE{gpu="9"} 0.5', "\x00" * 99])
def test_words_that_make_no_sense_say_nothing(text: str) -> None:
    assert parse(text, UUIDS) == [{}, {}]
