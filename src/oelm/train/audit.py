"""The freeze audit: the hash of every frozen tensor at the beginning of each phase, and the proof that it holds."""

import json
from pathlib import Path

from torch import nn

from oelm.files import write_atomic
from oelm.model.freeze import fingerprint


class FreezeAudit:
    """`freeze_audit.jsonl`: a record {step, frozen: {name: SHA-256}} per phase, from its first step on."""

    def __init__(self, path: Path, model: nn.Module, step: int, writes: bool) -> None:
        """Go on with what was noted before update `step`; the rest belongs to updates that are still to come."""
        self.path, self.model, self.writes = path, model, writes
        self.records = [record for record in _read(path) if record["step"] < step]

    def note(self, step: int, names: list[str]) -> bool:
        """A phase begins with update `step`. False: something changed in the phase before."""
        held = self.holds()
        self.records.append({"step": step, "frozen": {name: fingerprint(self.model, [name]) for name in names}})
        if self.writes:
            write_atomic(self.path, "".join(json.dumps(record) + "\n" for record in self.records))
        return held

    def holds(self) -> bool:
        """What is frozen now still has the bits that it froze with."""
        if not self.records:
            return True
        frozen: dict[str, str] = self.records[-1]["frozen"]
        return all(fingerprint(self.model, [name]) == digest for name, digest in frozen.items())


def _read(path: Path) -> list[dict]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return []
