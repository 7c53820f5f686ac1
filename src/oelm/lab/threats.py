"""Threats to validity: what besides the arm could explain a gap. Each names its confound, in two languages."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oelm import encoders
from oelm.lab.outcome import Run
from oelm.lab.score import ACCURACY, PERPLEXITY
from oelm.lab.stats import MIN_SEEDS
from oelm.lab.study import Arm, Setting, Study, differences
from oelm.machine import host_id
from oelm.train.metrics import perplexity

TEXTS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Threat:
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)

    def text(self, language: str) -> str:
        words = TEXTS[language]
        facts = {**self.facts, "why": self.facts.get("why") or words["died"]}
        return words[self.kind].format(**facts) + (words["scale_alone"] if self.facts.get("alone") else "")


def find_threats(study: Study) -> list[Threat]:
    judged = [s for s in study.settings if study.baseline in s.judged]
    found = [threat for setting in judged for threat in _of_setting(setting, study)]
    for setting in study.settings:
        arms = ", ".join(name for name, arm in setting.arms.items() if arm.finished())
        if setting in judged or not arms:
            continue
        others = [s for s in judged if s.values["dataset"] == setting.values["dataset"]]
        if others and study.baseline not in setting.arms:
            what = ", ".join(differences(setting, others[:1]))
            found.append(Threat("unpaired", {"arms": arms, "setting": setting.name, "what": what}))
        else:
            found.append(Threat("no_baseline", {"arms": arms, "setting": setting.name}))
    return found + list(_failures(study))


def too_few_examples(setting: Setting, study: Study) -> int:
    """How many examples were judged on, if one of them alone is worth the criterion; else 0."""
    if study.score is not ACCURACY:
        return 0
    some = next(iter(setting.judged[study.baseline].runs.values()))
    if setting.split == "test" and some.answers is not None:
        n = len(some.answers)
    else:
        n = some.data.get("examples", {}).get(setting.split, 0)
    return n if 0 < n <= 100 / study.criterion else 0


def _of_setting(setting: Setting, study: Study) -> Iterator[Threat]:
    name, arms, baseline = setting.name, setting.judged, setting.judged[study.baseline]
    some = next(iter(baseline.runs.values()))
    grids = {arm.name: tuple(arm.rates) for arm in arms.values()}
    if len(set(grids.values())) > 1:
        yield Threat("grids", {"setting": name, "grids": _by_arm(grids)})
    elif len(next(iter(grids.values()))) == 1:
        yield Threat("no_grid", {"setting": name, "grids": f"{baseline.rate:g}"})
    edge = [arm.name for arm in arms.values() if arm.at_edge]
    if edge:
        yield Threat("edge", {"setting": name, "arms": ", ".join(edge)})
    yield from _seeds(setting, study)
    if few := too_few_examples(setting, study):
        yield Threat("few_examples", {"setting": name, "n": few, "worth": 100 / few})
    same = [f"{arm.name} ({seed})" for arm in arms.values() for seed, run in arm.runs.items() if _one_answer(run)]
    if same:
        yield Threat("one_answer", {"setting": name, "runs": ", ".join(same)})
    edges = some.data.get("edges", {})
    if setting.mixed:
        yield Threat("mixed_splits", {"setting": name})
    elif setting.split == "val":
        yield Threat("no_test", {"setting": name})
    elif edges.get("val") is not None and edges.get("val") == edges.get("test"):
        yield Threat("val_is_test", {"setting": name})
    if some.summary.get("epochs", 0) > 1 and some.measure is PERPLEXITY:
        yield Threat("epochs", {"setting": name, "epochs": some.summary["epochs"]})
    for run in baseline.runs.values():
        end, best = run.summary["final_val_loss"], run.summary["best_val_loss"]
        if end > best + 0.005 and run.measure is PERPLEXITY:
            facts = {"end": perplexity(end), "best": perplexity(best)}
            yield Threat("overfit", {"setting": name, **facts, "step": run.summary["best_step"]})
            break
    if not encoders.is_pretrained(some.config.arch):
        yield from _scales(setting, study)
    per_parameter = some.summary["tokens_seen"] / some.summary["total_parameters"]
    if per_parameter < 1 and some.measure is PERPLEXITY:
        yield Threat("short", {"setting": name, "tokens": per_parameter})
    runs = [run for arm in arms.values() for run in arm.runs.values()]
    hosts, places = ({spot for spot in found if spot} for found in zip(*map(_place, runs), strict=True))
    if len(hosts) > 1 or len(places) > 1:
        yield Threat("machines", {"setting": name, "places": "; ".join(sorted(places))})
    versions = {" ".join(str((run.environment or [{}])[-1].get(key)) for key in ("oelm", "torch")) for run in runs}
    if len(versions) > 1:
        yield Threat("versions", {"setting": name, "versions": "; ".join(sorted(versions))})


def has_learnt_nothing(arm: Arm) -> bool:
    """Some run of it gives one answer to every example: to be as good as that says nothing."""
    return any(_one_answer(run) for run in arm.runs.values())


def _one_answer(run: Run) -> bool:
    return run.answers is not None and len(set(run.answers[:, 1].tolist())) == 1


def _seeds(setting: Setting, study: Study) -> Iterator[Threat]:
    """Too few seeds, seeds that only one side has, seeds that diverged, rates that share no seed."""
    name, baseline = setting.name, setting.judged[study.baseline]
    arms = {other.name: other for other in setting.arms.values() if other.by_rate}
    few = [a.name for a in setting.judged.values() if a is not baseline and len(a.runs) < MIN_SEEDS]
    if few:
        yield Threat("seeds", {"setting": name, "arms": ", ".join(few), "least": MIN_SEEDS})
    sets = {arm.name: tuple(arm.runs) for arm in setting.judged.values()}
    alone = {arm.name: arm.unpaired for arm in arms.values() if arm.unpaired}
    if len(set(sets.values())) > 1 or alone:
        yield Threat("seed_sets", {"setting": name, "sets": _by_arm(sets), "left_out": _by_arm(alone) or "–"})
    lost = {arm.name: arm.lost for arm in arms.values() if arm.lost}
    if lost:
        yield Threat("diverged", {"setting": name, "arms": _by_arm(lost)})
    apart = [arm.name for arm in arms.values() if len(arm.by_rate) > 1 and not arm.rate_seeds]
    if apart:
        yield Threat("rate_seeds", {"setting": name, "arms": ", ".join(apart)})


def _scales(setting: Setting, study: Study) -> Iterator[Threat]:
    """Arms whose Q/K start at another scale than the baseline's; worse where no trained arm shares it."""
    base = setting.judged[study.baseline].config.qk_scale
    by_scale: dict[float, list[str]] = {}
    for arm in setting.judged.values():
        by_scale.setdefault(arm.config.qk_scale, []).append(arm.name)
    for scale, names in by_scale.items():
        if scale == base:
            continue
        trained = any(setting.judged[name].trained for name in names)
        facts = {"setting": setting.name, "arms": ", ".join(names), "scale": scale, "baseline": base}
        yield Threat("scale", {**facts, "alone": not trained})


def _by_arm(values: Mapping[str, Iterable[float]]) -> str:
    """baseline: 1, 2; oelm_v2: 1"""
    return "; ".join(f"{arm}: {', '.join(f'{value:g}' for value in found)}" for arm, found in values.items())


def _failures(study: Study) -> Iterator[Threat]:
    for run in study.runs:
        if run.status.state in ("failed", "died"):
            yield Threat("failed", {"setting": run.config.dataset, "runs": run.id, "why": run.status.reason})
    for name, why in study.damaged.items():
        yield Threat("damaged", {"run": name, "why": why})


def _place(run: Run) -> tuple[str, str]:
    """The machine, "" if it is not known, and what is said of it."""
    part = (run.environment or [{}])[-1]
    threads = f", {part.get('threads')} thread(s)" if part.get("device") == "cpu" else ""
    return host_id(part), f"{part.get('device_name', '?')}{threads}"
