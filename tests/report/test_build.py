"""Every number of a report on run folders made by hand, with the arithmetic here."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from oelm.lab.plan import load_plan
from oelm.report.build import write_report
from tests.lab.made_runs import make_arm, make_run

BASE = {1: math.log(10.0), 2: math.log(20.0), 3: math.log(40.0)}  # geometric mean 20


def times(factor, noise=(1.0, 1.0, 1.0)):
    return {seed: loss + math.log(factor * n) for (seed, loss), n in zip(BASE.items(), noise, strict=True)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Four arms with three seeds each; for tests that only read it."""
    tmp_path = tmp_path_factory.mktemp("study")
    rows = np.column_stack((np.full(50, 200.0), np.full(50, 100.0)))
    make_arm(tmp_path, "baseline", BASE, documents=rows, step_seconds=0.100)
    make_arm(tmp_path, "oelm_v2", times(1.10, (1.0, 1.01, 1 / 1.01)), documents=rows + np.array([1.0, 0.0]),
             step_seconds=0.095)  # fmt: skip
    make_arm(tmp_path, "oelm_random", times(1.20), step_seconds=0.095)
    make_arm(tmp_path, "oelm_matched", times(1.15), step_seconds=0.095)
    return tmp_path


@pytest.fixture
def study(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "study"))


@pytest.fixture(scope="module")
def text(made, tmp_path_factory):
    return read(made, out=tmp_path_factory.mktemp("report"))


def tables(text):
    """The tables of a Markdown report: lists of rows of cells."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", text, re.M)
    return [
        [[c.strip().replace("\\", "") for c in row.strip("|\n").split(" | ")] for row in b.splitlines()] for b in blocks
    ]


def read(root, language="en", **options):
    (path,) = write_report(root, language, ["md"], **options)
    return path.read_text()


def find(text, heading):
    return next(t for t in tables(text) if heading in t[0])


def test_results_by_hand(text):
    rows = {row[0]: row for row in find(text, "by seed")[2:]}
    assert rows["baseline"][1:] == ["0.001", "20.000", "1: 10.000, 2: 20.000, 3: 40.000", f"{math.log(20):.3f}", ""]
    assert rows["oelm_v2"][2:4] == ["22.000", "1: 11.000, 2: 22.220, 3: 43.564"]
    # differences ln 1.1 + (0, ln 1.01, -ln 1.01): sd = ln 1.01, reach = 2.919986 ln 1.01 / sqrt(3)
    reach = 2.919986 * math.log(1.01) / math.sqrt(3)
    low, high = (100 * (1.10 * math.exp(sign * reach) - 1) for sign in (-1, 1))
    gaps = {row[0]: row for row in find(text, "seeds to decide, in all")[2:]}
    assert gaps["oelm_v2"][1] == f"+10.0 [{low:+.1f}, {high:+.1f}]"
    assert rows["oelm_v2"][5] == "1: +10.0, 2: +11.1, 3: +8.9"
    assert gaps["oelm_v2"][3:6] == ["baseline", "FAIL", "–"]
    assert gaps["oelm_v2"][6] == "[+1.0, +1.0]"  # every document is 1 nat in 100 tokens worse: e^0.01
    assert gaps["oelm_random"][1] == "+20.0 [+20.0, +20.0]"


def test_the_way_there_by_hand(text):
    """Losses fall linearly from 1 above: at 10 % of the run PPL is e^0.9 times the final one; gaps stay."""
    rows = {row[0]: row for row in find(text, "10 %")[2:]}
    assert rows["baseline"][1:] == [f"{20 * math.exp(1 - s):.3f}" for s in (0.1, 0.3, 0.6, 1.0)]
    assert rows["oelm_random"][4] == "24.000 (+20.0)"


def test_runs_with_few_validations_are_compared_where_these_were(study):
    for metrics in study.glob("*/metrics.jsonl"):
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        kept = [record for record in records if record["kind"] != "val" or record["step"] in (10, 20)]
        metrics.write_text("".join(json.dumps(record) + "\n" for record in kept))
    heading, _, baseline, *_ = find(read(study), "50 %")
    assert heading == ["arm", "50 %", "100 %"]
    assert baseline == ["baseline", f"{20 * math.exp(0.5):.3f}", "20.000"]


def test_ablation_by_hand(text):
    rows = {row[1]: row[2] for row in find(text, "from → to")[2:]}
    assert rows["baseline → oelm_random"].startswith("+20.0 ")
    assert rows["oelm_random → oelm_matched"].startswith(f"−{100 * (1 - 1.15 / 1.20):.1f} ")
    assert rows["oelm_matched → oelm_v2"].startswith(f"−{100 * (1 - 1.10 / 1.15):.1f} ")


def test_efficiency_by_hand(text):
    """The bound of the tiny shape: forward FLOPs per token from its shapes; Q/K weight gradients are left out."""
    d, layers, d_ff, vocab, seq = 32, 2, 64, 257, 32
    qk = layers * 2 * d * d
    forward = 2 * (qk + layers * (2 * d * d + 2 * d * d_ff + 2 * d * seq) + d * vocab)
    bound = (3 * forward - 2 * qk) / (3 * forward)
    rows = {row[0]: row for row in find(text, "bound")[2:]}
    assert rows["oelm_v2"][1:] == ["800", "20.0%", "95.0", "0.95 [0.95, 0.95]", f"{bound:.3f}", "300", "12.0"]
    assert rows["baseline"][4:6] == ["1", "1.000"]


def test_learning_rates_by_hand(tmp_path):
    for lr, ppl in ((1e-3, 30.0), (2e-3, 20.0), (4e-3, 25.0)):
        for arm in ("baseline", "oelm_v2"):
            make_run(tmp_path, f"{arm}{lr}", arm, lr=lr, val=math.log(ppl))
    rows = find(read(tmp_path), "0.004")
    assert rows[2] == ["baseline", "30.000", "20.000", "25.000"]


def test_several_data_sets_are_set_side_by_side(tmp_path):
    for dataset, factor in (("one", 1.1), ("two", 1.3)):
        make_arm(tmp_path / dataset, "baseline", BASE, dataset=dataset, epochs=2.5 if dataset == "two" else 0.5)
        make_arm(tmp_path / dataset, "oelm_v2", times(factor), dataset=dataset)
    rows = find(read(tmp_path), "epochs")
    assert [row[0] for row in rows[2:]] == ["one", "two"]
    assert [row[1:3] for row in rows[2:]] == [["test", "3"]] * 2
    assert [row[4] for row in rows[2:]] == ["0.50", "2.50"]
    assert [row[5][:5] for row in rows[2:]] == ["+10.0", "+30.0"]


def test_across_settings_plain_and_fair_gaps_have_their_own_tables(tmp_path):
    for dataset in ("one", "two"):
        make_arm(tmp_path / dataset, "baseline", BASE, dataset=dataset)
        make_arm(tmp_path / dataset, "orthogonal", times(0.9), dataset=dataset)
        make_arm(tmp_path / dataset, "oelm_v2", times(1.1), dataset=dataset)
    plain, fair = (table for table in tables(read(tmp_path)) if "epochs" in table[0] and "oelm_v2" in table[0])
    column = plain[0].index("oelm_v2")
    assert plain[2][column].startswith("+10.0")
    assert fair[2][column].startswith("+22.2")  # 1.1 / 0.9


def test_the_verdict_stands_first_in_both_languages(made, text, tmp_path):
    assert "FAIL: every arm with frozen Q/K is worse than its fair baseline by more than 5 %" in text[:700]
    assert "- oelm\\_random: +20.0 % \\[+20.0, +20.0\\] against baseline: FAIL" in text[:700]
    assert "未通过（FAIL）" in read(made, "zh", out=tmp_path)[:400]


def test_an_unfinished_plan_gives_an_interim_report(tmp_path):
    plan = tmp_path / "p.toml"
    plan.write_text(
        '[defaults]\npreset = "tiny"\nmax_steps = 20\nmax_lr = 1e-3\n[matrix]\nmodel_type = ["baseline", "oelm_v2"]\n'
        "seed = [1, 2]\n"
    )
    out = tmp_path / "out"
    load_plan(plan, out).leave_copy()
    make_run(out, "baseline_seed1", test=2.0)
    make_run(out, "oelm_v2_seed1", "oelm_v2", test=2.1, state="died")
    text = read(out)
    assert "INTERIM REPORT. 1 of 4 runs have ended" in text
    rows = {row[0]: row for row in find(text, "gap at equal step")[2:]}
    assert rows["oelm_v2_seed1"][2:4] == ["died", "10 / 20"]
    assert rows["oelm_v2_seed1"][7] == f"{100 * math.expm1(0.1):+.1f} %"  # both at step 10
    assert rows["baseline_seed2"][2] == "waiting"
    for run, arm in (("baseline_seed2", "baseline"), ("oelm_v2_seed2", "oelm_v2")):
        make_run(out, run, arm, 2)
    shutil.rmtree(out / "oelm_v2_seed1")
    make_run(out, "oelm_v2_seed1", "oelm_v2")
    assert "INTERIM" not in read(out)


def test_a_choice_without_a_survivor_is_not_waited_for_and_other_runs_hide_no_missing_ones(tmp_path):
    plan = tmp_path / "p.toml"
    plan.write_text(
        '[defaults]\npreset = "tiny"\nmax_steps = 20\n[matrix]\nmodel_type = ["baseline", "oelm_v2"]\n'
        "max_lr = [1e-3]\nseed = [1, 2]\n[select]\nseed = 1\n"
    )
    out = tmp_path / "out"
    load_plan(plan, out).leave_copy()
    make_run(out, "baseline_lr0.001_seed1")
    make_run(out, "by_the_way", "oelm_random")  # not of the plan
    assert "INTERIM REPORT. 2 of 5 runs have ended" in read(out)
    make_run(out, "baseline_lr0.001_seed2", seed=2)
    make_run(out, "oelm_v2_lr0.001_seed1", "oelm_v2", state="failed", reason="the gradient norm is nan")
    assert "INTERIM" not in read(out)


def test_different_seeds_diverging_at_different_rates_leave_a_report(tmp_path):
    make_run(tmp_path, "b1")
    make_run(tmp_path, "b2", seed=2)
    for lr, lost in ((1e-3, 1), (2e-3, 2)):
        for seed in (1, 2):
            end = dict(state="failed", reason="the gradient norm is nan") if seed == lost else {}
            make_run(tmp_path, f"v{lr}{seed}", "oelm_v2", seed, lr, **end)
    assert "diverged" in read(tmp_path)


def test_a_headline_over_arms_that_diverged_says_so(tmp_path):
    for seed in (1, 2, 3):
        make_run(tmp_path, f"b{seed}", seed=seed)
        make_run(tmp_path, f"v{seed}", "oelm_v2", seed, state="failed", reason="the gradient norm is nan")
    assert "FAIL: every arm with frozen Q/K diverged, or is worse" in read(tmp_path)


def test_the_command_has_the_criterion_and_the_baseline_that_were_asked_for(made, tmp_path):
    text = read(made, out=tmp_path, criterion=1.2, baseline="oelm_random")
    assert f"oelm report outputs/{made.name} --lang en --baseline oelm_random --criterion 1.2\n" in text


def test_the_data_are_made_again_as_the_runs_say(tmp_path):
    make_run(tmp_path, "a", machine={"prepared": "oelm prepare x --from mine.txt"})
    make_run(tmp_path, "b", seed=2)
    text = read(tmp_path)
    assert "oelm prepare x --from mine.txt\n" in text
    assert "The usual one, where files of your own need --from" in text.partition("mine.txt\n")[2]
    assert "oelm prepare tinystories --tokenizer bytes --out data/tinystories\n" in text


def test_what_freezes_in_the_middle_of_a_run_is_shown_from_the_least_to_the_most(tmp_path):
    make_run(tmp_path, "a")
    file = make_run(tmp_path, "b", "oelm_v2", freeze="qk:from0.5") / "summary.json"
    file.write_text(file.read_text().replace('"total_parameters": 1000', '"total_parameters": 26144'))
    assert "| 0.0% – 15.7% |" in read(tmp_path)  # tiny: 2 layers x 2 matrices x 32² of 26,144


def test_runs_below_the_working_folder_are_named_by_their_own_place(tmp_path, monkeypatch):
    make_run(tmp_path / "outputs" / "confirm" / "stories", "a")
    monkeypatch.chdir(tmp_path)
    assert "oelm report outputs/confirm/stories --lang en\n" in read(tmp_path / "outputs" / "confirm" / "stories")


def test_it_prints_the_commands_that_make_it_again(tmp_path):
    for seed, name in enumerate(("first", "second"), 1):
        plan = tmp_path / f"{name}.toml"
        plan.write_text(f'out = "x"\n[matrix]\nmodel_type = ["baseline"]\nseed = [{seed}]\n')
        load_plan(plan, tmp_path / "study" / name).leave_copy()
        make_run(tmp_path / "study" / name, f"baseline_seed{seed}", "baseline", seed)
    text = read(tmp_path / "study")
    assert "oelm run first.toml --out outputs/study/first\n" in text
    assert "oelm run second.toml --out outputs/study/second\n" in text
    assert "oelm report outputs/study --lang en\n" in text
    assert str(tmp_path) not in text


def test_the_table_of_arms_tells_what_is_frozen_and_what_was_added(tmp_path):
    make_run(tmp_path, "a", "baseline", 1)
    make_run(tmp_path, "b", "oelm_lowest", 1)
    make_run(tmp_path, "c", "oelm_v3", 1)
    rows = {row[0]: row for row in find(read(tmp_path), "Q/K start")}
    assert rows["oelm_lowest"][3] == "qk@1-"
    assert (rows["baseline"][3], rows["oelm_v3"][3]) == ("no", "Q/K")
    assert all(extra in rows["oelm_v3"][1] for extra in ("key_shift 1.0", "rope half", "core True"))


def test_update_appends_a_dated_entry(tmp_path, oelm):
    make_run(tmp_path, "GPT-01", test=2.0)
    for _ in range(2):
        result = oelm("report", tmp_path, "--update", "--lang", "zh")
        assert result.code == 0
    text = (tmp_path / "status-log.md").read_text()
    assert len(re.findall(r"^## 20\d\d-\d\d-\d\d \d\d:\d\d 进度$", text, re.M)) == 2
    assert "GPT-01（baseline）：已完成，第 20 / 20 步" in text


def test_published_figures_stand_beside_the_runs_of_their_id(tmp_path):
    shape = dict(steps=100_000, step_seconds=0.1)
    make_run(tmp_path / "deep", "GPT-01_baseline", val=math.log(5.0), lr=3e-4, **shape)
    make_run(tmp_path / "deep", "GPT-02_oelm_freeze", "oelm_v2", lr=2e-3, val=math.log(6.0))
    rows = {row[0]: row for row in find(read(tmp_path, published=True), "published PPL")[2:]}
    assert rows["GPT-01"][5:] == ["4.2692", "–", "–", "5.000"]
    assert rows["GPT-02"][5:] == ["4.6857", "+9.8 %", "INCONCLUSIVE", "6.000 (max_lr 0.002, steps 20)"]
    assert rows["GPT-05"][5:] == ["54.2900", "+14.9 %", "INCONCLUSIVE", "not run here"]
    assert "published PPL" not in read(tmp_path)


def test_classifiers_stand_beside_the_published_accuracies(tmp_path):
    answers = np.array([[0, 0], [1, 1], [2, 2], [2, 1]])
    make_run(tmp_path, "XNLI-01_baseline", lr=2e-5, answers=answers, dataset="xnli")
    make_run(tmp_path, "XNLI-02_oelm_v2", "oelm_v2", lr=1e-4, answers=answers)
    text = read(tmp_path, published=True)
    rows = {row[0]: row for row in find(text, "published accuracy")[2:]}
    assert rows["XNLI-01"][5:] == ["76.71 %", "–", "–", "75.00 % (arm baseline, steps 20)"]  # theirs was damaged
    assert rows["XNLI-02"][5:8] == ["77.79 %", "+1.1 points", "INCONCLUSIVE"]
    assert "GPT-01" not in rows
    assert "--lang en --against published" in text


def test_cut_off_metrics_and_nan_runs_are_shown_as_what_they_are(study):
    with open(study / "oelm_v2_lr0.001_seed1" / "metrics.jsonl", "a") as file:
        file.write('{"kind": "val", "step": 2')
    reason = "loss nan, gradient norm nan at step 11"
    make_run(study, "hot", "oelm_v2", 1, 1.0, state="failed", reason=reason)
    text = read(study)
    assert f"hot did not finish ({reason})" in text
    assert "∞" in text
    assert "+10.0 \\[" in text


@pytest.mark.parametrize("arguments", [("--format", "docx"), ("--lang", "fr")])
def test_bad_options_are_one_line(study, oelm, arguments):
    result = oelm("report", study, *arguments)
    assert result.code == 2
    assert len(result.err.strip().splitlines()) == 1
    assert not list(study.glob("report-*"))


def test_a_missing_baseline_is_said_in_the_report(tmp_path):
    make_run(tmp_path, "a", "oelm_v2")
    text = read(tmp_path)
    assert "Nothing to judge yet" in text
    assert "no finished run of the baseline arm" in text


def test_pdf_and_html_are_whole(study):
    html, pdf = write_report(study, "en", ["html", "pdf"])
    assert pdf.read_bytes().startswith(b"%PDF-")
    page = html.read_text()
    assert page.rstrip().endswith("</html>")
    assert "http:" not in page.replace("http://www.w3.org", "")
    assert html.stat().st_size < 500_000


def test_the_numbers_can_be_had_as_json(made, tmp_path):
    (path,) = write_report(made, "en", ["json"], tmp_path)
    found = json.loads(path.read_text())
    assert found["overall"] == "FAIL"
    run = next(run for run in found["runs"] if run["id"] == "oelm_v2_lr0.001_seed1")
    assert run["summary"]["test_loss"] == pytest.approx(math.log(11.0))
    assert run["val_loss"][-1] == [20, pytest.approx(math.log(11.0))]
    assert run["config"]["frames"] == "orthogonal"
    assert "out_dir" not in run["config"]
