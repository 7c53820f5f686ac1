import subprocess

from oelm.bench.peers import version


def test_the_version_of_a_checkout_is_its_commit_and_never_that_of_a_repository_around_it(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "first"], check=True)
    (head,) = (path for path in (tmp_path / ".git/refs/heads").iterdir())
    assert version("nanogpt", tmp_path) == head.read_text().strip()
    (tmp_path / "copy").mkdir()
    assert version("nanogpt", tmp_path / "copy") is None
    assert version("published", None) is None
