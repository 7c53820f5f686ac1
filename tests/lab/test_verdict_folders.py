"""What a folder of runs may hold: damaged files, copies, links, odd losses, several plans."""

import json
import subprocess
import sys

import pytest

from tests.lab.made_runs import make_arm, make_run
from tests.lab.test_verdict import BASE, judge, shifted, spoilt


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("test_documents.npy", b""),
        ("metrics.jsonl", b""),
        ("metrics.jsonl", b'{"kind": ["val"], "step": 20, "loss": 1.0, "seconds": 1}\n'),
        ("metrics.jsonl", b'{"kind": "val", "step": 20, "loss": 1e400, "seconds": "x"}\n'),
        ("summary.json", b'{"state": "finished"}'),
        ("summary.json", b"\xff\xfe"),
        ("config.toml", b""),
        ("config.toml", b"x = ["),
        ("environment.json", b"[]"),
        ("sample.json", b'{"prompt": [99999999], "sample": [-1]}'),
    ],
)
def test_a_damaged_file_stops_neither_verdict_nor_report_and_is_named(tmp_path, oelm, file, content):
    make_arm(tmp_path, "baseline", {**BASE, 4: 2.0})
    make_arm(tmp_path, "oelm_v2", {**shifted(0.0), 4: 2.0})
    (tmp_path / "oelm_v2_lr0.001_seed4" / file).write_bytes(content)
    verdict, report = oelm("verdict", tmp_path), oelm("report", tmp_path, "--format", "md")
    assert (verdict.code, verdict.err, report.code, report.err) == (0, "", 0, "")
    harmless = file in ("test_documents.npy", "environment.json", "sample.json")
    assert harmless or "oelm_v2_lr0.001_seed4" in verdict.out


@pytest.mark.parametrize("key", ["test_loss", "final_val_loss"])
@pytest.mark.parametrize("value", ["4.1", float("nan"), float("inf")])
def test_losses_that_are_no_numbers_are_no_results(tmp_path, oelm, key, value):
    make_arm(tmp_path, "baseline", {**BASE, 4: 2.0})
    make_arm(tmp_path, "oelm_v2", {**shifted(0.0), 4: 2.0})
    spoilt(tmp_path, "oelm_v2_lr0.001_seed4", **{key: value})
    result = oelm("verdict", tmp_path, "--json")
    assert result.code == 0
    found = json.loads(result.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["settings"][0]["arms"]["oelm_v2"]["seeds"] == [1, 2, 3]


def test_a_copied_run_with_another_seed_in_its_config_is_not_a_second_run(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "oelm_v2", shifted(0.0))
    spoilt(tmp_path, "oelm_v2_lr0.001_seed3", seed=1)
    assert list(judge(tmp_path).study.damaged) == ["oelm_v2_lr0.001_seed3"]


def test_losses_beyond_all_bounds_are_still_compared(tmp_path, oelm):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "oelm_v2", shifted(900.0))
    make_run(tmp_path, "hot", "baseline", 1, 9.0, test=1200.0)
    assert oelm("verdict", tmp_path).code == 1
    assert oelm("report", tmp_path, "--format", "md").code == 0


def test_arms_without_a_common_seed_still_give_a_report(tmp_path, oelm):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "oelm_v2", {1: 2.0})
    make_arm(tmp_path, "oelm_random", {2: 2.0})
    assert oelm("report", tmp_path, "--format", "md").code == 0


def test_a_second_copy_of_a_plan_plans_nothing_new_and_plans_must_agree(tmp_path, oelm):
    plan = (
        '[defaults]\npreset = "tiny"\nmax_steps = 20\nmax_lr = 1e-3\n'
        '[matrix]\nmodel_type = ["baseline", "oelm_v2"]\nseed = [1, 2, 3]\n'
    )
    for name in ("p", "q"):
        (tmp_path / f"{name}.plan.toml").write_text(plan)
    for seed, loss in BASE.items():
        make_run(tmp_path, f"baseline_seed{seed}", "baseline", seed, test=loss)
        make_run(tmp_path, f"oelm_v2_seed{seed}", "oelm_v2", seed, test=loss)
    assert "INTERIM" not in oelm("verdict", tmp_path).out
    (tmp_path / "q.plan.toml").write_text(plan + "[verdict]\ncriterion = 1.05\n")
    assert oelm("verdict", tmp_path).code == 0  # the one that says nothing means the usual criterion
    (tmp_path / "q.plan.toml").write_text(plan + "[verdict]\ncriterion = 1.2\n")
    result = oelm("verdict", tmp_path)
    assert (result.code, "give --criterion" in result.err) == (2, True)
    assert oelm("verdict", tmp_path, "--criterion", 1.1).code == 0


def test_a_link_to_a_run_is_no_second_run(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "oelm_v2", shifted(0.0))
    (tmp_path / "latest").symlink_to(tmp_path / "oelm_v2_lr0.001_seed1")
    assert judge(tmp_path).overall == "PASS"


def test_a_reader_that_leaves_early_is_not_told_fail(tmp_path):
    make_arm(tmp_path, "baseline", BASE)
    make_arm(tmp_path, "oelm_v2", shifted(0.0))
    command = [sys.executable, "-m", "oelm", "verdict", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.wait(60) == 141
    process.stderr.close()
