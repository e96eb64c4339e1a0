"""What the speed comparison trains."""

from __future__ import annotations

import dataclasses

from phalanx.config import PRESETS, Model

SEQUENCE = 8192


@dataclasses.dataclass(frozen=True)
class Shape:
    """A preset with the batch, in sequences, that fills one H200 well."""

    name: str
    batch: int

    @property
    def model(self) -> Model:
        import msgspec

        return msgspec.structs.replace(PRESETS[self.name], tied_embedding=False)


SHAPES = {shape.name: shape for shape in (Shape("llama3-1b", 4), Shape("llama3-3b", 2))}
