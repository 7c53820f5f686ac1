"""`oelm inspect`: what an arm is and costs, as a table or JSON."""

import json

from rich.console import Console
from rich.table import Table

from oelm import encoders
from oelm.arms import ARMS
from oelm.config import RunConfig
from oelm.errors import UserError
from oelm.tables import table


def show_arms(as_json: bool) -> None:
    if as_json:
        kinds = {"drawn": False, "pretrained": True}
        every = {kind: {name: arm.settings_for(is_) for name, arm in ARMS.items()} for kind, is_ in kinds.items()}
        print(json.dumps(every, indent=2))
        return
    for heading, pretrained in (("in a GPT, or any drawn model", False), ("in a pretrained encoder", True)):
        rows = []
        for name, arm in ARMS.items():
            found = arm.settings_for(pretrained)
            if found is not None and found.get("frames") not in (("shared", "sliced") if pretrained else ()):
                settings = ", ".join(f"{key} {value}" for key, value in found.items())
                rows.append((name, settings, (arm.about_pretrained if pretrained else "") or arm.about))
        Console().print(table(("arm", "settings", heading), rows, words=3), "")


def show_cost(config: RunConfig, as_json: bool) -> None:
    from oelm.data.fit import open_fitting
    from oelm.model import cost

    steps = ""
    if config.num_epochs:
        try:
            config = open_fitting(config)[0]
        except UserError:
            steps = f" (of {config.max_steps:,} steps: the data, which are not here, would tell)"
    report = cost.report(config)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console(highlight=False)
    console.print(
        f"[bold]{config.model_type}[/] at {config.preset}: {config.attention}; "
        f"batch {config.micro_batch or config.batch_size} x {config.seq_len}\n"
    )
    counts = ("total", "trainable", "frozen")
    parts = table(("part", *counts), [[row["part"], *(f"{row[key]:,}" for key in counts)] for row in report["parts"]])
    parts.add_section()
    parts.add_row("all", *(f"{report[key]:,}" for key in counts), style="bold")
    none = "" if any(row["part"] in ("attention q", "attention k") for row in report["parts"]) else " (there is none)"
    phases = [
        (f"{row['step']:,}", f"{len(row['frozen'])}{' (most steps)' if row['rests'] else ''}",
         f"{row['qk_share']:.0%}{none}", f"{row['trainable']:,}")
        for row in report["phases"]
    ]  # fmt: skip
    console.print(parts, table(("\nfrom step", "\nfrozen tensors", "\nof Q/K matrices", "\ntrainable"), phases), steps)
    flops, bounds = report["flops_per_token"], report["bounds"]
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column()
    facts.add_column(justify="right")
    facts.add_row("\nFLOPs per token, forward", f"\n{flops['forward'] / 1e6:,.1f} M")
    facts.add_row("FLOPs per token, backward", f"{flops['backward'] / 1e6:,.1f} M")
    half = ", causal half of the attention only" if config.arch == encoders.GPT else ""
    facts.add_row(f"  both{half}", f"{flops['step_causal'] / 1e6:,.1f} M")
    facts.add_row("checkpoint (weights + Adam)", f"{report['checkpoint_bytes'] / 2**20:,.1f} MiB")
    facts.add_row("frozen frames, written once", f"{report['frozen_file_bytes'] / 2**20:,.1f} MiB")
    facts.add_row("activations kept for backward, float32", f"{report['activation_bytes'] / 2**20:,.1f} MiB")
    facts.add_row("this arm's step can be faster than the baseline's by at most", f"{cost.speed_bound(config):.3f} x")
    facts.add_row("  ... freezing all Q/K", f"{bounds['no_qk_weight_gradient']:.3f} x")
    facts.add_row("  ... if the projections cost nothing at all", f"{bounds['free_qk_projection']:.3f} x")
    console.print(facts)
