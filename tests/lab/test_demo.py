from oelm.lab import demo as demo_module


def test_the_demo_ends_in_a_verdict_and_a_report(oelm, tmp_path, monkeypatch):
    """The shipped plan cut to one seed and a few steps of a smaller model."""
    text = demo_module.DEMO_PLAN.read_text()
    short = tmp_path / "short.toml"
    short.write_text(
        text.replace("max_steps = 400", "max_steps = 3\nnum_layers = 1\nseq_len = 32\nd_model = 16").replace(
            "[1, 2, 3]", "[1]"
        )
    )
    monkeypatch.setattr(demo_module, "DEMO_PLAN", short)
    result = oelm("demo", "--out", tmp_path / "demo", "--slots", 2)
    assert result.code == 0, result.err
    for words in ("baseline", "oelm_v2", "oelm_random", "(one seed)", "Threats to validity"):
        assert words in result.out
    assert "INCONCLUSIVE: not yet told from" in result.out  # one seed never decides
    page = tmp_path / "demo/report-en.html"
    assert str(page) in result.out.splitlines()[-1]
    assert "fewer than 3 seeds" in page.read_text()
    again = oelm("demo", "--out", tmp_path / "demo")
    assert "3 of 3 runs are already finished" in again.out
