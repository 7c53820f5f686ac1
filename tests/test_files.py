import errno
import threading

import pytest

from oelm.errors import UserError
from oelm.files import disk_errors, is_locked, lock_file, without_links, write_atomic


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


def test_looking_whether_a_lock_is_held_never_refuses_it(tmp_path):
    """Those who look hold it for a moment, four of them all the time; two hundred starts get it nevertheless."""
    path, done = tmp_path / "lock", threading.Event()
    path.touch()

    def look():
        while not done.is_set():
            is_locked(path)

    lookers = [threading.Thread(target=look) for _ in range(4)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(200):
            with lock_file(path, "in use"):
                pass
    finally:
        done.set()
        for looker in lookers:
            looker.join()


def test_a_place_that_cannot_be_is_not_held(tmp_path):
    (tmp_path / "file").touch()
    assert not is_locked(tmp_path / "file" / "run.lock")
    assert not is_locked(tmp_path / ("x" * 300))


def test_what_is_reached_through_a_link_counts_once(tmp_path):
    (tmp_path / "real" / "run").mkdir(parents=True)
    (tmp_path / "alias").symlink_to("real")
    found = [tmp_path / "alias" / "run", tmp_path / "real" / "run"]
    assert without_links(tmp_path, found) == [tmp_path / "real" / "run"]
    assert without_links(tmp_path / "alias", [tmp_path / "alias" / "run"]) == [tmp_path / "alias" / "run"]
