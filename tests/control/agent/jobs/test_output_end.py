"""Why a program ended, in the words that it printed last."""

from __future__ import annotations

import pytest

from phalanx.control.agent.jobs.output_end import described_end

RAISED = """epoch 1
Traceback (most recent call last):
  File "/home/me/train.py", line 30, in <module>
    main()
  File "/home/me/lib/loop.py", line 12, in step
    loss = model(batch["missing"])
KeyError: 'missing'
[rank0]:[W725 11:00:00] Warning: destroy_process_group() was not called
"""
CHAINED = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
ValueError: the first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in f
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
"""


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (RAISED, "KeyError: 'missing' (loop.py:12)"),
        (
            CHAINED,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (b.py:2)",
        ),
        (
            "".join(f"[rank1]: {line}\n" for line in RAISED.splitlines()),
            "KeyError: 'missing' (loop.py:12)",
        ),
        ("one\ntwo\n\nthree\nfour\n", "two | three | four"),
        (" 10%|#   | 1/10\r 20%|##  | 2/10\rcannot read shard 7\n", "cannot read shard 7"),
        ("", ""),
    ],
)
def test_the_exception_or_the_last_lines_are_told(output: str, told: str) -> None:
    assert described_end(output).endswith(told)
    assert bool(described_end(output)) == bool(told)


def test_what_is_told_is_short_and_steers_no_terminal() -> None:
    told = described_end("\x1b[31m" + "x" * 10_000 + "\x1b]0;title\x07\n" * 5)
    assert len(told) <= 500 and "\x1b" not in told and "\x07" not in told
