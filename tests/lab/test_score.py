"""Classifiers are judged by accuracy, in points, with the same tests as language models by perplexity."""

import json
import math
import shutil

import numpy as np
import pytest
from scipy.stats import binomtest

from oelm import encoders
from oelm.config import resolve
from oelm.errors import UserError
from oelm.lab.announce import as_json, sentence
from oelm.lab.plan import load_plan
from oelm.lab.score import ACCURACY, PERPLEXITY
from oelm.lab.stats import accuracy_bounds, answers_bootstrap, mcnemar
from oelm.lab.study import load_study
from oelm.lab.verdict import reach_verdict, steps_of
from oelm.report.answers import confusion
from tests.lab.made_runs import DATA, make_run

OTHERS = {"oelm_random": (2_100, 2_130, 2_070), "oelm_matched": (2_100, 2_130, 2_070)}
LABELS = np.repeat([0, 1, 2], 1_000)
NLI = {**DATA, "labels": ["entailment", "neutral", "contradiction"], "examples": {"train": 9, "val": 9, "test": 3_000}}


def answers(correct: int) -> np.ndarray:
    """Of 3,000 examples, spread over the classes, the first `correct` are right."""
    told = LABELS.copy()
    wrong = np.argsort(np.arange(3_000) % 1_000, kind="stable")[correct:]
    told[wrong] = (told[wrong] + 1) % 3
    return np.stack([LABELS, told], 1)


def make_arms(root, **arms):
    for arm, corrects in arms.items():
        for seed, correct in enumerate(corrects, 1):
            make_run(root, f"{arm}_{seed}", arm, seed, answers=answers(correct), data=NLI)


def test_an_arm_passes_when_it_is_less_than_a_point_worse(tmp_path):
    # The baseline is right in 70 %; differences of 3 in 3,000 are a tenth of a point.
    make_arms(tmp_path, baseline=(2_100, 2_103, 2_097), oelm_v2=(2_094, 2_100, 2_088),
              oelm_random=(1_950, 1_953, 1_950))  # fmt: skip
    found = reach_verdict(load_study(tmp_path))
    assert found.arms == {"oelm_v2": "PASS", "oelm_random": "FAIL"}
    gap = found.settings[0].judgements["oelm_v2"].plain
    assert gap.mean == pytest.approx((6 + 3 + 9) / 3 / 30)  # points of error
    told = as_json(found)["settings"][0]["arms"]
    assert told["baseline"]["accuracy"] == pytest.approx(70.0)
    assert told["oelm_v2"]["plain"]["points"] == pytest.approx(-0.2)
    assert told["oelm_v2"]["plain"]["bounds"] == sorted(told["oelm_v2"]["plain"]["bounds"])
    assert "less than 1 point of accuracy below its fair baseline: oelm_v2" in sentence(found)


def test_the_learning_rate_of_a_classifier_is_chosen_by_accuracy(tmp_path):
    make_run(tmp_path, "a", lr=1e-3, answers=answers(2_000), val=0.5, data=NLI)
    make_run(tmp_path, "b", lr=2e-3, answers=answers(2_100), val=0.9, data=NLI)  # a worse loss, a better accuracy
    assert load_study(tmp_path).settings[0].arms["baseline"].rate == 2e-3


def test_classifiers_and_language_models_are_not_judged_together(tmp_path):
    make_run(tmp_path, "a", answers=answers(2_000), data=NLI)
    make_run(tmp_path, "b")
    with pytest.raises(UserError, match="language models and classifiers"):
        load_study(tmp_path)


def test_mcnemar_counts_where_only_one_is_right():
    labels = np.zeros(100, dtype=np.int64)
    mine, other = labels.copy(), labels.copy()
    mine[:4], other[2:14] = 1, 1  # 2 only the other, 10 only mine, 2 neither
    found = mcnemar(np.stack([labels, mine], 1), np.stack([labels, other], 1))
    assert found == (10, 2, pytest.approx(binomtest(10, 12).pvalue))
    assert mcnemar(np.stack([labels, mine], 1), np.stack([labels, mine], 1)) == (0, 0, 1.0)


def test_bounds_of_a_share_are_wilsons():
    z, p, n = 1.6448536269514722, 0.7, 3_000
    centre, reach = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = accuracy_bounds(2_100, n)
    assert (low, high) == (
        pytest.approx((centre - reach) / (1 + z * z / n)),
        pytest.approx((centre + reach) / (1 + z * z / n)),
    )


def test_evaluation_noise_is_that_of_the_examples():
    low, high = answers_bootstrap(answers(1_950), answers(2_100))
    # 150 of 3,000 differ: 5 points of error, with a standard error of sqrt(0.05 * 0.95 / 3000)
    assert low == pytest.approx(5 - 1.645 * 0.398, abs=0.1)
    assert high == pytest.approx(5 + 1.645 * 0.398, abs=0.1)


def test_confusion_counts_labels_by_answers():
    rows = np.array([[0, 0], [0, 1], [1, 1], [2, 0], [2, 0]])
    assert confusion(rows, 3).tolist() == [[1, 1, 0], [0, 1, 0], [2, 0, 0]]


def test_differences_are_said_as_people_say_them():
    assert PERPLEXITY.change(math.log(1.098)) == pytest.approx(9.8)
    assert ACCURACY.change(ACCURACY.from_record(0.7671) - ACCURACY.from_record(0.7779)) == pytest.approx(-1.08)
    assert ACCURACY.text(ACCURACY.from_record(0.7671)) == "76.71 %"


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", ["oelm_random is worse than baseline: −5.0 points", "McNemar", "entailment", "macro-F1", "points"]),
        ("zh", ["oelm_random 差于 baseline：−5.0 个百分点", "McNemar", "entailment", "宏平均 F1", "百分点"]),
    ],
)
def test_the_report_of_classifiers_speaks_of_accuracy(oelm, tmp_path, language, words):
    make_arms(
        tmp_path, baseline=(2_100, 2_103, 2_097), oelm_v2=(2_094, 2_109, 2_088), oelm_random=(1_950, 1_953, 1_947)
    )
    result = oelm("report", tmp_path, "--lang", language, "--format", "md,json")
    assert result.code == 0, result.err
    text = (tmp_path / f"report-{language}.md").read_text().replace("\\", "")
    assert all(word in text for word in words)
    assert not any(word in text for word in ("PPL", "perplexity", "困惑度"))
    numbers = json.loads((tmp_path / f"report-{language}.json").read_text())
    assert numbers["arms"]["oelm_random"] == "FAIL"
    status = oelm("status", tmp_path)
    assert "val acc" in status.out
    assert "70.00%" in status.out
    assert "PPL" not in status.out


def test_two_seeds_claim_nothing_and_many_arms_claim_less(oelm, tmp_path):
    """4, 5 and 3 points: t = 6.9, p = 0.020, two-sided; among three arms Holm asks for 0.0167."""
    differences = (120, 150, 90)
    arms = {"baseline": (2_100, 2_100, 2_100), "oelm_v2": tuple(2_100 - d for d in differences)}
    for name, seeds, others, told in (("two", 2, {}, False), ("one", 3, {}, True), ("many", 3, OTHERS, False)):
        make_arms(tmp_path / name, **{arm: corrects[:seeds] for arm, corrects in {**arms, **others}.items()})
        assert oelm("report", tmp_path / name, "--format", "md").code == 0
        text = (tmp_path / name / "report-en.md").read_text().replace("\\", "")
        assert ("oelm_v2 is worse than baseline" in text) is told
        assert ("Whether oelm_v2 beats baseline is not told" in text) is not told


def test_what_is_drawn_is_not_compared_with_what_is_made_of_pretrained_matrices(encoder):
    drawn, pretrained = steps_of(resolve({})), steps_of(resolve({"arch": str(encoder), "labels": 3}))
    assert drawn["orthogonality"] == ("oelm_matched", "oelm_v2")
    assert {"factor", "published_xnli"} <= pretrained.keys()
    assert not {"orthogonality", "random_to_freeze", "freeze"} & pretrained.keys()


def test_a_study_of_an_encoder_is_judged_where_the_encoder_no_longer_is(encoder, tmp_path, oelm):
    """The runs say what it was like; the steps are those of pretrained models."""
    arch = shutil.copytree(encoder, tmp_path / "encoder")
    arms, settings = ("baseline", "frozen", "oelm_v2"), dict(arch=str(arch), preset="encoder", num_epochs=0.0)
    plan = tmp_path / "plan.toml"
    plan.write_text(f'[defaults]\narch = "{arch}"\nlabels = 3\nmax_steps = 20\n[matrix]\narm = {list(arms)}\n')
    load_plan(plan, tmp_path / "runs").leave_copy()
    for arm in arms:
        folder = make_run(tmp_path / "runs", arm, arm, answers=answers(2_100), data=NLI, **settings)
        (folder / "encoder.json").write_bytes((arch / "config.json").read_bytes())
    shutil.rmtree(arch)
    encoders.settings_of.cache_clear()
    result = oelm("verdict", tmp_path / "runs")
    assert result.code == 3, result.err
    assert "baseline → frozen: +0.0" in result.out
    assert oelm("status", tmp_path / "runs").code == 0


def test_a_plan_goes_on_at_the_learning_rate_of_the_best_accuracy(tmp_path):
    text = '[matrix]\nmax_lr = [1e-3, 2e-3]\nseed = [1, 2]\n[select]\nsetting = "max_lr"\nseed = 1\n'
    path = tmp_path / "plan.toml"
    path.write_text(f'out = "{tmp_path / "out"}"\n{text}')
    (choice,) = load_plan(path).choices
    for run, loss, accuracy in zip(choice.candidates, (0.5, 0.9), (0.6, 0.7), strict=True):
        run.folder.path.mkdir(parents=True)
        summary = {"state": "finished", "final_val_loss": loss, "final_val_accuracy": accuracy}
        run.folder.summary.write_text(json.dumps(summary))
    assert choice.best().settings["max_lr"] == 2e-3


def test_answers_that_are_not_the_summarys_put_a_run_aside(tmp_path):
    make_arms(tmp_path, baseline=(2_100, 2_103, 2_097), oelm_v2=(2_094, 2_100, 2_088))
    np.save(tmp_path / "oelm_v2_2/test_answers.npy", answers(3_000))
    (tmp_path / "oelm_v2_3/test_answers.npy").unlink()
    assert set(load_study(tmp_path).damaged) == {"oelm_v2_2", "oelm_v2_3"}


def test_with_a_hundred_examples_nothing_is_decided(tmp_path):
    few = {**NLI, "examples": {"train": 9, "val": 9, "test": 100}}
    for arm in ("baseline", "oelm_v2"):  # the same answers in every seed: no spread at all
        for seed in (1, 2, 3):
            make_run(tmp_path, f"{arm}_{seed}", arm, seed, answers=answers(2_100)[::30], data=few)
    found = reach_verdict(load_study(tmp_path))
    assert found.arms == {"oelm_v2": "INCONCLUSIVE"}
    assert "few_examples" in {threat.kind for threat in found.threats}


def test_a_run_that_gives_one_answer_to_everything_is_named(tmp_path):
    rows = np.stack([LABELS, np.zeros_like(LABELS)], 1)
    for arm, seed in (("baseline", 1), ("oelm_v2", 1)):
        make_run(tmp_path, f"{arm}_{seed}", arm, seed, answers=rows if arm == "oelm_v2" else answers(2_000), data=NLI)
    (threat,) = [threat for threat in reach_verdict(load_study(tmp_path)).threats if threat.kind == "one_answer"]
    assert threat.facts["runs"] == "oelm_v2 (1)"


def test_to_be_as_good_as_a_baseline_that_learnt_nothing_is_no_pass(tmp_path):
    """One class of three makes up 80 % of the examples, and everybody always says it."""
    labels = np.repeat([0, 1, 2], [2_400, 300, 300])
    told = np.stack([labels, np.zeros(3_000, dtype=np.int64)], 1)
    for arm in ("baseline", "oelm_v2"):
        for seed in (1, 2, 3):
            make_run(tmp_path, f"{arm}_{seed}", arm, seed, answers=told, data=NLI)
    found = reach_verdict(load_study(tmp_path))
    assert found.arms == {"oelm_v2": "INCONCLUSIVE"}
    assert found.settings[0].judgements["oelm_v2"].plain.verdict == "INCONCLUSIVE"
    assert "one_answer" in [threat.kind for threat in found.threats]


def test_examples_are_counted_by_the_answers_themselves(tmp_path):
    few = np.stack([np.arange(30) % 3, np.arange(30) % 3], 1)
    without = {key: value for key, value in NLI.items() if key != "examples"}
    for arm in ("baseline", "oelm_v2"):
        for seed in (1, 2, 3):
            make_run(tmp_path, f"{arm}_{seed}", arm, seed, answers=few, data=without)
    assert reach_verdict(load_study(tmp_path)).arms == {"oelm_v2": "INCONCLUSIVE"}
