"""What the report says, as blocks: verdict first, then how it was reached, then every run."""

import math
import statistics
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from oelm import __version__, encoders
from oelm.config import RunConfig
from oelm.lab.score import ACCURACY, PERPLEXITY, signed
from oelm.lab.stats import FAIL, INCONCLUSIVE, PASS
from oelm.lab.status import RunStatus
from oelm.lab.verdict import SettingVerdict, Verdict, deciding
from oelm.machine import when
from oelm.report import answers, curves, figures, origin
from oelm.report.blocks import Block, Document, Figure, Heading, Items, Notice, Table, Text
from oelm.report.pages import run_pages
from oelm.report.said import listed, show_gap
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


def compose(verdict: Verdict, w: Words, published: Mapping[str, Mapping[str, Any]] | None = None) -> Document:
    study = verdict.study
    date = f"{datetime.now():%Y-%m-%d %H:%M}"
    blocks: list[Block] = [*_verdict(verdict, w)]
    if study.unfinished:
        blocks += _status(verdict, w)
    for section, title in SECTIONS.items():
        for i, s in enumerate(verdict.settings):
            found = list(section(s, verdict, w))
            if found and i == 0:
                blocks.append(Heading(w(title)))
            if found and len(verdict.settings) > 1:
                blocks.append(Heading(s.setting.name, 3))
            blocks += found
        if section is curves.convergence and len(verdict.settings) > 1:
            blocks += curves.trend(verdict, w)
    blocks.append(Heading(w("threats")))
    threats = [threat.text(w.language) for threat in verdict.threats]
    blocks.append(Items(threats) if threats else Text(w("no_threats")))
    if published:
        blocks += origin.published(verdict, w, published)
    blocks += origin.reproduce(verdict, w, " --against published" if published else "")
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
        yield Notice(w("interim", ended=study.ended, total=study.total))
    if not verdict.settings:
        yield Text(w("nothing", baseline=study.baseline), strong=True)
        return
    words = {PASS: "pass", FAIL: "fail", INCONCLUSIVE: "inconclusive"}
    headline = words[verdict.overall] if verdict.arms else "no_frozen"
    judged = ((s.setting, name) for s in verdict.settings for name in deciding(s.setting, study.baseline))
    if headline == "fail" and any(setting.arms[name].diverged for setting, name in judged):
        headline = "fail_diverged"
    yield Text(w(headline, arms=listed(verdict.passing, w), bar=bar), strong=True)
    several = len(verdict.settings) > 1
    split = " / ".join(dict.fromkeys(w(s.setting.split) for s in verdict.settings))
    yield Items([line for s in verdict.settings for line in _standings(s, verdict, w, several)])
    rows = [
        (f"{name} · {s.setting.name}" if several else name, judgement.fair)
        for s in verdict.settings
        for name, judgement in s.judgements.items()
    ]
    if rows:  # else every other arm diverged
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
            why = "diverged" if arm.diverged else "no_partner" if arm.finished() else "not_finished"
            yield w("standing_none", arm=shown, why=w(why))
            continue
        needed = w("standing_seeds", n=judgement.fair.seeds_needed) if judgement.fair.seeds_needed else ""
        gap = show_gap(judgement.fair, verdict.study.score, w, f" {w('unit')}")
        yield w("standing", arm=shown, gap=gap, against=judgement.against, verdict=w(judgement.fair.verdict),
                needed=needed)  # fmt: skip


def _status(verdict: Verdict, w: Words) -> Iterator[Block]:
    yield Heading(w("status"))
    rows = [
        [
            s.id, s.arm, w(f"state_{s.state}") + (f": {s.reason}" if s.reason else ""),
            f"{s.step:,} / {f'{s.max_steps:,}' if s.max_steps else '?'}",
            when(s.started), when(s.finished), _val(s),
            f"{signed(100 * s.gap)} {w('unit')}" if s.gap is not None else "",
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
                 clip=config.grad_clip, schedule=w(f"schedule_{config.schedule}"),
                 warmup=config.warmup_steps))  # fmt: skip
    rows = []
    for name, arm in s.setting.judged.items():
        added = [f"{k} {v}" for k, v in arm.config.extras.items()]
        start = w("then").join((w(f"frames_{arm.config.frames}"), *added))
        above = f"qk@{arm.config.sliced_from}-" if arm.config.sliced_from else w("yes")
        frozen = above if arm.config.freeze in ("qk", "none") else arm.config.freeze
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
        seeds = listed([f"{seed}: {score.text(found)}" for seed, found in arm.scores.items()], w)
        judgement = s.judgements.get(name)
        other = s.setting.judged[judgement.against].scores if judgement else {}
        gaps = [f"{seed}: {score.said(own - other[seed])}" for seed, own in arm.scores.items() if seed in other]
        shown = f"{statistics.fmean(bits):.3f}" if bits else "–"
        rows.append([name, rate, score.text(arm.score), seeds, shown, listed(gaps, w)])
    headings = [w("arm"), w("rate"), w("test_ppl", split=split), w("per_seed"), w("bpb"), w("fair_per_seed")]
    yield Table(headings, rows)
    rows = []
    for name, judgement in s.judgements.items():
        noise = judgement.evaluation
        rows.append([
            name, show_gap(judgement.plain, score, w), show_gap(judgement.fair, score, w), judgement.against,
            w(judgement.fair.verdict), str(judgement.fair.seeds_needed or "–"),
            score.said_bounds(*noise).strip() if noise else "–",
        ])  # fmt: skip
    keys = ("arm", "plain", "fair", "against", "judged", "needed", "noise")
    yield Table([w(key) for key in keys], rows)
    baseline = s.setting.judged[verdict.study.baseline]
    seed, first = next(iter(baseline.runs.items()))
    documents = w("documents", seed=seed, n=len(first.documents)) if first.documents is not None else ""
    yield Text(w("results_note") + documents)
    if score is ACCURACY:
        yield from answers.sections(s, verdict, w)


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
            _frozen_share(arm.config, runs[0]),
            f"{1000 * statistics.median(run['median_step_seconds'] for run in runs):.1f}", ratio, f"{bound:.3f}",
            f"{statistics.median(run['peak_memory_bytes'] for run in runs) / 2**20:,.0f}",
            f"{runs[0]['checkpoint_bytes'] / 2**20:,.1f}",
        ])  # fmt: skip
    headings = ("arm", "trainable", "frozen_share", "step_time", "ratio", "bound", "memory", "checkpoint")
    yield Table([w(key) for key in headings], rows)
    yield Text(w("efficiency_note"))


def _frozen_share(config: RunConfig, summary: Mapping[str, Any]) -> str:
    """Of all parameters; from the least to the most where it changes in the course of a run."""
    if config.policy.constant:
        return f"{summary['frozen_parameters'] / summary['total_parameters']:.1%}"
    from oelm.model import cost

    shares = sorted(1 - phase["trainable"] / summary["total_parameters"] for phase in cost.phases(config))
    return f"{shares[0]:.1%} – {shares[-1]:.1%}" if shares[0] != shares[-1] else f"{shares[0]:.1%}"


def _val(status: RunStatus) -> str:
    if status.val_accuracy is not None:
        return f"{status.val_accuracy:.2%}"
    return "" if status.val_ppl is None else PERPLEXITY.text(math.log(status.val_ppl))


SECTIONS: dict[Any, str] = {
    _setting: "setting", _results: "results", curves.convergence: "convergence", curves.ablation: "ablation",
    curves.rates: "rates_title", _efficiency: "efficiency",
}  # fmt: skip
"""What is said of each setting, and under which heading."""
