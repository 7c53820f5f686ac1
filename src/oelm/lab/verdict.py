"""From a study to a verdict: every arm against the plain and against the fair baseline, and what lies in between.

*plain*: against the baseline arm. *fair*: against the best, on validation, of the trained arms that share
the arm's other choices: the baseline, and those whose Q/K start at the arm's own scale. Fair is the headline.
"""

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from oelm.config import RunConfig
from oelm.errors import UserError
from oelm.lab.score import PERPLEXITY, Score
from oelm.lab.stats import (
    FAIL,
    INCONCLUSIVE,
    PASS,
    Gap,
    answers_bootstrap,
    document_bootstrap,
    judge,
    paired_gap,
    speed_ratio,
)
from oelm.lab.study import Arm, Run, Setting, Study
from oelm.lab.threats import Threat, find_threats, too_few_examples
from oelm.lab.watch import make_console
from oelm.train.metrics import perplexity

STEPS = {
    "freeze": ("baseline", "oelm_v2"),
    "random": ("baseline", "oelm_random"),
    "random_to_freeze": ("oelm_random", "oelm_v2"),
    "scale": ("oelm_random", "oelm_matched"),
    "orthogonality": ("oelm_matched", "oelm_v2"),
    "head_wise": ("oelm", "oelm_v2"),
    "start": ("baseline", "orthogonal"),
    "freezing_alone": ("orthogonal", "oelm_v2"),
    "pretrained_freeze": ("baseline", "frozen"),
    "factor": ("frozen", "oelm_v2"),
    "damage": ("baseline", "damaged_baseline"),
    "published_xnli": ("damaged_baseline", "oelm_v2"),
}
"""The ablation: from one arm to another, one thing changes (the first three as published)."""
EXIT_CODES = {PASS: 0, FAIL: 1, INCONCLUSIVE: 3}


@dataclass(frozen=True)
class Judgement:
    """One arm in one setting."""

    plain: Gap
    fair: Gap
    against: str
    """The baseline that is fair."""
    evaluation: tuple[float, float] | None
    """Bounds of the first pair's plain gap over draws of other test documents or examples."""
    speed: Gap
    """Log ratio of median step times, over pairs of runs."""


@dataclass(frozen=True)
class SettingVerdict:
    setting: Setting
    judgements: dict[str, Judgement]
    steps: dict[str, Gap]


@dataclass(frozen=True)
class Verdict:
    study: Study
    settings: list[SettingVerdict]
    arms: dict[str, str]
    """The frozen arms: PASS where an arm passes in every setting, FAIL where it fails in any."""
    threats: list[Threat]

    @property
    def overall(self) -> str:
        """PASS if some frozen arm passes, FAIL if every one fails."""
        found = set(self.arms.values())
        return PASS if PASS in found else FAIL if found == {FAIL} else INCONCLUSIVE

    @property
    def passing(self) -> list[str]:
        return [arm for arm, verdict in self.arms.items() if verdict == PASS]


def reach_verdict(study: Study) -> Verdict:
    """Judge every setting that has its baseline; the rest is named among the threats."""
    settings = [_judge_setting(s, study) for s in study.settings if study.baseline in s.judged and len(s.judged) > 1]
    found: dict[str, list[str]] = {}
    for setting in settings:
        for name in deciding(setting.setting, study.baseline):
            found.setdefault(name, []).append(_standing(setting.setting.arms[name], setting))
    arms = {name: _across(verdicts) for name, verdicts in found.items()}
    return Verdict(study, settings, arms, [*find_threats(study), *_impossible_times(settings)])


def _impossible_times(settings: list[SettingVerdict]) -> Iterator[Threat]:
    """Arms that were faster than the arithmetic they save allows: then something else was timed."""
    from oelm.model.cost import speed_bound

    for s in settings:
        least = {name: 1 / speed_bound(s.setting.arms[name].config) for name in s.judgements}
        found = [n for n, j in s.judgements.items() if j.speed.n > 1 and j.speed.bounds[1] < least[n]]
        if found:
            shown = "; ".join(f"{n}: {s.judgements[n].speed.ratio:.2f} < {least[n]:.3f}" for n in found)
            yield Threat("timing", {"setting": s.setting.name, "arms": shown})


def deciding(setting: Setting, baseline: str) -> list[str]:
    """The arms that the verdict is about: the frozen ones; against a frozen baseline, all the others."""
    every = not setting.arms[baseline].trained
    return [name for name, arm in setting.arms.items() if name != baseline and (every or not arm.trained)]


def _standing(arm: Arm, setting: SettingVerdict) -> str:
    """An arm's verdict in one setting: one of which every run diverged has failed, one not yet run is undecided."""
    judgement = setting.judgements.get(arm.name)
    return judgement.fair.verdict if judgement else FAIL if arm.diverged else INCONCLUSIVE


def _across(verdicts: list[str]) -> str:
    return FAIL if FAIL in verdicts else PASS if set(verdicts) == {PASS} else INCONCLUSIVE


def _judge_setting(setting: Setting, study: Study) -> SettingVerdict:
    arms, baseline = setting.judged, setting.judged[study.baseline]
    others = [a for a in arms.values() if a is not baseline and a.scores.keys() & baseline.scores.keys()]
    against = {arm.name: fair_baseline(arm, setting, study.baseline) for arm in others}
    bar = study.score.bar(study.criterion)
    plain = _judged({a: paired_gap(a.scores, baseline.scores, bar) for a in others}, bar)
    fair = _judged({a: paired_gap(a.scores, against[a.name].scores, bar) for a in others}, bar)
    if too_few_examples(setting, study):
        plain, fair = ({n: replace(g, verdict=INCONCLUSIVE) for n, g in gaps.items()} for gaps in (plain, fair))
    judgements = {
        arm.name: Judgement(
            plain[arm.name], fair[arm.name], against[arm.name].name, _evaluation_noise(arm, baseline),
            speed_ratio([(a.step_seconds, b.step_seconds) for a, b in _pairs(arm, baseline)]),
        )
        for arm in others
    }  # fmt: skip
    steps = {}
    for name, (start, end) in STEPS.items():
        if start in arms and end in arms and arms[start].scores.keys() & arms[end].scores.keys():
            steps[name] = paired_gap(arms[end].scores, arms[start].scores, bar)
    return SettingVerdict(setting, judgements, steps)


def _judged(gaps: dict[Arm, Gap], bar: float) -> dict[str, Gap]:
    """Verdicts, frozen and trained arms apart; an arm that lost a seed to divergence cannot pass on the others."""
    frozen, trained = ({arm.name: gap for arm, gap in gaps.items() if arm.trained == side} for side in (False, True))
    judged = {**judge(frozen, bar), **judge(trained, bar)}
    for arm in gaps:
        if arm.lost and judged[arm.name].verdict == PASS:
            judged[arm.name] = replace(judged[arm.name], verdict=INCONCLUSIVE)
    return {arm.name: judged[arm.name] for arm in gaps}


def fair_baseline(arm: Arm, setting: Setting, baseline: str) -> Arm:
    """The best on validation of the trained arms that share the arm's choices other than freezing.

    They are compared on the seeds that all of them have; one without a seed in common is left out.
    """
    seeds = arm.scores.keys() & setting.judged[baseline].scores.keys()
    shared = [setting.judged[baseline]]
    for other in setting.judged.values():
        alike = other.trained and _shares_choices(other.config, arm.config, setting.arms[baseline].config)
        if alike and other.name not in (arm.name, baseline) and other.scores.keys() & seeds:
            shared.append(other)
            seeds &= other.scores.keys()
    return min(shared, key=lambda other: sum(other.runs[seed].score("val") for seed in seeds))


def _shares_choices(trained: RunConfig, arm: RunConfig, baseline: RunConfig) -> bool:
    """Fair to set against `arm`: it has no extra that `arm` lacks, and starts at its scale or the baseline's."""
    extras = all(arm.extras.get(key) == value for key, value in trained.extras.items())
    return extras and trained.qk_scale in (arm.qk_scale, baseline.qk_scale)


def _pairs(arm: Arm, baseline: Arm) -> list[tuple[Run, Run]]:
    return [(run, baseline.runs[seed]) for seed, run in arm.runs.items() if seed in baseline.runs]


def _evaluation_noise(arm: Arm, baseline: Arm) -> tuple[float, float] | None:
    mine, other = _pairs(arm, baseline)[0]
    if mine.answers is not None and other.answers is not None and comparable(mine, other):
        return answers_bootstrap(mine.answers, other.answers)
    if mine.documents is None or other.documents is None or mine.documents.shape != other.documents.shape:
        return None
    return document_bootstrap(mine.documents, other.documents)


def comparable(mine: Run, other: Run) -> bool:
    """Whether both answered the same test examples."""
    if mine.answers is None or other.answers is None:
        return False
    return np.array_equal(mine.answers[:, 0], other.answers[:, 0])


def as_json(verdict: Verdict, language: str = "en") -> dict[str, Any]:
    """Everything, as plain values."""
    score = verdict.study.score
    return {
        "overall": verdict.overall,
        "arms": verdict.arms,
        "baseline": verdict.study.baseline,
        "criterion": verdict.study.criterion,
        "unfinished": verdict.study.unfinished,
        "settings": [
            {
                "name": s.setting.name,
                "split": s.setting.split,
                "arms": {
                    name: {
                        score.name: score.shown(arm.score),
                        f"val_{score.name}": score.shown(
                            statistics.fmean(run.score("val") for run in arm.runs.values())
                        ),
                        "max_lr": arm.rate,
                        "best_lr_at_edge": arm.at_edge,
                        "seeds": list(arm.runs),
                        **({} if name not in s.judgements else _judgement_json(s.judgements[name], score)),
                    }
                    for name, arm in s.setting.judged.items()
                },
                "steps": {name: _change_json(gap, score) for name, gap in s.steps.items()},
            }
            for s in verdict.settings
        ],
        "threats": [{"kind": threat.kind, "text": threat.text(language)} for threat in verdict.threats],
    }


def _judgement_json(judgement: Judgement, score: Score) -> dict[str, Any]:
    noise = judgement.evaluation
    return {
        "plain": _gap_json(judgement.plain, score),
        "fair": {"against": judgement.against, **_gap_json(judgement.fair, score)},
        "evaluation_bounds": _said(noise, score) if noise else None,
        "step_time_ratio": judgement.speed.ratio,
        "step_time_bounds": list(judgement.speed.bounds) if judgement.speed.n > 1 else None,
    }


def _gap_json(gap: Gap, score: Score) -> dict[str, Any]:
    """With one seed there is no spread, and nothing to be tested."""
    tested = ("sd", "p_pass", "p_fail") if gap.n > 1 else ()
    return {**_change_json(gap, score), **{k: asdict(gap)[k] for k in (*tested, "verdict", "seeds_needed")}}


def _change_json(gap: Gap, score: Score) -> dict[str, Any]:
    """A ratio of perplexities, or a difference of accuracies in points."""
    name = "ratio" if score is PERPLEXITY else "points"
    bounds = _said((gap.low, gap.high), score) if gap.n > 1 else None
    return {"n": gap.n, name: _said((gap.mean,), score)[0], "bounds": bounds}


def _said(differences: tuple[float, ...], score: Score) -> list[float]:
    return sorted(perplexity(d) if score is PERPLEXITY else score.change(d) for d in differences)


def show_verdict(study: Study, to_json: bool) -> int:
    """Print the verdict; returns the exit code that says it too."""
    verdict = reach_verdict(study)
    if not verdict.settings:
        raise UserError(_nothing_to_judge(study))
    if to_json:
        print(json.dumps(as_json(verdict), indent=2))
    else:
        print_verdict(verdict, make_console())
    return EXIT_CODES[verdict.overall]


def _nothing_to_judge(study: Study) -> str:
    if study.damaged and not study.runs:
        name, why = next(iter(study.damaged.items()))
        return f"no run below {study.root} can be read: {name}: {why}"
    if not any(study.baseline in setting.judged for setting in study.settings):
        return f"no finished run of the baseline arm {study.baseline} below {study.root}: nothing to compare with"
    return f"no finished run of another arm at the settings of {study.baseline} below {study.root}: nothing to compare"


def print_verdict(verdict: Verdict, console: Console) -> None:
    study = verdict.study
    if study.unfinished:
        ended = sum(s.state == "finished" for s in study.statuses)
        console.print(f"INTERIM: {ended} runs are finished, others are not\n", style="yellow")
    for s in verdict.settings:
        console.print(s.setting.name, style="bold")
        console.print(_table(s, study.score))
        console.print()
        for name, gap in s.steps.items():
            start, end = STEPS[name]
            console.print(f"  {start} → {end}: {show_gap(gap, study.score)}")
        console.print()
    if verdict.threats:
        console.print("Threats to validity", style="bold")
        for threat in verdict.threats:
            console.print(f"  - {threat.text('en')}")
        console.print()
    console.print(sentence(verdict), style="bold")


def _table(s: SettingVerdict, score: Score) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("arm", f"{s.setting.split} {score.label}", "lr", "n", "plain gap", "fair gap", "verdict"):
        table.add_column(heading, no_wrap=True)
    for name, arm in s.setting.judged.items():
        cells = [name, score.text(arm.score), f"{arm.rate:g}", str(len(arm.runs))]
        judgement = s.judgements.get(name)
        if judgement:
            needed = f"\n(~{judgement.fair.seeds_needed} in all)" if judgement.fair.seeds_needed else ""
            fair = f"{_two_lines(judgement.fair, score)}\nvs {judgement.against}"
            cells += [_two_lines(judgement.plain, score), fair, judgement.fair.verdict + needed]
        table.add_row(*cells)
    return table


def show_gap(gap: Gap, score: Score) -> str:
    """+9.8 % [+8.1, +11.5]"""
    centre = f"{score.change(gap.mean):+.1f} {score.unit}"
    if gap.n == 1:
        return f"{centre} (one seed)"
    low, high = sorted(score.change(bound) for bound in (gap.low, gap.high))
    return f"{centre} [{low:+.1f}, {high:+.1f}]"


def _two_lines(gap: Gap, score: Score) -> str:
    """For a terminal of 80 columns."""
    return show_gap(gap, score).replace(" [", "\n[").replace(" (", "\n(")


def sentence(verdict: Verdict) -> str:
    """The verdict in one sentence, and where the other frozen arms stand."""
    bar, words = _bar(verdict.study)
    if not verdict.arms:
        return "INCONCLUSIVE: there is no frozen arm among these runs."
    groups = {kind: [arm for arm, found in verdict.arms.items() if found == kind] for kind in words}
    order = sorted((kind for kind in groups if groups[kind]), key=lambda kind: kind != verdict.overall)
    return "\n".join(f"{kind}: {words[kind]} {bar}: {', '.join(groups[kind])}." for kind in order)


def _bar(study: Study) -> tuple[str, dict[str, str]]:
    """What is to be reached, and how an arm stands to it."""
    if study.score is PERPLEXITY:
        bar = f"{study.criterion:g} x its fair baseline's perplexity"
        return bar, {PASS: "at most", FAIL: "above", INCONCLUSIVE: "not yet told from"}
    bar = f"{study.criterion:g} point{'' if study.criterion == 1 else 's'} of accuracy below its fair baseline"
    return bar, {PASS: "less than", FAIL: "more than", INCONCLUSIVE: "not yet told from"}
