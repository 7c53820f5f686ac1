"""Files that are written whole or not at all."""

import errno
import fcntl
import hashlib
import io
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from oelm.errors import UserError

LOOKERS = 50
"""How often a lock is tried for before it counts as held."""


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace `path` so that a reader, or a crash, sees the old content or the new, never a part."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None if there is no file, or no object in it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def write_array(path: Path, array: Any) -> None:
    """A numpy array, without pickle."""
    import numpy as np

    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    write_atomic(path, content.getvalue())


def without_links(root: Path, paths: list[Path]) -> list[Path]:
    """Each of what lies below `root` once: what is reached through a link as well is not there twice."""
    base = root.resolve()
    real = {path.resolve(): path for path in paths}
    real |= {path.resolve(): path for path in paths if path.resolve() == base / path.relative_to(root)}
    return [path for path in paths if real[path.resolve()] == path]


def fsync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def disk_errors(doing: str, advice: str) -> Iterator[None]:
    """Turn a full disk, a quota or missing rights into one line instead of a traceback."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(f"disk full while {doing}: {advice}") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"no right to write while {doing} ({error.filename}): {advice}") from error
        raise


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of `path`."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False


def _lock(file: IO[str]) -> None:
    """Take an exclusive lock; somebody who only looks whether it is taken holds it for a moment."""
    for attempt in range(LOOKERS + 1):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt == LOOKERS:
                raise
            time.sleep(random.uniform(0.001, 0.01))


@contextmanager
def lock_file(path: Path, refusal: str, note: str = "", remove: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on `path` while inside; `refusal` is the error if another process holds it.

    The kernel drops the lock with the process, however it dies: there are no stale locks. `note` is
    written into the file for people and for `oelm status`. `remove` leaves no file behind.
    """
    with open(path, "a+") as file:
        try:
            _lock(file)
            if os.fstat(file.fileno()).st_ino != os.stat(path).st_ino:  # removed by its last holder meanwhile
                raise BlockingIOError
        except OSError:
            file.seek(0)
            holder = file.read(200).strip()
            raise UserError(f"{refusal}{f' ({holder})' if holder else ''}") from None
        file.seek(0)
        file.truncate()
        file.write(note)
        file.flush()
        try:
            yield
        finally:
            if remove:
                path.unlink(missing_ok=True)
