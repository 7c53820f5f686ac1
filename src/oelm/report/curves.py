"""How the arms got where they are: over a run, across settings, step by step of the ablation, by learning rate."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator

import numpy as np

from oelm import encoders
from oelm.lab.outcome import Run
from oelm.lab.score import HIGHEST, PERPLEXITY, Score
from oelm.lab.study import Arm
from oelm.lab.verdict import SettingVerdict, Verdict, steps_of
from oelm.report import figures
from oelm.report.blocks import Block, Figure, Heading, Table, Text
from oelm.report.said import show_gap
from oelm.report.words import Words

PATHS = {False: ("baseline", "oelm_random", "oelm_matched", "oelm_v2"), True: ("baseline", "frozen", "oelm_v2")}
"""From the baseline to frozen orthonormal Q/K, of drawn and of pretrained ones."""
SHARES = (0.1, 0.3, 0.6, 1.0)
"""Of a run, at which the arms are compared on the way."""


def convergence(s: SettingVerdict, verdict: Verdict, w: Words) -> Iterator[Block]:
    shades, score = figures.colours(s.setting), verdict.study.score
    axes: dict[str, Callable[[Run, int], float]] = {
        "steps": lambda run, step: step,
        "tokens": lambda run, step: step * run.config.tokens_per_step / 1e6,
        "time": lambda run, step: float(run.step_seconds[:step].sum()) / 60,
    }
    for name, position in axes.items():
        found = {arm.name: _band(arm, position, score) for arm in s.setting.judged.values()}
        picture = figures.curves(found, shades, w(f"axis_{name}"), w("axis_ppl"), score is PERPLEXITY)
        yield Figure(picture, w(f"curve_{name}"))
    baseline = s.setting.judged[verdict.study.baseline]
    rows, shares = [], _validated_shares(baseline)
    for arm in s.setting.judged.values():
        cells = [arm.name]
        for share in shares:
            mine, other = _score_at(arm, share), _score_at(baseline, share)
            shared = mine.keys() & other.keys()
            gap = statistics.fmean(mine[seed] - other[seed] for seed in shared) if shared else 0.0
            shown = w("in_brackets", text=score.said(gap)) if shared and arm is not baseline else ""
            cells.append(score.text(statistics.fmean(mine.values())) + shown if mine else "–")
        rows.append(cells)
    headings = [w("arm"), *(w("share", share=round(100 * share)) for share in shares)]
    yield Table(headings, rows, w("progress_table", baseline=baseline.name))


def _band(arm: Arm, position: Callable[[Run, int], float], score: Score) -> figures.Curve:
    runs = list(arm.runs.values())
    steps = sorted(set.intersection(*(set(run.curve) for run in runs)))
    x = np.array([statistics.fmean(position(run, step) for run in runs) for step in steps])
    highest = HIGHEST if score is PERPLEXITY else math.inf
    found = np.array([[min(run.curve[step], highest) for step in steps] for run in runs])
    middle, low, high = (np.vectorize(score.shown)(edge) for edge in (found.mean(0), found.min(0), found.max(0)))
    return x, middle, low, high


def _validated_shares(arm: Arm) -> list[float]:
    """SHARES near which there were validations; where that is the end alone, its last validations."""
    usual = [share for share in SHARES if _score_at(arm, share)]
    run = next(iter(arm.runs.values()))
    last = [step / run.config.max_steps for step in sorted(run.curve)[-len(SHARES) :]]
    return usual if len(usual) > 1 else last


def _score_at(arm: Arm, share: float) -> dict[int, float]:
    """Validation score by seed at the validated step nearest to a share of the run, if within a twentieth of it."""
    losses = {}
    for seed, run in arm.runs.items():
        goal = share * run.config.max_steps
        step = min(run.curve, key=lambda step: abs(step - goal))
        if abs(step - goal) <= 0.05 * run.config.max_steps:
            losses[seed] = run.curve[step]
    return losses


def trend(verdict: Verdict, w: Words) -> Iterator[Block]:
    yield Heading(w("trend"))
    names = list(dict.fromkeys(name for s in verdict.settings for name in s.judgements))
    settings = [s.setting.name for s in verdict.settings]
    numbers = []
    for s in verdict.settings:
        runs = s.setting.judged[verdict.study.baseline].runs
        some = next(iter(runs.values())).summary
        numbers.append([w(s.setting.split), str(len(runs)), f"{some['tokens_seen']:,}", f"{some['epochs']:.2f}"])
    judged = {n: [s.judgements.get(n) for s in verdict.settings] for n in names}
    score = verdict.study.score
    for kind in ("plain", "fair"):
        found = {n: [getattr(j, kind) if j else None for j in row] for n, row in judged.items()}
        yield Figure(figures.trend(settings, found, score, verdict.study.criterion, w(kind)), w("trend_figure"))
        cells = [[show_gap(gap, score, w) if gap else "–" for gap in row] for row in zip(*found.values(), strict=True)]
        yield Text(w(kind))
        yield Table(
            [w("setting"), w("split"), w("seeds"), w("tokens_seen"), w("epochs"), *names],
            [[name, *facts, *row] for name, facts, row in zip(settings, numbers, cells, strict=True)],
        )


def ablation(s: SettingVerdict, verdict: Verdict, w: Words) -> Iterator[Block]:
    if not s.steps:
        return
    arms, score = s.setting.judged, verdict.study.score
    named = steps_of(arms[verdict.study.baseline].config)
    path = [arm for arm in PATHS[encoders.is_pretrained(arms[verdict.study.baseline].config.arch)] if arm in arms]
    seeds = set.intersection(*(set(arms[name].scores) for name in path)) if path else set()
    if path[:1] == ["baseline"] and len(path) > 1 and seeds:
        mean = {name: statistics.fmean(arms[name].scores[seed] for seed in seeds) for name in path}
        heights = [score.change(min(mean[name] - mean["baseline"], HIGHEST)) for name in path]
        labels = [f"{a} → {b}" for a, b in itertools.pairwise(path)]
        steps = [(label, *ends) for label, ends in zip(labels, itertools.pairwise(heights), strict=True)]
        better = -1 if score is PERPLEXITY else 1
        yield Figure(figures.waterfall(steps, w("ablation_axis"), better), w("ablation_figure"))
    rows = [[w(f"step_{name}"), " → ".join(named[name]), show_gap(gap, score, w)] for name, gap in s.steps.items()]
    yield Table([w("what_changes"), w("from_to"), w("change")], rows)


def rates(s: SettingVerdict, verdict: Verdict, w: Words) -> Iterator[Block]:
    arms = [arm for arm in s.setting.judged.values() if len(arm.by_rate) > 1]
    if not arms:
        return
    score = verdict.study.score
    found = {arm.name: {rate: _or_infinite(own, score) for rate, own in arm.rate_scores.items()} for arm in arms}
    chosen = {arm.name: arm.rate for arm in arms}
    shades = figures.colours(s.setting)
    better = -1 if score is PERPLEXITY else 1
    yield Figure(figures.rates(found, chosen, shades, w("axis_rate"), w("axis_ppl"), better), w("rates_figure"))
    grid = sorted({rate for by_rate in found.values() for rate in by_rate})
    rows = [[arm.name, *(score.text(arm.rate_scores.get(rate)) for rate in grid)] for arm in arms]
    yield Table([w("arm"), *(f"{rate:g}" for rate in grid)], rows)


def _or_infinite(found: float, score: Score) -> float:
    """For a picture."""
    return math.inf if found == math.inf else score.shown(min(found, HIGHEST) if score is PERPLEXITY else found)
