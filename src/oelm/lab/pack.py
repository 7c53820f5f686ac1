"""`oelm pack`: a folder of runs without weights, in one small file: all that verdicts and reports are made from.

Unpacked where it was packed, it is a folder of runs again; `oelm run` skips them and goes on with the rest of the plan.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

from oelm.errors import UserError
from oelm.files import disk_errors, write_atomic
from oelm.lab.plan import plan_copies
from oelm.lab.status import find_runs
from oelm.machine import host_id
from oelm.train.folder import RunFolder

WHO = ("host", "pid", "process_started", "platform")
"""What environment.json says of the machine's user rather than of the numbers."""


def pack(root: Path, out: Path) -> tuple[int, int]:
    """Write the finished runs below `root`, and their plans, to `out`; returns their number, and that of the others."""
    if not out.name.endswith(".tar.xz"):
        raise UserError(f"{out}: the name of a packed folder ends in .tar.xz")
    found = [RunFolder(path) for path in find_runs(root)]
    ended = [folder for folder in found if _has_ended(folder)]
    if not ended:
        raise UserError(f"no finished run below {root}")
    plans = {path: path.read_bytes() for path in plan_copies(root)}
    members = {**plans, **{path: content for folder in ended for path, content in _kept(folder)}}
    buffer, top = io.BytesIO(), _place(root)
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        for path, content in sorted(members.items()):
            entry = tarfile.TarInfo(str(top / path.relative_to(root)))  # no owner and no date: same runs, same bytes
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    with disk_errors(f"writing {out}", "free some space, or choose another place"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, buffer.getvalue())
    return len(ended), len(found) - len(ended)


def _place(root: Path) -> Path:
    """Where unpacking puts the runs: where they lie as seen from here, or a folder of their name."""
    full, here = root.resolve(), Path.cwd()
    return full.relative_to(here) if full.is_relative_to(here) and full != here else Path(full.name)


def _has_ended(folder: RunFolder) -> bool:
    """Finished, or failed for its numbers, which is a result too."""
    return folder.finished() or (folder.read_summary() or {}).get("retry") == "never"


def _kept(folder: RunFolder) -> Iterator[tuple[Path, bytes]]:
    for path in folder.records():
        content = path.read_bytes()
        if path == folder.environment:
            known = folder.read_environment()
            parts = [{**{k: part[k] for k in part if k not in WHO}, "host_id": host_id(part)} for part in known]
            content = json.dumps({"data": folder.read_data(), "parts": parts}, indent=2).encode()
        yield path, content
