"""The picture: every kind of file, and what cannot be drawn is refused before any work."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import ConfigError
from phalanx.plan import PlanRequest, sweep, understand
from phalanx.plan.search.sweep import Sweep
from phalanx.plan.show.plot import Kernel, Picture, Point, check_path, draw
from phalanx.plan.show.plot_sweep import draw_sweep

PICTURE = Picture(
    title="a <model> on a cluster",
    subtitle="tensor 8",
    parts={"matmul": 2.0, "context": 0.0, "bubble": 0.5},
    front=(Point("chosen", 40.0, 300.0, chosen=True), Point("other", 20.0, 200.0)),
    front_axes=("GiB", "tokens/s"),
    memory_limit=80.0,
    kernels=(Kernel("matmul", 1500.0, 600e12), Kernel("elementwise", 0.5, 1e12)),
    peak_flops=989e12,
    memory_bandwidth=3.35e12,
    gpu="H100",
)


@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.html", b"<!doctype html>")]
)
def test_each_kind_of_file_is_written(tmp_path: Path, name: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    draw(PICTURE, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_page_stands_alone_and_escapes_names(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(PICTURE, tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "a &lt;model&gt;" in text and "<svg" in text
    assert "<script" not in text and "src=" not in text


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.html"):
        check_path(tmp_path / "a.jpeg")
    with pytest.raises(ConfigError, match="folder"):
        check_path(tmp_path / "nowhere" / "a.png")


def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"phalanx\[plot\]"):
        draw(PICTURE, tmp_path / "a.png")


def test_a_scaling_curve_is_drawn_with_its_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    question = understand(PlanRequest(model="llama3-8b", cluster="h100-256", tokens="1T"))
    result = sweep(question, (64, 256))
    for name, start in (("a.png", b"\x89PNG"), ("a.html", b"<!doctype html>")):
        draw_sweep(result, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    for plan in result.plans:
        assert f"<td>{plan.prediction.mfu:.1%}</td>" in page
    with pytest.raises(ConfigError, match="no number of GPUs"):
        draw_sweep(Sweep((), ((8, "too small"),)), tmp_path / "b.png")
