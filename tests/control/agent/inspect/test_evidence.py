"""What ranks were doing when they hung is read back, and nothing else of the node."""

from __future__ import annotations

from pathlib import Path

from phalanx.control.agent.inspect.evidence import seen_text


def test_stacks_of_a_generation_are_told_by_rank(tmp_path: Path) -> None:
    for generation, text in ((2, "older"), (5, "in all_reduce"), (9, "later")):
        folder = tmp_path / "evidence" / f"generation-{generation}"
        folder.mkdir(parents=True)
        for rank in (0, 10, 2):
            (folder / f"rank-{rank}.stacks").write_text(f"{text} of {rank}\n")
        (folder / "rank-2.process").write_text("== status\nState: S\n")
        (folder / "rank-2.flight.json").write_text("{}")
    secret = tmp_path / "secret"
    secret.write_text("a key")
    (tmp_path / "evidence" / "generation-5" / "rank-7.stacks").symlink_to(secret)
    told = seen_text(tmp_path, 5, -1).decode()
    assert told.startswith("generation 5\n")
    heads = [line for line in told.splitlines() if line.startswith("== rank")]
    ranks = [line.removeprefix("== rank ") for line in heads]
    assert ranks == ["0: stacks", "2: stacks", "2: process", "10: stacks"]
    assert "in all_reduce of 10" in told and "a key" not in told and "{}" not in told
    assert seen_text(tmp_path, 5, 10).decode() == (
        "generation 5\n\n== rank 10: stacks\nin all_reduce of 10\n"
    )
    assert seen_text(tmp_path, 0, 2).startswith(b"generation 9\n")
    assert seen_text(tmp_path, 7, -1) == b"" == seen_text(tmp_path / "none", 9, -1)
