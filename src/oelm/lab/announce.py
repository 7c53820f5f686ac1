"""The verdict said: as JSON, on the terminal, in one sentence, and by the exit code."""

import json
import statistics
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from oelm.errors import UserError
from oelm.lab.score import PERPLEXITY, Score
from oelm.lab.stats import FAIL, INCONCLUSIVE, PASS, Gap
from oelm.lab.study import Study
from oelm.lab.verdict import Judgement, SettingVerdict, Verdict, reach_verdict, standing, steps_of
from oelm.lab.watch import make_console
from oelm.tables import table
from oelm.train.metrics import perplexity

EXIT_CODES = {PASS: 0, FAIL: 1, INCONCLUSIVE: 3}


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
        arms = steps_of(s.setting.judged[study.baseline].config)
        for name, gap in s.steps.items():
            console.print(f"  {' → '.join(arms[name])}: {show_gap(gap, study.score, f' {study.score.unit}')}")
        console.print()
    if verdict.threats:
        console.print("Threats to validity", style="bold")
        for threat in verdict.threats:
            console.print(f"  - {threat.text('en')}")
        console.print()
    console.print(sentence(verdict), style="bold")


def _table(s: SettingVerdict, score: Score) -> Table:
    rows = []
    for name, arm in s.setting.judged.items():
        cells = [name, score.text(arm.score), f"{arm.rate:g}", str(len(arm.runs))]
        judgement = s.judgements.get(name)
        if judgement:
            needed = f"\n(~{judgement.fair.seeds_needed} in all)" if judgement.fair.seeds_needed else ""
            fair = f"{_two_lines(judgement.fair, score)}\nvs {judgement.against}"
            cells += [_two_lines(judgement.plain, score), fair, judgement.fair.verdict + needed]
        rows.append(cells)
    headings = ("arm", f"{s.setting.split} {score.label}", "lr", "n", "plain gap", "fair gap", "verdict")
    return table(headings, rows, words=len(headings), wrap=False)


def show_gap(gap: Gap, score: Score, unit: str, one_seed: str = " (one seed)") -> str:
    """+9.8 % [+8.1, +11.5]"""
    return score.said(gap.mean) + unit + (score.said_bounds(gap.low, gap.high) if gap.n > 1 else one_seed)


def _two_lines(gap: Gap, score: Score) -> str:
    """For a terminal of 80 columns."""
    return show_gap(gap, score, f" {score.unit}").replace(" [", "\n[").replace(" (", "\n(")


def sentence(verdict: Verdict) -> str:
    """The verdict in one sentence, and where the other frozen arms stand."""
    bar, words = _bar(verdict.study)
    if not verdict.arms:
        return "INCONCLUSIVE: there is no frozen arm among these runs."
    groups = {kind: [arm for arm, found in verdict.arms.items() if found == kind] for kind in words}
    order = sorted((kind for kind in groups if groups[kind]), key=lambda kind: kind != verdict.overall)
    return "\n".join(
        f"{kind}: {words[kind]} {bar}: {', '.join(arm + _where(verdict, arm, kind) for arm in groups[kind])}."
        for kind in order
    )


def _where(verdict: Verdict, arm: str, kind: str) -> str:
    """In how many settings an arm fails, if not in all; a PASS is one in all of them."""
    found = [s for s in verdict.settings if arm in s.setting.arms]
    count = sum(standing(arm, s) == FAIL for s in found)
    return f" (in {count} of {len(found)} settings)" if kind == FAIL and count < len(found) else ""


def _bar(study: Study) -> tuple[str, dict[str, str]]:
    """What is to be reached, and how an arm stands to it."""
    if study.score is PERPLEXITY:
        bar = f"{study.criterion:g} x its fair baseline's perplexity"
        return bar, {PASS: "at most", FAIL: "above", INCONCLUSIVE: "not yet told from"}
    bar = f"{study.criterion:g} point{'' if study.criterion == 1 else 's'} of accuracy below its fair baseline"
    return bar, {PASS: "less than", FAIL: "more than", INCONCLUSIVE: "not yet told from"}


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
                        "best_lr_at_edge": arm.at_edge if len(arm.rates) > 1 else None,
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
