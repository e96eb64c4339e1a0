"""`phalanx parity`: a line a mesh, and exit code 1 where one comes to something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.train.parity_tables import print_comparison, print_reshards, print_verdict
from phalanx.train.parity.prove import MeshComparison
from tests.commands import run_phalanx

ROOT = Path(__file__).parents[3]
SAME = MeshComparison(mesh="tp2", ranks=2, loss=1e-7, grad_norm=1e-7, weights=1e-6)
WRONG = MeshComparison(mesh="pp2", ranks=2, loss=0.1, weights=0.5, parameter="layers.0.gain")
REFUSED = MeshComparison(mesh="cp2", ranks=2, refused="tokens meet elsewhere")
BROKEN = MeshComparison(mesh="ep2", ranks=2, error="ValueError: no")


def test_what_differs_is_told_from_what_is_refused() -> None:
    assert SAME.same and not SAME.differs
    assert WRONG.differs and BROKEN.differs
    assert not REFUSED.same and not REFUSED.differs
    assert MeshComparison(mesh="tp2", ranks=2, loss=float("inf")).differs


def test_each_mesh_has_a_line_and_checkpoints_a_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    for one in (SAME, WRONG, REFUSED, BROKEN):
        print_comparison(one)
    ways = [
        MeshComparison(mesh=to, ranks=2, source=source, loss=0.1 if source != to else 0.0)
        for source in ("tp2", "pp2")
        for to in ("tp2", "pp2")
    ]
    print_reshards(ways)
    print_verdict([SAME, WRONG, REFUSED, BROKEN, *ways])
    said = capsys.readouterr().out
    assert "most in layers.0.gain" in said and "tokens meet elsewhere" in said
    assert "ValueError: no" in said
    assert "4 meshes: 1 same, 2 DIFFERS, 1 refused; checkpoints: 2 of 4 ways same" in said
    rows = [line.split() for line in said.splitlines() if line.startswith(("  1 ", "  2 "))]
    assert [row[-2:] for row in rows] == [["=", "X"], ["X", "="]]


def test_an_unknown_mesh_is_refused_with_the_nearest() -> None:
    done = run_phalanx("parity", str(ROOT / "examples/tiny.toml"), "--mesh", "fsdp3")
    assert done.returncode == 2 and 'did you mean "fsdp' in done.stderr + done.stdout
