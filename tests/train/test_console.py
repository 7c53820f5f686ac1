import io

from rich.console import Console

from oelm.train import console
from oelm.train.console import Reporter


def test_on_a_terminal_the_bar_says_what_is_evaluated_while_no_step_is_made(tmp_path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console.sys.stdout, "isatty", lambda: True, raising=False)
    reporter = Reporter(tmp_path / "training.log")
    reporter._console = Console(file=screen, force_terminal=True, width=120)
    with reporter.bar(20, 0):
        reporter.advance(7, "loss 3.2")
        reporter._progress.refresh()
        reporter.waits_for("evaluating the val split …")
        reporter._progress.refresh()
    reporter.close()
    before, found, after = screen.getvalue().rpartition("evaluating the val split …")
    assert found
    assert "loss 3.2" in before
    assert "loss 3.2" not in after


def test_off_a_terminal_there_is_no_bar_to_say_it(tmp_path, capsys):
    reporter = Reporter(tmp_path / "training.log")
    with reporter.bar(20, 0):
        reporter.waits_for("evaluating the val split …")
    reporter.close()
    assert capsys.readouterr().out == ""
