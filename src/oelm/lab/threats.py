"""Threats to validity: what besides the arm could explain a gap. Each names its confound, in two languages."""

import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oelm.lab.stats import MIN_SEEDS
from oelm.lab.study import Run, Setting, Study, differences

TEXTS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Threat:
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)

    def text(self, language: str) -> str:
        words = TEXTS[language]
        return words[self.kind].format(**self.facts) + (words["scale_alone"] if self.facts.get("alone") else "")


def find_threats(study: Study) -> list[Threat]:
    judged = [s for s in study.settings if study.baseline in s.judged]
    found = [threat for setting in judged for threat in _of_setting(setting, study)]
    for setting in study.settings:
        if setting in judged or not setting.judged:
            continue
        others = [s for s in judged if s.values["dataset"] == setting.values["dataset"]]
        arms = ", ".join(setting.judged)
        if others:
            what = ", ".join(differences(setting, others[:1]))
            found.append(Threat("unpaired", {"arms": arms, "setting": setting.name, "what": what}))
        else:
            found.append(Threat("no_baseline", {"arms": arms, "setting": setting.name}))
    return found + list(_failures(study))


def _of_setting(setting: Setting, study: Study) -> Iterator[Threat]:
    name, arms, baseline = setting.name, setting.judged, setting.judged[study.baseline]
    some = next(iter(baseline.runs.values()))
    grids = {arm.name: tuple(arm.rates) for arm in arms.values()}
    shown = "; ".join(f"{arm}: {', '.join(f'{rate:g}' for rate in rates)}" for arm, rates in grids.items())
    if len(set(grids.values())) > 1:
        yield Threat("grids", {"setting": name, "grids": shown})
    elif len(next(iter(grids.values()))) == 1:
        yield Threat("no_grid", {"setting": name, "grids": f"{baseline.rate:g}"})
    edge = [arm.name for arm in arms.values() if arm.at_edge]
    if edge:
        yield Threat("edge", {"setting": name, "arms": ", ".join(edge)})
    few = [arm.name for arm in arms.values() if len(arm.runs.keys() & baseline.runs.keys()) < MIN_SEEDS]
    if few:
        yield Threat("seeds", {"setting": name, "arms": ", ".join(few), "least": MIN_SEEDS})
    edges = some.data.get("edges", {})
    if some.summary.get("test_loss") is None:
        yield Threat("no_test", {"setting": name})
    elif edges.get("val") is not None and edges.get("val") == edges.get("test"):
        yield Threat("val_is_test", {"setting": name})
    if some.summary.get("epochs", 0) > 1:
        yield Threat("epochs", {"setting": name, "epochs": some.summary["epochs"]})
    for run in baseline.runs.values():
        if run.val_loss > run.summary.get("best_val_loss", math.inf) + 0.005:
            facts = {"end": math.exp(run.val_loss), "best": math.exp(run.summary["best_val_loss"])}
            yield Threat("overfit", {"setting": name, **facts, "step": run.summary["best_step"]})
            break
    yield from _scales(setting, study)
    per_parameter = some.summary["tokens_seen"] / some.summary["total_parameters"]
    if per_parameter < 1:
        yield Threat("short", {"setting": name, "tokens": per_parameter})
    places = {_place(run) for arm in arms.values() for run in arm.runs.values()}
    if len(places) > 1:
        yield Threat("machines", {"setting": name, "places": "; ".join(sorted(place for _, place in places))})


def _scales(setting: Setting, study: Study) -> Iterator[Threat]:
    """Arms whose Q/K start at another scale than the baseline's; worse where no trained arm shares it."""
    base = setting.judged[study.baseline].any_run.config.qk_scale
    by_scale: dict[float, list[str]] = {}
    for arm in setting.judged.values():
        by_scale.setdefault(arm.any_run.config.qk_scale, []).append(arm.name)
    for scale, names in by_scale.items():
        if scale == base:
            continue
        trained = any(setting.judged[name].any_run.trained for name in names)
        facts = {"setting": setting.name, "arms": ", ".join(names), "scale": scale, "baseline": base}
        yield Threat("scale", {**facts, "alone": not trained})


def _failures(study: Study) -> Iterator[Threat]:
    for run in study.runs:
        if run.status.state in ("failed", "died"):
            why = run.status.reason or "the process died"
            yield Threat("failed", {"setting": run.config.dataset, "runs": run.id, "why": why})


def _place(run: Run) -> tuple[str, str]:
    """The machine, and what is said of it."""
    part = (run.environment or [{}])[-1]
    threads = f", {part.get('threads')} thread(s)" if part.get("device") == "cpu" else ""
    return str(part.get("host")), f"{part.get('device_name', '?')}{threads}"
