"""Where a document of a corpus came from, as it is stored."""

from __future__ import annotations

import msgspec
import numpy as np

PLACES_NAME = "places.npy"  # of tokenised files
IDS_NAME = "ids.txt"  # ids of documents, one after the other

PLACE = np.dtype(
    [
        ("token", "<i8"),  # first one: within the group's tokens, or within the corpus
        ("file", "<i4"),  # within the group, or of the corpus
        ("record", "<i8"),
        ("offset", "<i8"),
        ("id_end", "<i8"),  # its id is what stands between the document before's and here
        ("hash", "<u4"),  # decides whether it is held out
    ]
)


class SourceFile(msgspec.Struct, frozen=True):
    """A raw file, as it was when the corpus was made."""

    path: str
    bytes: int
    sha256: str = ""
    etag: str = ""  # of an object of a store, instead
