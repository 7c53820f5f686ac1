"""Forty freezing policies and extras as tiny runs: who is trained at which step, and bits that survive kills.

    python -m tests.programmes.policies

For every policy: the trainable set is what the arithmetic here says at every update; frozen bits do not
change while frozen; a run killed with SIGKILL just before and just after each change of phase ends in the bits
of an uninterrupted one; two processes under torchrun reach the single process's losses within 1e-5. Those of
COMPILED reach the same losses within 1e-4 when they are compiled.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from oelm.config import RunConfig, resolve
from oelm.train import metrics
from oelm.train.folder import RunFolder
from oelm.train.step import Update
from tests.conftest import make_data
from tests.programmes.kill_resume import exit_code, fingerprint, start

STEPS, LAYERS = 20, 4
SETTINGS: dict[str, Any] = dict(
    preset="tiny", num_layers=LAYERS, max_steps=STEPS, val_interval=3, save_interval=20, warmup_steps=2, threads=1,
    dropout=0.1, micro_batch=2, device="cpu", frames="orthogonal",
)  # fmt: skip

Rule = Callable[[str, int, int], bool]
"""Whether (part, layer, step) is frozen; part is q, k, v, o, ffn, … and layer -1 where there is none."""


def part(name: str) -> tuple[str, int]:
    pieces = name.split(".")
    if pieces[0] != "blocks":
        return ("embeddings" if pieces[0] in ("tokens", "positions") else "norm"), -1
    which = pieces[3] if pieces[2] == "attention" and pieces[-1] == "weight" else pieces[2]
    return which, int(pieces[1])


def only(
    *parts: str, layers: range | tuple[int, ...] = range(-1, LAYERS), when: Callable[[int], bool] = lambda s: True
):
    return lambda which, layer, step: which in parts and layer in layers and when(step)


POLICIES: list[tuple[str, Rule, dict[str, Any]]] = [
    ("none", only(), {}),
    ("q", only("q"), {}),
    ("k", only("k"), {}),
    ("qk", only("q", "k"), {}),
    ("v", only("v"), {}),
    ("o", only("o"), {}),
    ("ffn", only("ffn"), {}),
    ("embeddings", only("embeddings"), {}),
    ("*norm*", lambda which, layer, step: which == "norm" or which.endswith("_norm"), {}),
    ("qk@1-3", only("q", "k", layers=(1, 2, 3)), {}),
    ("qk@0,2", only("q", "k", layers=(0, 2)), {}),
    ("qk@top0.25", only("q", "k", layers=(3,)), {}),
    ("qk@bottom0.5", only("q", "k", layers=(0, 1)), {}),
    ("qk@top3; v@0", lambda w, n, s: (w in ("q", "k") and n > 0) or (w, n) == ("v", 0), {}),
    ("qk:until0.5", only("q", "k", when=lambda s: s < 10), {}),
    ("q:until0.3", only("q", when=lambda s: s < 6), {}),
    ("ffn:until0.25", only("ffn", when=lambda s: s < 5), {}),
    ("embeddings:until0.5", only("embeddings", when=lambda s: s < 10), {}),
    ("qk:last0.2", only("q", "k", when=lambda s: s < 16), {}),
    ("qk:from0.1", only("q", "k", when=lambda s: s >= 2), {}),
    ("qk:from0.35+polar", only("q", "k", when=lambda s: s >= 7), {}),
    ("qk:from0.35+polar-scale", only("q", "k", when=lambda s: s >= 7), {}),
    ("k@1-3:from0.5+polar", only("k", layers=(1, 2, 3), when=lambda s: s >= 10), {}),
    ("qk:every4", only("q", "k", when=lambda s: (s + 1) % 4 != 0), {}),
    ("v:every3", only("v", when=lambda s: (s + 1) % 3 != 0), {}),
    # the top layer (3) thaws at 0.2, then one after the other until the lowest at 0.8
    ("qk:topdown0.2-0.8", lambda w, n, s: w in ("q", "k") and s < (16, 12, 8, 4)[n], {}),
    ("qk:bottomup0.2-0.8", lambda w, n, s: w in ("q", "k") and s < (4, 8, 12, 16)[n], {}),
    ("qk@1-3; qk@0:until0.5", lambda w, n, s: w in ("q", "k") and (n > 0 or s < 10), {}),
    ("qk:every2; ffn:until0.5", lambda w, n, s: (w in ("q", "k") and s % 2 == 0) or (w == "ffn" and s < 10), {}),
    ("qk", only("q"), {"tie_qk": True, "key_shift": 1.0}),
    ("qk", only("q", "k"), {"key_shift": 0.5, "core": True}),
    ("qk", only("q", "k"), {"key_conv": 3, "qk_gain": True}),
    ("qk", only("q", "k"), {"lora": 2, "temperature": True}),
    ("qk", only("q", "k"), {"qk_norm": True, "qk_bias": True}),
    ("qk", only("q", "k"), {"relative_bias": True}),
    ("qk", only("q", "k"), {"rope": "half"}),
    ("qk@1-3", only("q", "k", layers=(1, 2, 3)), {"rope": "full", "key_shift": 1.0, "core": True}),
    ("qk", only(), {"frames": "sliced", "key_shift": 1.0, "core": True}),
    ("qk:until0.5", only("q", "k", when=lambda s: s < 10), {"lora": 2, "lr_scale": "qk=0.1, ffn=2"}),
    ("qk", only("q", layers=(0,)), {"frames": "shared", "tie_qk": True}),
]


TWO_PROCESSES = (
    [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "oelm"],
    ["--batch_size=2"],
)
"""Half of the batch each."""
COMPILED = ("qk:until0.5", "qk:from0.35+polar", "qk:every4", "qk:topdown0.2-0.8")


def configure(data: Path, out: Path, index: int) -> RunConfig:
    freeze, _, extra = POLICIES[index]
    return resolve({**SETTINGS, **extra, "freeze": freeze, "data_path": str(data), "out_dir": str(out)})


def watched(config: RunConfig, kill_before: int | None = None, kill_after: int | None = None) -> int:
    """Fork a run that writes down who is trained at each update, and may kill itself around one."""
    note = config.folder.with_name(config.folder.name + ".trained")
    original = Update.apply
    done = [0]

    def apply(self: Update, rate: float) -> None:
        with open(note, "a") as file:
            names = [name for name, p in self.model.named_parameters() if p.requires_grad]
            graded = [name for name, p in self.model.named_parameters() if p.grad is not None]
            file.write(json.dumps({"trained": names, "graded": graded}) + "\n")
        if done[0] == kill_before:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, rate)
        if done[0] == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        done[0] += 1

    Update.apply = apply  # type: ignore[method-assign]
    try:
        return start(config, resume=False)
    finally:
        Update.apply = original  # type: ignore[method-assign]


def check(data: Path, root: Path, index: int, torchrun: bool) -> dict[str, Any]:
    """Everything the programme says of one policy; raises AssertionError where it does not hold."""
    torch.set_num_threads(1)
    freeze, rule, extra = POLICIES[index]
    whole = configure(data, root / f"whole{index}", index)
    assert exit_code(watched(whole)) == 0
    lines = [json.loads(x) for x in whole.folder.with_name(f"whole{index}.trained").read_text().splitlines()]
    everyone = {name for line in lines for name in line["trained"]} | set(_frozen_file(whole))
    for step, line in enumerate(lines):
        expected = {name for name in everyone if not rule(*part(name), step)}
        assert set(line["trained"]) == expected, f"{freeze}: update {step}"
        assert set(line["graded"]) <= expected, f"{freeze}: gradients at update {step}"
    audit = [json.loads(x) for x in RunFolder(whole.folder).audit.read_text().splitlines()]
    expected_bits = fingerprint(RunFolder(whole.folder))
    kills = 0
    for change in sorted({record["step"] for record in audit} - {0}) or [STEPS // 2]:
        for before, after in ((change - 1, None), (None, change - 1), (change, None), (None, change)):
            cut = configure(data, root / f"cut{index}-{kills}", index)
            assert exit_code(watched(cut, before, after)) == -signal.SIGKILL
            assert exit_code(start(cut, resume=True)) == 0
            assert fingerprint(RunFolder(cut.folder)) == expected_bits, f"{freeze}: killed around update {change}"
            kills += 1
    if torchrun:
        assert apart(data, root, index, *TWO_PROCESSES) <= 1e-5, f"{freeze}: two processes"
        if freeze in COMPILED and not extra:
            assert apart(data, root, index, [], ["--compile"]) <= 1e-4, f"{freeze}: compiled"
    return {"phases": len(audit), "kills": kills}


def _frozen_file(config: RunConfig) -> list[str]:
    from safetensors import safe_open

    path = RunFolder(config.folder).frozen
    if not path.exists():
        return []
    with safe_open(path, "pt") as file:
        return list(file.keys())


def apart(data: Path, root: Path, index: int, launcher: list[str], flags: list[str]) -> float:
    """Largest relative difference of a training loss between a plain run and one that is started otherwise."""
    plain = [sys.executable, "-m", "oelm"]
    losses = []
    for number, (start_with, more) in enumerate([(plain, []), (launcher or plain, flags)]):
        config = configure(data, root / f"apart{index}-{len(flags[0])}-{number}", index)
        words = [f"--{k}={v}" for k, v in config.model_dump().items() if k not in ("processes", "model_type", "preset")]
        command = [*start_with, "train", *words, "--dropout=0", *more]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        losses.append([record["loss"] for record in metrics.read(RunFolder(config.folder).metrics, "train")])
    return max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of policies")
    parser.add_argument("--no_torchrun", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        data = make_data(root / "data")
        for index in options.only or range(len(POLICIES)):
            found = check(data, root, index, not options.no_torchrun)
            freeze, _, extra = POLICIES[index]
            print(f"{index}: {freeze} {extra or ''}: {found}", flush=True)


if __name__ == "__main__":
    main()
