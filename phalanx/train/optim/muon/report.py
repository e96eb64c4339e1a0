"""Which rank orthogonalises what: said in the log, and kept with the run."""

from __future__ import annotations

import logging

import msgspec

from phalanx.data.durable_files import write_synced
from phalanx.train.callback import Callback, TrainingRun
from phalanx.train.optim.muon.optimizer import Muon

log = logging.getLogger(__name__)


class MuonPartition(Callback):
    """``provenance/muon-STAGE.json``, one file for each pipeline stage, by its first rank."""

    def begin(self, run: TrainingRun) -> None:
        optimizer, mesh = run.trainer.optimizer, run.trainer.mesh
        if not isinstance(optimizer, Muon) or mesh.rank % mesh.stage_ranks:
            return
        partition = optimizer.partition
        log.info("%s", partition.summary)
        text = msgspec.json.format(msgspec.json.encode(partition), indent=1) + b"\n"
        name = f"muon-{mesh.coordinates['pipeline']}.json"
        write_synced(run.folder.provenance / name, text)
