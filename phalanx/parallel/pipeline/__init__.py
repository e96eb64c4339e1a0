"""Pipeline parallelism: stages under their schedules, and the embedding that two of them share."""

from phalanx.parallel.pipeline.schedules import Pipeline, stages_of_rank
from phalanx.parallel.pipeline.shared_embedding import SharedEmbedding

__all__ = ["Pipeline", "SharedEmbedding", "stages_of_rank"]
