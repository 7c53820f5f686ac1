"""What the report says, as blocks: verdict first, then how it was reached, then every run."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from oelm import __version__, encoders
from oelm.data.sources import prepare_command
from oelm.lab.score import ACCURACY, HIGHEST, PERPLEXITY, Score
from oelm.lab.stats import FAIL, INCONCLUSIVE, PASS, Gap
from oelm.lab.status import RunStatus
from oelm.lab.study import Arm, Run
from oelm.lab.verdict import STEPS, SettingVerdict, Verdict, deciding
from oelm.report import answers, figures
from oelm.report.blocks import Block, Code, Document, Figure, Heading, Items, Notice, Table, Text
from oelm.report.pages import run_pages, when
from oelm.report.words import Words

REFERENCES = [
    "S. Holm (1979). A simple sequentially rejective multiple test procedure. Scand. J. Statistics 6, 65–70.",
    "A. Saxe, J. McClelland, S. Ganguli (2014). Exact solutions to the nonlinear dynamics of learning in deep linear "
    "neural networks. ICLR.",
    "A. Vaswani et al. (2017). Attention is all you need. NeurIPS.",
    "A. Radford et al. (2019). Language models are unsupervised multitask learners.",
    "I. Loshchilov, F. Hutter (2019). Decoupled weight decay regularization. ICLR.",
    "R. Eldan, Y. Li (2023). TinyStories: how small can language models be and still speak coherent English? "
    "arXiv:2305.07759.",
]
SHARES = (0.1, 0.3, 0.6, 1.0)


def compose(verdict: Verdict, w: Words, published: Mapping[str, Mapping[str, Any]] | None = None) -> Document:
    study = verdict.study
    date = f"{datetime.now():%Y-%m-%d %H:%M}"
    blocks: list[Block] = [*_verdict(verdict, w)]
    if study.unfinished:
        blocks += _status(verdict, w)
    for section in (_setting, _results, _convergence, _ablation, _rates, _efficiency):
        for i, s in enumerate(verdict.settings):
            found = list(section(s, verdict, w))
            if found and i == 0:
                blocks.append(Heading(w(TITLES[section])))
            if found and len(verdict.settings) > 1:
                blocks.append(Heading(s.setting.name, 3))
            blocks += found
        if section is _convergence and len(verdict.settings) > 1:
            blocks += _trend(verdict, w)
    blocks.append(Heading(w("threats")))
    threats = [threat.text(w.language) for threat in verdict.threats]
    blocks.append(Items(threats) if threats else Text(w("no_threats")))
    if published:
        blocks += _published(verdict, w, published)
    blocks += _reproduce(verdict, w)
    blocks += [Heading(w("references")), Items(REFERENCES), Heading(w("runs_title"))]
    blocks += run_pages(study.runs, w)
    name = study.plans[0].name if len(study.plans) == 1 else study.root.resolve().name
    subtitle = w("subtitle", version=__version__, date=date, runs=len(study.runs))
    overall = verdict.overall if verdict.settings else ""
    return Document(w("title", name=name), subtitle, w.language, overall, w("contents"), blocks)


def _verdict(verdict: Verdict, w: Words) -> Iterator[Block]:
    study, bar = verdict.study, verdict.study.score.limit(verdict.study.criterion)
    yield Heading(w("verdict"))
    if study.unfinished:
        ended = sum(s.state in ("finished", "failed") for s in study.statuses)
        total = max(len(study.statuses), sum(plan.total for plan in study.plans))
        yield Notice(w("interim", ended=ended, total=total))
    if not verdict.settings:
        yield Text(w("nothing", baseline=study.baseline), strong=True)
        return
    words = {PASS: "pass", FAIL: "fail", INCONCLUSIVE: "inconclusive"}
    headline = words[verdict.overall] if verdict.arms else "no_frozen"
    yield Text(w(headline, arms=_listed(verdict.passing, w), bar=bar), strong=True)
    several = len(verdict.settings) > 1
    split = w(verdict.settings[0].setting.split)
    yield Items([line for s in verdict.settings for line in _standings(s, verdict, w, several)])
    rows = [
        (f"{name} · {s.setting.name}" if several else name, judgement.fair)
        for s in verdict.settings
        for name, judgement in s.judgements.items()
    ]
    picture = figures.gaps(rows, study.score, study.criterion, w("gap_axis"), w("limit", bar=bar))
    yield Figure(picture, w("gap_figure", split=split))
    yield Text(w("how", split=split))


def _standings(s: SettingVerdict, verdict: Verdict, w: Words, several: bool) -> Iterator[str]:
    """Where every frozen arm stands, in a line each."""
    for name in deciding(s.setting, verdict.study.baseline):
        arm = s.setting.arms[name]
        shown = f"{name} · {s.setting.name}" if several else name
        judgement = s.judgements.get(name)
        if judgement is None:
            yield w("standing_none", arm=shown, why=w("diverged" if arm.diverged else "not_finished"))
            continue
        needed = w("standing_seeds", n=judgement.fair.seeds_needed) if judgement.fair.seeds_needed else ""
        gap = show_gap(judgement.fair, verdict.study.score, w, f" {w('unit')}")
        yield w("standing", arm=shown, gap=gap, against=judgement.against, verdict=w(judgement.fair.verdict),
                needed=needed)  # fmt: skip


def _listed(names: list[str], w: Words) -> str:
    return ("、" if w.language == "zh" else ", ").join(names)


def _status(verdict: Verdict, w: Words) -> Iterator[Block]:
    yield Heading(w("status"))
    rows = [
        [
            s.id, s.arm, w(f"state_{s.state}") + (f": {s.reason}" if s.reason else ""), f"{s.step:,} / {s.max_steps:,}",
            when(s.started), when(s.finished), _val(s),
            f"{100 * s.gap:+.1f} {w('unit')}" if s.gap is not None else "",
        ]
        for s in verdict.study.statuses
    ]  # fmt: skip
    yield Table([w(k) for k in ("run", "arm", "state", "step", "started", "finished", "val_ppl", "gap_now")], rows)


def _setting(s: SettingVerdict, verdict: Verdict, w: Words) -> Iterator[Block]:
    some = next(iter(s.setting.judged[verdict.study.baseline].runs.values()))
    config, tokens = some.config, some.data.get("tokens", {})
    key = "model_text" if config.arch == encoders.GPT else "encoder_text"
    yield Text(w(key, layers=config.num_layers, d_model=config.d_model, heads=config.num_heads, arch=config.arch,
                 d_ff=config.d_ff, seq_len=config.seq_len, vocab=config.vocab_size, dropout=config.dropout,
                 parameters=some.summary["total_parameters"]))  # fmt: skip
    tokens = some.data.get("examples", tokens) if config.labels else tokens
    yield Text(w("data_text", dataset=config.dataset, tokenizer=some.data.get("tokenizer", "?"),
                 **{split: tokens.get(split, 0) for split in ("train", "val", "test")},
                 tokens=some.summary["tokens_seen"], steps=config.max_steps, per_step=config.tokens_per_step,
                 batch=config.windows_per_step, labels=", ".join(map(str, some.data.get("labels", []))),
                 epochs=some.summary["epochs"]))  # fmt: skip
    yield Text(w("optim_text", beta1=config.beta1, beta2=config.beta2, decay=config.weight_decay,
                 clip=config.grad_clip, schedule=config.schedule, warmup=config.warmup_steps))  # fmt: skip
    rows = []
    for name, arm in s.setting.judged.items():
        start = "; ".join((w(f"frames_{arm.config.frames}"), *(f"{k} {v}" for k, v in arm.config.extras.items())))
        frozen = w("yes") if arm.config.freeze in ("qk", "none") else arm.config.freeze
        rows.append(
            [name, start, f"{arm.config.qk_scale:.3g}" if arm.config.qk_scale else "–",
             w("no") if arm.trained else frozen,
             ", ".join(f"{rate:g}" for rate in arm.rates), ", ".join(map(str, arm.runs))]
        )  # fmt: skip
    yield Table([w(k) for k in ("arm", "qk_start", "qk_std", "frozen", "grid", "seeds")], rows)
    chosen = any(len(arm.rates) > 1 for arm in s.setting.judged.values())
    yield Text(w("controlled") + (w("chosen") if chosen else ""))


def _results(s: SettingVerdict, verdict: Verdict, w: Words) -> Iterator[Block]:
    split, score = w(s.setting.split), verdict.study.score
    rows = []
    for name, arm in s.setting.judged.items():
        runs = list(arm.runs.values())
        second = "test_bpb" if score is PERPLEXITY else "test_f1" if s.setting.split == "test" else "final_val_f1"
        bits = [run.summary[second] for run in runs if run.summary.get(second) is not None]
        rate = f"{arm.rate:g}" + (f" ({w('edge')})" if arm.at_edge else "")
        seeds = _listed([f"{seed}: {score.text(found)}" for seed, found in arm.scores.items()], w)
        judgement = s.judgements.get(name)
        other = s.setting.judged[judgement.against].scores if judgement else {}
        gaps = [f"{seed}: {_said(own - other[seed], score)}" for seed, own in arm.scores.items() if seed in other]
        shown = f"{statistics.fmean(bits):.3f}" if bits else "–"
        rows.append([name, rate, score.text(arm.score), seeds, shown, _listed(gaps, w)])
    headings = [w("arm"), w("rate"), w("test_ppl", split=split), w("per_seed"), w("bpb"), w("fair_per_seed")]
    yield Table(headings, rows)
    rows = []
    for name, judgement in s.judgements.items():
        noise = judgement.evaluation
        rows.append([
            name, show_gap(judgement.plain, score, w), show_gap(judgement.fair, score, w), judgement.against,
            w(judgement.fair.verdict), str(judgement.fair.seeds_needed or "–"),
            _bounds(*noise, score).strip() if noise else "–",
        ])  # fmt: skip
    keys = ("arm", "plain", "fair", "against", "judged", "needed", "noise")
    yield Table([w(key) for key in keys], rows)
    baseline = s.setting.judged[verdict.study.baseline]
    seed, first = next(iter(baseline.runs.items()))
    documents = w("documents", seed=seed, n=len(first.documents)) if first.documents is not None else ""
    yield Text(w("results_note") + documents)
    if score is ACCURACY:
        yield from answers.sections(s, verdict, w)


def show_gap(gap: Gap, score: Score, w: Words, unit: str = "") -> str:
    return _said(gap.mean, score) + unit + (_bounds(gap.low, gap.high, score) if gap.n > 1 else w("one_seed"))


def _bounds(low: float, high: float, score: Score) -> str:
    first, second = sorted((low, high), key=score.change)
    return f" [{_said(first, score)}, {_said(second, score)}]"


def _said(difference: float, score: Score) -> str:
    """A difference of scores as people say it, with a real minus."""
    return f"{round(score.change(difference), 1) + 0.0:+.1f}".replace("-", "−")


def _convergence(s: SettingVerdict, verdict: Verdict, w: Words) -> Iterator[Block]:
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
    rows = []
    for arm in s.setting.judged.values():
        cells = [arm.name]
        for share in SHARES:
            mine, other = _score_at(arm, share), _score_at(baseline, share)
            shared = mine.keys() & other.keys()
            gap = statistics.fmean(mine[seed] - other[seed] for seed in shared) if shared else 0.0
            shown = w("in_brackets", text=_said(gap, score)) if shared and arm is not baseline else ""
            cells.append(score.text(statistics.fmean(mine.values())) + shown if mine else "–")
        rows.append(cells)
    headings = [w("arm"), *(w("share", share=round(100 * share)) for share in SHARES)]
    yield Table(headings, rows, w("progress_table", baseline=baseline.name))


def _band(arm: Arm, position: Callable[[Run, int], float], score: Score) -> figures.Curve:
    runs = list(arm.runs.values())
    steps = sorted(set.intersection(*(set(run.curve) for run in runs)))
    x = np.array([statistics.fmean(position(run, step) for run in runs) for step in steps])
    highest = HIGHEST if score is PERPLEXITY else math.inf
    found = np.array([[min(run.curve[step], highest) for step in steps] for run in runs])
    middle, low, high = (np.vectorize(score.shown)(edge) for edge in (found.mean(0), found.min(0), found.max(0)))
    return x, middle, low, high


def _score_at(arm: Arm, share: float) -> dict[int, float]:
    """Validation score by seed at the validated step nearest to a share of the run, if within a twentieth of it."""
    losses = {}
    for seed, run in arm.runs.items():
        goal = share * run.config.max_steps
        step = min(run.curve, key=lambda step: abs(step - goal))
        if abs(step - goal) <= 0.05 * run.config.max_steps:
            losses[seed] = run.curve[step]
    return losses


def _trend(verdict: Verdict, w: Words) -> Iterator[Block]:
    yield Heading(w("trend"))
    names = list(dict.fromkeys(name for s in verdict.settings for name in s.judgements))
    settings = [s.setting.name for s in verdict.settings]
    some = [next(iter(s.setting.judged[verdict.study.baseline].runs.values())).summary for s in verdict.settings]
    seen = [[f"{summary['tokens_seen']:,}", f"{summary['epochs']:.2f}"] for summary in some]
    judged = {n: [s.judgements.get(n) for s in verdict.settings] for n in names}
    score = verdict.study.score
    for kind in ("plain", "fair"):
        found = {n: [getattr(j, kind) if j else None for j in row] for n, row in judged.items()}
        yield Figure(figures.trend(settings, found, score, verdict.study.criterion, w(kind)), w("trend_figure"))
        cells = [[show_gap(gap, score, w) if gap else "–" for gap in row] for row in zip(*found.values(), strict=True)]
        yield Text(w(kind))
        yield Table(
            [w("setting"), w("tokens_seen"), w("epochs"), *names],
            [[name, *numbers, *row] for name, numbers, row in zip(settings, seen, cells, strict=True)],
        )


def _ablation(s: SettingVerdict, verdict: Verdict, w: Words) -> Iterator[Block]:
    if not s.steps:
        return
    arms, score = s.setting.judged, verdict.study.score
    path = [arm for arm in ("baseline", "oelm_random", "oelm_matched", "oelm_v2") if arm in arms]
    seeds = set.intersection(*(set(arms[name].scores) for name in path)) if path else set()
    if path[:1] == ["baseline"] and len(path) > 1 and seeds:
        mean = {name: statistics.fmean(arms[name].scores[seed] for seed in seeds) for name in path}
        heights = [score.change(min(mean[name] - mean["baseline"], HIGHEST)) for name in path]
        labels = [f"{a} → {b}" for a, b in itertools.pairwise(path)]
        steps = [(label, *ends) for label, ends in zip(labels, itertools.pairwise(heights), strict=True)]
        better = -1 if score is PERPLEXITY else 1
        yield Figure(figures.waterfall(steps, w("ablation_axis"), better), w("ablation_figure"))
    rows = [[w(f"step_{name}"), " → ".join(STEPS[name]), show_gap(gap, score, w)] for name, gap in s.steps.items()]
    yield Table([w("what_changes"), w("from_to"), w("change")], rows)


def _rates(s: SettingVerdict, verdict: Verdict, w: Words) -> Iterator[Block]:
    arms = [arm for arm in s.setting.judged.values() if len(arm.by_rate) > 1]
    if not arms:
        return
    score = verdict.study.score
    found = {arm.name: {rate: _or_infinite(own, score) for rate, own in arm.rate_scores.items()} for arm in arms}
    chosen = {arm.name: arm.rate for arm in arms}
    shades = figures.colours(s.setting)
    yield Figure(figures.rates(found, chosen, shades, w("axis_rate"), w("axis_ppl")), w("rates_figure"))
    grid = sorted({rate for by_rate in found.values() for rate in by_rate})
    rows = [[arm.name, *(score.text(arm.rate_scores.get(rate)) for rate in grid)] for arm in arms]
    yield Table([w("arm"), *(f"{rate:g}" for rate in grid)], rows)


def _efficiency(s: SettingVerdict, verdict: Verdict, w: Words) -> Iterator[Block]:
    from oelm.model import cost

    rows = []
    for name, arm in s.setting.judged.items():
        runs = [run.summary for run in arm.runs.values()]
        judgement = s.judgements.get(name)
        bound = 1 / cost.speed_bound(arm.config)
        ratio = "1"
        if judgement:
            low, high = judgement.speed.bounds
            ratio = f"{judgement.speed.ratio:.2f}" + (f" [{low:.2f}, {high:.2f}]" if judgement.speed.n > 1 else "")
        rows.append([
            name, f"{runs[0]['trainable_parameters']:,}",
            f"{runs[0]['frozen_parameters'] / runs[0]['total_parameters']:.1%}",
            f"{1000 * statistics.median(run['median_step_seconds'] for run in runs):.1f}", ratio, f"{bound:.3f}",
            f"{statistics.median(run['peak_memory_bytes'] for run in runs) / 2**20:,.0f}",
            f"{runs[0]['checkpoint_bytes'] / 2**20:,.1f}",
        ])  # fmt: skip
    headings = ("arm", "trainable", "frozen", "step_time", "ratio", "bound", "memory", "checkpoint")
    yield Table([w(key) for key in headings], rows)
    yield Text(w("efficiency_note"))


def _published(verdict: Verdict, w: Words, published: Mapping[str, Mapping[str, Any]]) -> Iterator[Block]:
    """The published figures beside the runs whose id, or folder, begins with theirs."""
    yield Heading(w("published"))
    rows = []
    for key, figure in published.items():
        run = next((run for run in verdict.study.runs if run.folder.path.name.startswith(key)), None)
        other = published.get(str(figure.get("against")))
        gap = _said(math.log(figure["ppl"] / other["ppl"]), PERPLEXITY) + " %" if other else "–"
        mine = w("not_run")
        if run is not None:
            final = run.score("val")
            shown = run.measure.text(final) if final < math.inf else w(f"state_{run.status.state}")
            mine = shown + "".join(w("in_brackets", text=text) for text in [_other_settings(run, figure)] if text)
        rows.append(
            [key, figure["dataset"], figure["arm"], f"{figure['max_lr']:g}", f"{figure['steps']:,}",
             f"{figure['ppl']:.4f}", gap, INCONCLUSIVE if other else "–", mine]
        )  # fmt: skip
    keys = ("run", "setting", "arm", "rate", "axis_steps", "published_ppl", "published_gap", "judged", "ours")
    yield Table([w(key) for key in keys], rows)
    yield Text(w("published_note"))


def _other_settings(run: Run, figure: Mapping[str, Any]) -> str:
    """What a run does otherwise than the published one of its name."""
    mine = {"dataset": run.config.dataset, "arm": run.config.model_type, "max_lr": run.config.max_lr,
            "steps": run.config.max_steps}  # fmt: skip
    alike = {"dataset": str(figure["dataset"]).lower().replace("-", "")}
    return ", ".join(f"{key} {value}" for key, value in mine.items() if value != alike.get(key, figure[key]))


def _reproduce(verdict: Verdict, w: Words) -> Iterator[Block]:
    study = verdict.study
    yield Heading(w("reproduce"))
    parts = [run.environment[-1] for run in study.runs if run.environment]
    if parts:
        facts = {key: ", ".join(sorted({str(part.get(key))[:12] for part in parts if part.get(key)})) or "?"
                 for key in ("oelm", "git", "torch", "python")}  # fmt: skip
        yield Text(w("reproduce_text", version=facts["oelm"], commit=facts["git"], device=_devices(parts, w),
                     torch=facts["torch"], python=facts["python"]))  # fmt: skip
    for name, tokenizer, labels in dict.fromkeys(
        (r.config.dataset, _tokenizer(r), tuple(map(str, r.data.get("labels", [])))) for r in study.runs
    ):
        yield Code(prepare_command(name, tokenizer, f"data/{name}", labels))
    home = Path("outputs") / study.root.resolve().name
    for plan in study.plans:
        place = home / plan.out.relative_to(study.root)
        yield Code(f"oelm run {quote(plan.name)}.toml --out {quote(str(place))}")
        yield Text(f"{plan.name}.toml:")
        yield Code(plan.text().rstrip())
    if not study.plans:
        runs = [(quote(run.id), quote(str(home / run.id))) for run in study.runs]
        yield Code("\n".join(f"oelm train {name}/config.toml --out_dir {place}" for name, place in runs))
    yield Code(f"oelm report {quote(str(home))} --lang {w.language}")
    for setting in study.settings:
        data: Mapping[str, Any] = setting.values["data"]
        source, tokenizer = str(data.get("source_hash", ""))[:16], str(data.get("tokenizer_hash", ""))[:16]
        yield Text(w("hashes", setting=setting.name, source=source or "?", tokenizer=tokenizer or "?"))


def _tokenizer(run: Run) -> str:
    name = str(run.data.get("tokenizer", ""))
    return name if name != "encoder" else run.config.arch if encoders.is_pretrained(run.config.arch) else "ENCODER"


def _devices(parts: list[dict[str, Any]], w: Words) -> str:
    return "; ".join(sorted({f"{p.get('device_name')}{w('threads', n=p.get('threads'))}" for p in parts}))


def _or_infinite(found: float, score: Score) -> float:
    """For a picture."""
    return math.inf if found == math.inf else score.shown(min(found, HIGHEST) if score is PERPLEXITY else found)


def _val(status: RunStatus) -> str:
    if status.val_accuracy is not None:
        return f"{status.val_accuracy:.2%}"
    return "" if status.val_ppl is None else PERPLEXITY.text(math.log(status.val_ppl))


TITLES: dict[Any, str] = {
    _setting: "setting", _results: "results", _convergence: "convergence", _ablation: "ablation",
    _rates: "rates_title", _efficiency: "efficiency",
}  # fmt: skip
