"""What a report says of classifiers alone: intervals, who is right where the other is wrong, confused classes."""

import math
from collections.abc import Iterator

import numpy as np

from oelm.lab.stats import MIN_SEEDS, accuracy_bounds, f1_bounds, holm, mcnemar, t_tests
from oelm.lab.study import Arm
from oelm.lab.verdict import SettingVerdict, Verdict, comparable
from oelm.report.blocks import Block, Heading, Items, Table, Text
from oelm.report.words import Words
from oelm.train.metrics import macro_f1


def sections(s: SettingVerdict, verdict: Verdict, w: Words) -> Iterator[Block]:
    baseline = s.setting.judged[verdict.study.baseline]
    told = _told(s)
    yield Items([_claim(name, s, verdict, w, told.get(name, False)) for name in s.judgements])
    if not any(run.answers is not None for run in baseline.runs.values()):
        return
    yield Table([w(key) for key in ("arm", "seed", "accuracy", "f1", "only_arm", "only_baseline", "mcnemar")],
                [row for arm in s.setting.judged.values() for row in _rows(arm, baseline)])  # fmt: skip
    yield Text(w("answers_note", baseline=baseline.name, n=len(_first(baseline))))
    yield Heading(w("confusion"), 3)
    some = next(iter(baseline.runs.values()))
    names = [str(name) for name in some.data.get("labels", [])] or list(map(str, range(some.config.labels)))
    for arm in s.setting.judged.values():
        found = [run.answers for run in arm.runs.values() if run.answers is not None]
        if found:
            rows = confusion(np.concatenate(found), len(names))
            shares = rows / np.maximum(1, rows.sum(1, keepdims=True))
            cells = [[name, *(f"{share:.1%}" for share in row)] for name, row in zip(names, shares, strict=True)]
            yield Table([w("truth"), *names], cells, w("confusion_of", arm=arm.name, n=len(found)))


def _told(s: SettingVerdict) -> dict[str, bool]:
    """Arms whose seeds tell them from the baseline: two-sided t tests, with Holm's correction over the arms."""
    gaps = {name: j.plain for name, j in s.judgements.items() if j.plain.n >= MIN_SEEDS}
    tests = {n: t_tests(np.array(g.mean), np.array(g.sd / math.sqrt(g.n)), g.n, 0.0) for n, g in gaps.items()}
    return holm({name: 2 * float(min(sides)) for name, sides in tests.items()})


def _claim(name: str, s: SettingVerdict, verdict: Verdict, w: Words, told: bool) -> str:
    """The sentence that the data allow on whether the arm beats the baseline."""
    gap = s.judgements[name].plain
    score = verdict.study.score
    low, high = sorted((gap.low, gap.high), key=score.change)
    shown = {"gap": score.said(gap.mean), "low": score.said(low), "high": score.said(high)}
    better = "claim_better" if score.change(gap.mean) > 0 else "claim_worse"
    key = "claim_one" if gap.n < 2 else better if told else "claim_open"
    return w(key, arm=name, baseline=verdict.study.baseline, n=gap.n, **shown)


def _rows(arm: Arm, baseline: Arm) -> Iterator[list[str]]:
    for seed, run in arm.runs.items():
        if run.answers is None:
            continue
        correct, n = int((run.answers[:, 0] == run.answers[:, 1]).sum()), len(run.answers)
        low, high = accuracy_bounds(correct, n)
        f1 = macro_f1(run.answers[:, 0], run.answers[:, 1], run.config.labels)
        worst, best = f1_bounds(run.answers, run.config.labels)
        pair = ["–", "–", "–"]
        other = baseline.runs.get(seed)
        if other is not None and other is not run and comparable(run, other):
            assert other.answers is not None
            mine, theirs, p = mcnemar(run.answers, other.answers)
            pair = [f"{mine:,}", f"{theirs:,}", f"{p:.3f}" if p >= 0.001 else "< 0.001"]
        accuracy = f"{correct / n:.2%} [{low:.2%}, {high:.2%}]"
        yield [arm.name, str(seed), accuracy, f"{f1:.3f} [{worst:.3f}, {best:.3f}]", *pair]


def _first(arm: Arm) -> np.ndarray:
    return next(run.answers for run in arm.runs.values() if run.answers is not None)


def confusion(rows: np.ndarray, classes: int) -> np.ndarray:
    """Counts by label (row) and answer (column)."""
    return np.bincount(rows[:, 0] * classes + rows[:, 1], minlength=classes**2).reshape(classes, classes)
