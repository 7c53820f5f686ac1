"""Which split a document or an example belongs to."""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Rules:
    """Which split a document belongs to. Pure in the document's content, so copies stay together."""

    given: dict[str, np.ndarray] = field(default_factory=dict)
    """Sorted content hashes of the documents in given val and test files."""
    drawn: dict[str, float] = field(default_factory=dict)
    """Share of the training documents to draw for the splits that were not given."""

    def splits_of(self, source_split: str, hashes: np.ndarray) -> list[str]:
        """The split of each document; "" for one that already stands in another split and is dropped here."""
        splits = np.full(len(hashes), source_split, dtype=object)
        if source_split == "train":
            place, edge = hashes / 2.0**64, 0.0
            for split, share in self.drawn.items():
                splits[(edge <= place) & (place < edge + share)] = split
                edge += share
            splits[self._stand_in("test", hashes)] = ""
        if source_split != "val":
            splits[self._stand_in("val", hashes)] = ""
        return splits.tolist()

    def _stand_in(self, split: str, hashes: np.ndarray) -> np.ndarray:
        known = self.given.get(split, np.empty(0, np.uint64))
        if not len(known):
            return np.zeros(len(hashes), dtype=bool)
        at = np.searchsorted(known, hashes).clip(max=len(known) - 1)
        return known[at] == hashes
