"""How well a model tells preferred answers from rejected ones, as the steps come to it."""

from __future__ import annotations

import torch

from phalanx.model.post_training.preference import pair_loss_of
from phalanx.parallel import all_sum
from phalanx.train.callback import TrainingRun
from phalanx.train.metric import Metric
from phalanx.train.trainer import StepOutcome


class PreferenceMetrics(Metric):
    """Rewards over all pairs since the last measurement, under the names that TRL gives them."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every

    def measure(self, run: TrainingRun, outcome: StepOutcome) -> dict[str, float]:
        engine = run.trainer.engine
        (loss,) = filter(None, map(pair_loss_of, engine.parts))
        # Tensor-parallel ranks know the same pairs: the means stay what they are.
        sums = all_sum(torch.stack(loss.take_sums(engine.mesh.device)))
        chosen, rejected, preferred, pairs = sums.tolist()
        pairs = max(pairs, 1.0)
        return {
            "rewards/chosen": chosen / pairs,
            "rewards/rejected": rejected / pairs,
            "rewards/margins": (chosen - rejected) / pairs,
            "rewards/accuracies": preferred / pairs,
        }
