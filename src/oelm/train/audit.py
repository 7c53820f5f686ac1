"""The freeze audit: the hash of every frozen tensor at the beginning of each phase, and the proof that it holds."""

import json
from pathlib import Path
from typing import Any

from torch import nn

from oelm.files import write_atomic
from oelm.model.freeze import fingerprint


class FreezeAudit:
    """`freeze_audit.jsonl`: a record {step, frozen: {name: SHA-256}} per phase, from its first step on."""

    def __init__(self, path: Path, model: nn.Module, writes: bool) -> None:
        self.path, self.model, self.writes = path, model, writes
        self.records: list[dict[str, Any]] = []

    def go_on(self, step: int, names: list[str]) -> bool:
        """Go on with what was noted before update `step`; the rest belongs to updates that are still to come.

        False: the note of what has been frozen until now, `names`, is not there, and was made again.
        """
        self.records = [record for record in _read(self.path) if record["step"] < step]
        if step == 0 or (self.records and self.records[-1]["frozen"].keys() == {*names}):
            return True
        self._write(step - 1, names)
        return False

    def note(self, step: int, names: list[str]) -> bool:
        """A phase begins with update `step`. False: something changed in the phase before."""
        held = self.holds()
        self._write(step, names)
        return held

    def _write(self, step: int, names: list[str]) -> None:
        self.records.append({"step": step, "frozen": {name: fingerprint(self.model, [name]) for name in names}})
        if self.writes:
            write_atomic(self.path, "".join(json.dumps(record) + "\n" for record in self.records))

    def holds(self) -> bool:
        """What is frozen now still has the bits that it froze with."""
        if not self.records:
            return True
        frozen: dict[str, str] = self.records[-1]["frozen"]
        return all(fingerprint(self.model, [name]) == digest for name, digest in frozen.items())


def _read(path: Path) -> list[dict[str, Any]]:
    """Nothing, if any of it is damaged."""
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return []
    whole = all(
        isinstance(r, dict) and isinstance(r.get("step"), int) and isinstance(r.get("frozen"), dict) for r in records
    )
    return records if whole else []
