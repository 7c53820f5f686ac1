from oelm.lab.compare import chart
from tests.lab.test_status import make_run


def test_two_runs_side_by_side_show_their_gap_and_a_chart(oelm, tmp_path):
    make_run(tmp_path, "one")
    make_run(tmp_path, "two", "oelm_v2", offset=0.1)
    shown = oelm("compare", tmp_path / "one", tmp_path / "two").out
    assert "+10.5 %" in shown
    assert "o one" in shown
    refused = oelm("compare", tmp_path)
    assert (refused.code, len(refused.err.strip().splitlines())) == (2, 1)


def test_a_chart_puts_high_above_low():
    lines = chart({"a": {0: 100.0, 10: 1.0}}, "{:.2f}".format, width=11, height=3).splitlines()
    assert lines[0].endswith("┤o          ")
    assert lines[2].endswith("┤          o")
