"""The files that ``phalanx new model`` writes: a layer, a job, and the proof of both."""

from __future__ import annotations

LAYER = '''"""A layer of one's own. Change the branches; declare every parameter that you add."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config import Model
from phalanx.model import RESIDUAL, ROWS, ForwardContext, GroupedQueryAttention, Layer, RMSNorm
from phalanx.model import declare
from phalanx.model.layers import Linear


class Mlp(nn.Module):
    """A branch: under tensor parallelism it holds some rows of `up` and columns of `down`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = Linear(dim, hidden), Linear(hidden, dim)
        declare(self.up, weight=ROWS)
        declare(self.down, weight=RESIDUAL)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class @Class@(Layer):
    """One layer of the model; its result has the shape of its input."""

    splits_sequence = True  # tokens meet in attention alone: context parallelism may split them

    def __init__(self, config: Model, index: int) -> None:
        super().__init__()
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = GroupedQueryAttention(config, index)
        self.mlp = Mlp(config.dim, config.ffn)

    def branches(self) -> list[nn.Module]:
        """Get the whole sequence; tensor parallelism adds up what the ranks give."""
        return [self.attention, self.mlp]

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        normed = self.norm(x)
        return x + self.attention(normed, context) + self.mlp(normed)
'''

JOB = """# phalanx train @name@.toml
name = "@name@"

[code]
files = ["@name@.py"]

[model]
module = "@name@:@Class@"
dim = 64
layers = 4
heads = 4
ffn = 256
vocab = 512
mlp = "gelu"

[data]
sequence = 64

[precision]
compute = "float32"

[train]
steps = 20
global_batch = 8
"""

TEST = '''"""Every mesh of two ranks trains the model as one process does."""

import subprocess
import sys
from pathlib import Path


def test_every_mesh_trains_like_one_process() -> None:
    command = [sys.executable, "-m", "phalanx", "parity", "@name@.toml", "--ranks", "2"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
'''


def model_files(name: str) -> dict[str, str]:
    """Text by the file's name, of a model whose module has this name."""
    class_name = "".join(part.capitalize() for part in name.split("_")) + "Layer"
    texts = {f"{name}.py": LAYER, f"{name}.toml": JOB, f"test_{name}.py": TEST}
    return {
        file: text.replace("@name@", name).replace("@Class@", class_name)
        for file, text in texts.items()
    }
