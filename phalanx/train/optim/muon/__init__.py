"""Muon: whole matrices are orthogonalised, each by one rank, whatever blocks ranks hold of it."""

from phalanx.train.optim.muon.optimizer import Muon, takes
from phalanx.train.optim.muon.report import MuonPartition

__all__ = ["Muon", "MuonPartition", "takes"]
