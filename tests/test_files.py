import errno

import pytest

from oelm.errors import UserError
from oelm.files import disk_errors, lock_file, write_atomic


def test_a_failed_write_leaves_the_old_content_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="disk full while testing"), disk_errors("testing", "free some"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_lock_has_one_holder_and_names_it(tmp_path):
    with lock_file(tmp_path / "lock", "in use", "pid 7"):  # noqa: SIM117
        with pytest.raises(UserError, match=r"in use \(pid 7\)"), lock_file(tmp_path / "lock", "in use"):
            pass
    with lock_file(tmp_path / "lock", "in use"):
        pass
