"""From a study to a verdict: every arm against the plain and against the fair baseline, and what lies in between.

*plain*: against the baseline arm. *fair*: against the best, on validation, of the trained arms that share
the arm's other choices: the baseline, and those whose Q/K start at the arm's own scale. Fair is the headline.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oelm import encoders
from oelm.config import RunConfig
from oelm.lab.outcome import Run
from oelm.lab.stats import (
    FAIL,
    INCONCLUSIVE,
    MIN_SEEDS,
    PASS,
    Gap,
    answers_bootstrap,
    document_bootstrap,
    judge,
    paired_gap,
    speed_ratio,
)
from oelm.lab.study import Arm, Setting, Study
from oelm.lab.threats import Threat, find_threats, has_learnt_nothing, too_few_examples

STEPS = {
    "freeze": ("baseline", "oelm_v2"),
    "random": ("baseline", "oelm_random"),
    "random_to_freeze": ("oelm_random", "oelm_v2"),
    "scale": ("oelm_random", "oelm_matched"),
    "orthogonality": ("oelm_matched", "oelm_v2"),
    "head_wise": ("oelm", "oelm_v2"),
    "start": ("baseline", "orthogonal"),
    "freezing_alone": ("orthogonal", "oelm_v2"),
}
"""The ablation: from one arm to another, one thing changes (the first three as published)."""
PRETRAINED_STEPS = {
    "pretrained_freeze": ("baseline", "frozen"),
    "factor": ("frozen", "oelm_v2"),
    "damage": ("baseline", "damaged_baseline"),
    "published_xnli": ("damaged_baseline", "oelm_v2"),
    "scale": ("oelm_random", "oelm_matched"),
}
"""The same of an encoder that has something to lose: there oelm_v2 is made of the pretrained matrices."""
ABSORBED = ("core", "lora", "qk_gain", "temperature")
"""Extras that are part of trained Q/K matrices: they have what these would add."""
NEARLY = 0.99
"""A step time that is so close to what arithmetic allows is believed."""


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
    """Judge every setting that has its baseline; the rest is named among the threats.

    Where the baseline was run and did not come to an end, the arms that did are undecided.
    """
    settings = [_judge_setting(s, study) for s in study.settings if study.baseline in s.judged and len(s.ended) > 1]
    names = dict.fromkeys(name for s in settings for name in deciding(s.setting, study.baseline))
    waiting = [s for s in study.settings if study.baseline in s.arms and study.baseline not in s.judged]
    undecided = {name for s in waiting for name, arm in s.arms.items() if arm.finished()}
    arms = {
        name: _across([*(standing(name, setting) for setting in settings), *[INCONCLUSIVE] * (name in undecided)])
        for name in names
    }
    threats = [*find_threats(study), *_unmatched_extras(settings, study.baseline), *_impossible_times(settings)]
    return Verdict(study, settings, arms, threats)


def _unmatched_extras(settings: list[SettingVerdict], baseline: str) -> Iterator[Threat]:
    """Frozen arms with additions that no trained arm has: then there is no fair baseline."""
    for s in settings:
        arms = [s.setting.arms[name] for name in s.judgements]
        unmatched = [arm for arm in arms if not arm.trained and not _is_matched(arm, s.setting, baseline)]
        found = {arm.name: _needed(arm) for arm in unmatched}
        if found:
            shown = "; ".join(f"{name}: {', '.join(extras)}" for name, extras in found.items())
            yield Threat("extras", {"setting": s.setting.name, "arms": shown})


def _impossible_times(settings: list[SettingVerdict]) -> Iterator[Threat]:
    """Arms that were faster than the arithmetic they save allows: then something else was timed."""
    from oelm.model.cost import speed_bound

    for s in settings:
        least = {name: 1 / speed_bound(s.setting.arms[name].config) for name in s.judgements}
        found = [n for n, j in s.judgements.items() if j.speed.n > 1 and j.speed.bounds[1] < NEARLY * least[n]]
        if found:
            shown = "; ".join(f"{n}: {s.judgements[n].speed.ratio:.2f} < {least[n]:.3f}" for n in found)
            yield Threat("timing", {"setting": s.setting.name, "arms": shown})


def deciding(setting: Setting, baseline: str) -> list[str]:
    """The arms that the verdict is about: those with frozen Q/K; against such a baseline, all the others."""
    every = not setting.arms[baseline].trained
    return [name for name, arm in setting.arms.items() if name != baseline and (every or arm.config.freezes_qk)]


def standing(name: str, setting: SettingVerdict) -> str:
    """An arm's verdict in one setting: one that diverged with all of enough seeds has failed; else it is undecided."""
    judgement, arm = setting.judgements.get(name), setting.setting.arms.get(name)
    if judgement:
        return judgement.fair.verdict
    return FAIL if arm and arm.diverged and len(arm.seeds) >= MIN_SEEDS else INCONCLUSIVE


def _across(verdicts: list[str]) -> str:
    return FAIL if FAIL in verdicts else PASS if set(verdicts) == {PASS} else INCONCLUSIVE


def steps_of(config: RunConfig) -> dict[str, tuple[str, str]]:
    return PRETRAINED_STEPS if encoders.is_pretrained(config.arch) else STEPS


def _judge_setting(setting: Setting, study: Study) -> SettingVerdict:
    arms, baseline = setting.judged, setting.judged[study.baseline]
    others = [a for a in arms.values() if a is not baseline and a.scores.keys() & baseline.scores.keys()]
    against, firm = (
        {arm.name: _strongest(arm, _fair_candidates(arm, setting, study.baseline, least)) for arm in others}
        for least in (1, MIN_SEEDS)
    )
    bar = study.score.bar(study.criterion)
    plain = _judged({a: paired_gap(a.scores, baseline.scores, bar) for a in others}, bar)
    fair, sure = (
        _judged({a: paired_gap(a.scores, other[a.name].scores, bar) for a in others}, bar) for other in (against, firm)
    )
    for name in [arm.name for arm in others if fair[arm.name].n < MIN_SEEDS and sure[arm.name].verdict == FAIL]:
        against[name], fair[name] = firm[name], sure[name]  # a stronger one, with too few seeds yet, would not help it
    for arm in others:
        unmatched = not arm.trained and not _is_matched(arm, setting, study.baseline)
        if unmatched or arm.lost or has_learnt_nothing(against[arm.name]):
            fair[arm.name] = _without(PASS, fair[arm.name], bar)
        if arm.lost or has_learnt_nothing(baseline):
            plain[arm.name] = _without(PASS, plain[arm.name], bar)
        if against[arm.name].lost:
            fair[arm.name] = _without(FAIL, fair[arm.name], bar)
        if baseline.lost:
            plain[arm.name] = _without(FAIL, plain[arm.name], bar)
    if too_few_examples(setting, study):
        plain, fair = ({name: _undecided(gap) for name, gap in gaps.items()} for gaps in (plain, fair))
    judgements = {
        arm.name: Judgement(
            plain[arm.name], fair[arm.name], against[arm.name].name, _evaluation_noise(arm, baseline),
            speed_ratio([(a.step_seconds, b.step_seconds) for a, b in _pairs(arm, baseline)]),
        )
        for arm in others
    }  # fmt: skip
    steps = {}
    for name, (start, end) in steps_of(baseline.config).items():
        if start in arms and end in arms and arms[start].scores.keys() & arms[end].scores.keys():
            steps[name] = paired_gap(arms[end].scores, arms[start].scores, bar)
    return SettingVerdict(setting, judgements, steps)


def _without(verdict: str, gap: Gap, bar: float) -> Gap:
    """Where a verdict is barred: undecided instead, and no number of seeds is promised on the way to it."""
    return _undecided(gap) if (gap.mean < bar) == (verdict == PASS) else gap


def _undecided(gap: Gap) -> Gap:
    return replace(gap, verdict=INCONCLUSIVE, seeds_needed=None)


def _judged(gaps: dict[Arm, Gap], bar: float) -> dict[str, Gap]:
    """Verdicts, frozen and trained arms apart."""
    frozen, trained = ({arm.name: gap for arm, gap in gaps.items() if arm.trained == side} for side in (False, True))
    judged = {**judge(frozen, bar), **judge(trained, bar)}
    return {arm.name: judged[arm.name] for arm in gaps}


def _strongest(arm: Arm, candidates: list[Arm]) -> Arm:
    """The best of the candidates on validation, on the seeds that all of them have."""
    seeds = set.intersection(*(set(other.scores) for other in (arm, *candidates)))
    return min(candidates, key=lambda other: sum(other.runs[seed].score("val") for seed in seeds))


def _fair_candidates(arm: Arm, setting: Setting, baseline: str, least: int = 1) -> list[Arm]:
    """The baseline, and the trained arms with the arm's choices other than freezing, and `least` seeds in common with
    all, or as many as the baseline has."""
    found = [setting.judged[baseline]]
    seeds = arm.scores.keys() & found[0].scores.keys()
    least = min(least, len(seeds))
    for other in setting.judged.values():
        alike = other.trained and _shares_choices(other.config, arm.config, found[0].config)
        if alike and other.name not in (arm.name, baseline) and len(other.scores.keys() & seeds) >= least:
            found.append(other)
            seeds &= other.scores.keys()
    return found


def _shares_choices(trained: RunConfig, arm: RunConfig, baseline: RunConfig) -> bool:
    """Fair to set against `arm`: it has no extra that `arm` lacks, and starts at its scale or the baseline's."""
    alike = all(arm.additions.get(key) == value for key, value in trained.additions.items())
    return alike and trained.qk_scale in (arm.qk_scale, baseline.qk_scale)


def _needed(arm: Arm) -> dict[str, Any]:
    """What a trained arm must have, too, to be fair; what trained Q/K can do by themselves it need not."""
    return {key: value for key, value in arm.config.additions.items() if key not in ABSORBED}


def _is_matched(arm: Arm, setting: Setting, baseline: str) -> bool:
    """Some trained arm that it is fair to compare it with has what was added to it."""
    candidates = _fair_candidates(arm, setting, baseline, MIN_SEEDS)
    return any(other.trained and _needed(arm).items() <= other.config.additions.items() for other in candidates)


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
