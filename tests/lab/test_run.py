"""`oelm run --dry_run`: what a plan will cost, and what it lacks."""

import pytest
from rich.console import Console

from tests.lab.made_runs import make_run

PLAN = """
[defaults]
preset = "tiny"
max_steps = 20
data_path = "{data}"
[matrix]
model_type = ["baseline", "oelm_v2"]
max_lr = 1e-3
seed = 1
"""


@pytest.fixture
def dry(data, tmp_path, oelm, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setattr("oelm.lab.run._matmul_flops", lambda: 2e6)
    plan = tmp_path / "plan.toml"

    def call(place=data):
        plan.write_text(PLAN.format(data=place))
        result = oelm("run", plan, "--out", tmp_path / "out", "--dry_run")
        assert result.code == 0, result.err
        return result.out

    return call


def row(text, start):
    return next(line for line in text.splitlines() if line.startswith(start)).split()


def test_a_dry_run_tells_parameters_and_time_by_arithmetic(dry):
    """26,144 parameters of tiny, of which 2 x 2 x 32² are Q/K; half of 2 MFLOP/s for the FLOPs of the row."""
    text = dry()
    assert row(text, "oelm_v2_lr0.001_seed1")[7:9] == ["26,144", "22,048"]
    *_, flops, amount, unit, _, _ = row(text, "baseline_lr0.001_seed1")
    assert (round(float(flops) / 1e6 / 60), "min") == (int(amount), unit)
    assert "2 runs, " in text


def test_on_a_narrow_terminal_rate_time_and_disk_are_whole(dry, monkeypatch):
    monkeypatch.setattr("oelm.lab.run.make_console", lambda: Console(width=80))
    text = dry()
    assert "…" not in text
    assert {"trainable", "FLOPs"}.isdisjoint(row(text, "run"))
    assert {"run", "lr", "time", "disk"} < set(row(text, "run"))
    assert max(map(len, text.splitlines())) <= 80
    assert "0.001" in row(text, "oelm_v2_lr0.001_seed1")


def test_what_is_finished_costs_nothing_more(dry, tmp_path):
    both = dry().splitlines()[-1]
    make_run(tmp_path / "out", "baseline_lr0.001_seed1")
    text = dry()
    assert "finished" in row(text, "baseline_lr0.001_seed1")
    assert "1 of them finished" in text
    assert both != text.splitlines()[-1]
    make_run(tmp_path / "out", "oelm_v2_lr0.001_seed1", "oelm_v2")
    assert dry().splitlines()[-1] == "2 runs, all finished"


def test_data_that_are_missing_are_named_with_their_command(dry, tmp_path):
    assert f"missing data; first: oelm prepare tinystories --tokenizer bytes --out {tmp_path}/none" in dry(
        tmp_path / "none"
    )
