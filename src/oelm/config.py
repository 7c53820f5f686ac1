"""The run config: one flat, typed source of truth for flags, TOML files and run folders.

A setting has one name everywhere: the flag `--max_lr` (or `--max-lr`), the TOML key `max_lr`, the
attribute `config.max_lr`. Values resolve as defaults < preset < arm < file < flag, and the whole
result is written to `config.toml` in the run folder.
"""

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import ValidationError, model_validator

from oelm import encoders
from oelm.arms import ARMS
from oelm.errors import UserError, nearest
from oelm.fields import ArmFields, DataFields, ModelFields, OptimFields, RunFields
from oelm.policy import Policy, parse_rates
from oelm.policy import parse as parse_policy

INIT_STD = 0.02
"""Of every matrix that is not a frame, as published."""


class RunConfig(RunFields, OptimFields, DataFields, ModelFields):
    """Everything that decides what a run computes, checked."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.d_model % self.num_heads:
            divisors = [n for n in range(1, 129) if self.d_model % n == 0]
            near = min(divisors, key=lambda n: abs(n - self.num_heads))
            raise ValueError(f"num_heads {self.num_heads} does not divide d_model {self.d_model}: try {near}")
        if self.min_lr > self.max_lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above max_lr {self.max_lr:g}: swap or lower it")
        if self.rope != "none" and self.d_head % 4:
            raise ValueError(f"rope needs a d_head that 4 divides, not {self.d_head}")
        if self.sliced_from >= self.num_layers or (self.sliced_from and self.frames != "sliced"):
            raise ValueError(
                f"sliced_from {self.sliced_from}: there is no sliced layer; the layers are 0 to {self.num_layers - 1}"
            )
        if self.frames == "sliced" and (self.lora or self.qk_bias or self.tie_qk):
            raise ValueError("sliced frames have no Q/K matrices: leave lora, qk_bias and tie_qk out")
        if self.sliced_keys != "tied" and self.frames != "sliced":
            raise ValueError(f"sliced_keys {self.sliced_keys}: frames {self.frames} are not sliced")
        if self.key_shift and not round(self.key_shift * self.d_head):
            raise ValueError(f"key_shift {self.key_shift:g}: of {self.d_head} channels of a head that is none")
        for name, parse in (("freeze", lambda: self.policy), ("lr_scale", lambda: parse_rates(self.lr_scale))):
            try:
                parse()
            except ValueError as error:
                raise ValueError(f"{name} {getattr(self, name)}: {error}") from None
        self._fits_architecture()
        if self.micro_batch and self.batch_size % self.micro_batch:
            raise ValueError(f"micro_batch {self.micro_batch} does not divide batch_size {self.batch_size}")
        return self

    def _fits_architecture(self) -> None:
        reads = ("pretrained", "factor", "factor-scale")
        if not encoders.is_pretrained(self.arch) and self.frames in reads:
            raise ValueError(f"frames {self.frames} are of a pretrained encoder: {self.arch} is drawn (see --arch)")
        if self.arch == encoders.GPT:
            return
        if self.frames in ("shared", "sliced") or self.extras or self.tie_qk:
            what = f"frames {self.frames}" if self.frames in ("shared", "sliced") else next(iter(self.extras), "tie_qk")
            raise ValueError(f"{what} is for arch gpt: an encoder's attention stays as its library has it")

    @property
    def d_head(self) -> int:
        return self.d_model // self.num_heads

    @property
    def qk_scale(self) -> float:
        """Standard deviation of the entries of Q/K at the start; 0 stands for the pretrained ones' own."""
        if self.frames in ("pretrained", "factor-scale"):
            return 0.0
        return INIT_STD if self.frames == "normal" else self.d_model**-0.5

    @property
    def arm(self) -> str:
        """The arm's name; what was changed about it stands behind, unless it has a label of its own."""
        defaults = {key: type(self).model_fields[key].default for key in ARM_KEYS}
        usual = {**defaults, **(ARMS[self.model_type].settings_for(encoders.is_pretrained(self.arch)) or {})}
        changed = [f"{key}={getattr(self, key)}" for key in ARM_KEYS if getattr(self, key) != usual[key]]
        return self.label or "+".join([self.model_type, *changed])

    @property
    def policy(self) -> Policy:
        return parse_policy(self.freeze, self.num_layers, self.max_steps)

    @property
    def trains_qk(self) -> bool:
        """Nothing is ever frozen, and no matrix left out: a baseline, with or without extras."""
        return not self.policy.clauses and self.frames != "sliced"

    @property
    def extras(self) -> dict[str, Any]:
        """What is added to the attention, where it is not the default."""
        return {
            key: getattr(self, key) for key in EXTRAS if getattr(self, key) != ModelFields.model_fields[key].default
        }

    @property
    def attention(self) -> str:
        """How it is made, in words."""
        added = [f"{key} {value}" for key, value in self.extras.items()]
        return ", ".join([f"frames {self.frames}", f"freeze {self.freeze}", *added])

    @property
    def freezes_qk(self) -> bool:
        """Some Q/K matrix is frozen for some time, or not there."""
        return self.frames == "sliced" or self.policy.touches_qk(encoder=self.arch != encoders.GPT)

    @property
    def additions(self) -> dict[str, Any]:
        """What a comparison has to share: the extras, and rates of parts other than Q/K, which is what is compared."""
        rates = {what: rate for what, rate in parse_rates(self.lr_scale).items() if what not in ("q", "k", "qk")}
        return {**self.extras, **({"lr_scale": rates} if rates else {})}

    @property
    def windows_per_step(self) -> int:
        return self.batch_size * self.processes

    @property
    def tokens_per_step(self) -> int:
        return self.windows_per_step * self.seq_len

    @property
    def folder(self) -> Path:
        arm = re.sub(r"[^\w.+=-]+", "-", self.arm).encode()[:100].decode(errors="ignore")
        return Path(self.out_dir or f"outputs/{self.dataset}_{arm}_seed{self.seed}")

    def replace(self, **values: Any) -> "RunConfig":
        return build({**self.model_dump(), **values})

    def identity(self) -> str:
        """Hash of the settings that decide what is computed, as against where and how."""
        values = {key: value for key, value in self.model_dump().items() if key not in OPERATIONAL}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump())


ARM_KEYS = tuple(key for key in ArmFields.model_fields if key not in ("model_type", "label"))
"""What makes an arm."""
EXTRAS = ARM_KEYS[ARM_KEYS.index("key_shift") :]
"""Additions to the attention that a baseline can have, too."""

PRESETS: dict[str, dict[str, Any]] = {
    "medium-512": {},
    "pocket": dict(
        vocab_size=1024, d_model=128, num_layers=4, num_heads=4, d_ff=512, seq_len=128, dropout=0.0,
        batch_size=16, max_lr=4e-3, max_steps=2_000, warmup_steps=100, val_interval=250, save_interval=1_000,
    ),
    "tiny": dict(
        vocab_size=257, d_model=32, num_layers=2, num_heads=2, d_ff=64, seq_len=32, dropout=0.0,
        batch_size=4, max_lr=4e-3, max_steps=100, warmup_steps=10, val_interval=50, save_interval=100,
    ),
    "encoder": dict(
        seq_len=128, dropout=0.1, batch_size=16, max_lr=2e-5, num_epochs=3.0, warmup_steps=100, val_interval=1_000,
        save_interval=5_000,
    ),
}  # fmt: skip
"""The shape of an encoder is its own; see `arch`."""
PRESET_KEYS = frozenset(key for preset in PRESETS.values() for key in preset)

# What may change between the parts of an interrupted run without changing what it computes.
OPERATIONAL = frozenset(
    {"out_dir", "data_path", "save_interval", "keep_saves", "log_interval", "num_workers", "device", "micro_batch",
     "threads", "compile", "use_amp", "label", "use_test"}
)  # fmt: skip


LENGTHS = ("max_steps", "num_epochs")
"""Two ways to say how long a run is; no epochs means that it is in steps."""


def resolve(flags: Mapping[str, Any], file: Mapping[str, Any] | None = None) -> RunConfig:
    """Defaults < preset < arm < file < flags, as one checked config.

    Where a flag picks another arm or preset than the file, what the file's own arm or preset had
    brought along is dropped: `oelm train old/config.toml --model_type oelm_v2` is a whole oelm_v2.
    """
    file = {key.replace("-", "_"): value for key, value in (file or {}).items()}
    for key in (*file, *flags):
        if key not in RunConfig.model_fields:
            raise UserError(f"unknown setting {key}: {nearest(key, RunConfig.model_fields)}")
    arch = str(flags.get("arch", file.get("arch", encoders.GPT)))
    usual = "medium-512" if arch == encoders.GPT else "encoder"
    preset = str(flags.get("preset", file.get("preset", usual)))
    arm = str(flags.get("model_type", file.get("model_type", "baseline")))
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset}: {nearest(preset, PRESETS)}")
    if arm not in ARMS:
        raise UserError(f"unknown arm {arm} (--model_type): {nearest(arm, ARMS)}")
    if file.get("model_type", arm) != arm:
        file = {key: value for key, value in file.items() if key not in (*ARM_KEYS, "label")}
    if file.get("preset", preset) != preset:
        file = {key: value for key, value in file.items() if key not in PRESET_KEYS}
    # A run's own config says the shape itself: the encoder that it began with may have gone.
    shape = {} if arch == file.get("arch") and encoders.NAMES.keys() <= file.keys() else encoders.shape_of(arch)
    settings = ARMS[arm].settings_for(encoders.is_pretrained(arch))
    if settings is None:
        raise UserError(f"the arm {arm} is for pretrained encoders: name one with --arch")
    found = {**overlay(overlay({**PRESETS[preset], **shape, **settings}, file), flags), "preset": preset}
    if shape and "seq_len" not in {*file, *flags}:
        found["seq_len"] = min(found["seq_len"], encoders.longest(arch))
    config = build(found)
    if flags.keys() >= {*LENGTHS} and config.num_epochs:
        raise UserError("--max_steps and --num_epochs both say how long the run is: give one of them")
    other = next((key for key in shape if key != "vocab_size" and getattr(config, key) != shape[key]), None)
    if other:
        raise UserError(f"{other} {found[other]}: arch {arch} has {shape[other]}")
    if shape and config.seq_len > encoders.longest(arch):
        raise UserError(f"seq_len {config.seq_len}: {arch} has positions for {encoders.longest(arch)}")
    return config


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of both; `above` wins, and whichever way it says how long a run is, so it does over the other."""
    says = "max_steps" in above or not _is_zero(above.get("num_epochs", 0))
    return {**{key: value for key, value in below.items() if not (says and key in LENGTHS)}, **above}


def _is_zero(value: Any) -> bool:
    """Of a file or a command line; what is no number at all is refused later."""
    try:
        return float(value) == 0
    except (TypeError, ValueError):
        return False


def build(values: Mapping[str, Any]) -> RunConfig:
    """Check `values`; the first thing wrong becomes the message."""
    for key, value in values.items():
        field = RunConfig.model_fields.get(key)
        if isinstance(value, bool) and field and field.annotation is not bool:
            raise UserError(f"{key} {value}: must be a number or text, not true or false")
    try:
        return RunConfig(**values)
    except ValidationError as error:
        raise UserError(_explain(error)) from None


def load_toml(path: Path) -> dict[str, Any]:
    """The flat table of settings in a TOML file."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise UserError(f"no such config file: {path}") from None
    except OSError as error:
        raise UserError(f"cannot read config file {path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def _explain(error: ValidationError) -> str:
    problem = error.errors()[0]
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if not problem["loc"]:
        return message
    field = str(problem["loc"][0])
    value = problem["input"]
    shown = f"{value:g}" if isinstance(value, float) and math.isfinite(value) else repr(value)[:60]
    return f"{field} {shown}: must be {message}"
