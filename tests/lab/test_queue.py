import pytest

from oelm.errors import UserError
from oelm.lab.plan import Plan, PlannedRun
from oelm.lab.queue import run_queue
from oelm.lab.status import status
from oelm.lab.verdict import as_rows, compare_arms


@pytest.fixture(scope="module")
def plan(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("queue")
    shared = dict(preset="tiny", data_path=str(data), max_steps=6, val_interval=3, device="cpu")
    runs = [
        PlannedRun(f"{arm}_{seed}", {**shared, "model_type": arm, "seed": seed, "out_dir": str(out / f"{arm}_{seed}")})
        for arm in ("baseline", "oelm_v2")
        for seed in (1, 2, 3)
    ]
    return Plan(runs)


@pytest.fixture(scope="module")
def finished(plan):
    assert {status(run.config).state for run in plan.runs} == {"waiting"}
    assert run_queue(plan, slots=2) == {}
    return plan


def test_every_run_is_finished_once_and_then_skipped(finished):
    assert {status(run.config).state for run in finished.runs} == {"finished"}
    before = [(run.config.folder / "summary.json").stat().st_mtime_ns for run in finished.runs]
    run_queue(finished, slots=2)
    assert [(run.config.folder / "summary.json").stat().st_mtime_ns for run in finished.runs] == before


def test_the_table_compares_pairs(finished):
    baseline, frozen = compare_arms(finished)
    assert (baseline.arm, baseline.gap, baseline.step_time_ratio, baseline.frozen_share) == ("baseline", None, 1.0, 0)
    assert frozen.gap.n == 3
    assert frozen.frozen_share == pytest.approx(4096 / 26144)
    assert frozen.gap.ratio == pytest.approx(frozen.perplexity / baseline.perplexity)
    headings, rows = as_rows([baseline, frozen])
    assert len(rows) == 2
    assert all(len(row) == len(headings) for row in rows)


def test_unlike_runs_are_not_compared(finished, data, tmp_path):
    odd = PlannedRun("odd", {**finished.runs[0].settings, "max_steps": 4, "seed": 9, "out_dir": str(tmp_path / "odd")})
    assert run_queue(Plan([odd]), slots=1) == {}
    with pytest.raises(UserError, match="cannot be compared"):
        compare_arms(Plan([*finished.runs, odd]))


def test_one_failure_is_reported_and_stops_no_other(plan, data, tmp_path):
    bad = PlannedRun("bad", {**plan.runs[0].settings, "data_path": "nothere", "out_dir": str(tmp_path / "bad")})
    good = PlannedRun("good", {**plan.runs[0].settings, "out_dir": str(tmp_path / "good")})
    failures = run_queue(Plan([bad, good]), slots=1)
    assert list(failures) == ["bad"]
    assert "no such data folder: nothere" in failures["bad"]
    assert status(good.config).state == "finished"


def test_comparing_without_a_baseline_is_refused(tmp_path, plan):
    missing = PlannedRun("x", {**plan.runs[0].settings, "out_dir": str(tmp_path / "x")})
    with pytest.raises(UserError, match="no finished run of the baseline"):
        compare_arms(Plan([missing]))
