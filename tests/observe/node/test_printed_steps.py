"""Steps, losses and rates are read from what training libraries print, and from nothing else."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.node.printed_steps import PrintedStep, StepLines
from tests.examples import examples

TITAN = (
    "\x1b[32m[titan] 2025-06-01 10:00:01 - root - INFO - \x1b[31mstep:  7  \x1b[32mloss:  8.1309"
    "  \x1b[38;2;180;60;0mgrad_norm:  1.4000  \x1b[33mmemory:  1.47GiB(1.55%)"
    "  \x1b[34mtps: 12,345  \x1b[36mtflops: 0.09  \x1b[35mmfu: 0.03%\x1b[39m\n"
)
MEGATRON = (
    " [2025-06-01 10:00:01] iteration       20/     500 | consumed samples:          640 |"
    " elapsed time per iteration (ms): 1234.5 | learning rate: 3.000000E-05 | global batch size:"
    "    32 | lm loss: 9.876543E+00 | loss scale: 1.0 | grad norm: 2.500 | number of skipped"
    " iterations:   0 |\n"
)
DEEPSPEED = (
    "[2025-06-01 10:00:01,123] [INFO] [logging.py:107:log_dist] [Rank 0] step=30, skipped=0,"
    " lr=[0.0001], mom=[(0.9, 0.999)]\n"
)
LIGHTNING = "\rEpoch 2:  30%|███       | 3/10 [00:00<00:01, 45.60it/s, v_num=0, train_loss=0.512]\n"


@pytest.mark.parametrize(
    ("text", "library", "step"),
    [
        (TITAN, "torchtitan", PrintedStep(7, 0, 8.1309, 1.4, None, 12345.0)),
        (MEGATRON, "megatron", PrintedStep(20, 500, 9.876543, 2.5, 3e-5)),
        (DEEPSPEED, "deepspeed", PrintedStep(30, learning_rate=0.0001)),
        (LIGHTNING, "lightning", PrintedStep(23, 0, 0.512)),
        ("iter 40: loss 3.2100, time 120.00ms, mfu 1.00%\n", "nanogpt", PrintedStep(40, 0, 3.21)),
    ],
)
def test_a_line_of_a_known_library_tells_a_step(text: str, library: str, step: PrintedStep) -> None:
    lines = StepLines()
    assert lines.feed(text) == [step]
    assert lines.library == library


def bar(step: int, steps: int) -> str:
    return f"\r {100 * step // steps}%|██        | {step}/{steps} [00:01<00:09,  9.00it/s]"


def test_the_bar_of_transformers_counts_once_its_logs_are_seen_and_not_that_of_an_evaluation() -> (
    None
):
    lines = StepLines()
    assert lines.feed(bar(1, 20) + bar(2, 20)) == []  # any program may have such a bar
    logs = "{'loss': '2.5', 'grad_norm': '1.25', 'learning_rate': '5e-05', 'epoch': '0.1'}"
    (step,) = lines.feed(f"\n{logs}\n")
    assert step == PrintedStep(2, 20, 2.5, 1.25, 5e-5) and lines.library == "transformers"
    assert lines.feed(bar(5, 7) + bar(6, 7) + "\n") == []  # an evaluation
    assert [each.step for each in lines.feed(bar(3, 20) + bar(4, 20) + "\r")] == [3, 4]
    unquoted = "{'loss': 2.25, 'grad_norm': 1.0, 'learning_rate': 4e-05, 'epoch': 0.25}\n"
    assert lines.feed(bar(5, 20) + "\n" + unquoted)[-1].step == 5


@pytest.mark.parametrize(
    "text",
    [
        "step 5 of the recipe: loss of appetite\n",
        "Map: 100%|██████████| 1000/1000 [00:01<00:00, 900.00 examples/s]\n",
        "Loading checkpoint shards:  50%|█████     | 1/2 [00:01<00:01,  1.00s/it]\n",
        "iteration 5\nstep=5\nEpoch 5\n{'eval_loss': 2.0, 'epoch': 1.0}\n",
        "\x00\x1b[\x1b]0;step:\n" * 3,
        "step: 99999999999999999999 loss: 1.0\n",
    ],
)
def test_other_output_tells_none(text: str) -> None:
    assert StepLines().feed(text) == []


def test_steps_come_once_and_in_order_whatever_the_pieces_are() -> None:
    text = "".join(f"step:  {n}  loss:  {n}.5\n" for n in (1, 2, 2, 1, 3))
    lines, found = StepLines(), []
    for letter in text:
        found += lines.feed(letter)
    assert [each.step for each in found] == [1, 2, 3]
    assert lines.feed(MEGATRON) == []  # one program, one library


# As a regular expression says it, which takes a time that grows with the cube of the line's length.
LOGS = re.compile(r"^\{.*'(?:loss|train_loss)': .*'epoch': .*\}$")
PARTS = ["{", "}", "'loss': ", "'train_loss': ", "'epoch': ", "'loss':", "1.5", " "]


@examples(300)
@given(st.lists(st.sampled_from(PARTS), max_size=7).map("".join))
def test_a_dictionary_of_transformers_is_known_by_its_loss_and_its_epoch(line: str) -> None:
    bar = " 10%|█         | 3/30 [00:00<00:02, 12.00it/s]\n"
    lines = StepLines()
    lines.feed(bar + line + "\n")
    assert (lines.library == "transformers") == bool(LOGS.match(line))


def test_a_line_that_looks_like_many_dictionaries_is_read_in_one_pass() -> None:
    lines = StepLines()
    assert not lines.feed(("{" + "'loss': 'epoch': " * 117 + "\n") * 2_000) and not lines.library
