from oelm.lab import demo as demo_module


def test_the_demo_ends_in_a_table_with_verdicts(oelm, tmp_path, monkeypatch):
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
    for words in ("baseline", "oelm_v2", "oelm_random", "95 %", "step time", "frozen", "verdict"):
        assert words in result.out
    written = (tmp_path / "demo/summary.md").read_text()
    assert written.count("\n| ") >= 3
    assert written.count("INCONCLUSIVE") >= 2  # one seed never decides
    assert "(one seed: no interval)" in written
    again = oelm("demo", "--out", tmp_path / "demo")
    assert "3 of 3 runs are already finished" in again.out
