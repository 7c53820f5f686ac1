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
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from oelm import encoders
from oelm.arms import ARMS
from oelm.errors import UserError, nearest
from oelm.policy import Policy, parse_rates
from oelm.policy import parse as parse_policy

INIT_STD = 0.02
"""Of every matrix that is not a frame, as published."""

Count = Annotated[int, Field(ge=0, le=10**9)]
Positive = Annotated[int, Field(gt=0, le=10**9)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class _Fields(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ArmFields(_Fields):
    """Arm"""

    model_type: str = "baseline"
    """Arm: sets the following (see `oelm inspect --arms`)."""
    label: str = ""
    """What the arm is called in tables and reports; default: model_type and what was changed about it."""
    frames: Literal[
        "normal", "matched", "orthogonal", "global", "shared", "sliced", "pretrained", "factor", "factor-scale"
    ] = "normal"
    """How Q/K start: N(0, 0.02²), N(0, 1/d_model), orthonormal rows per head, one orthogonal matrix, orthonormal
    rows per head that all layers share, or no matrix at all: a head reads its own slice of the input. Of a pretrained
    encoder: as they are, or each head's block replaced by its orthonormal factor, with or without its scale."""
    sliced_from: Annotated[int, Field(ge=0, le=1_000)] = 0
    """With sliced frames, the first layer without Q/K matrices; those below it have head-wise orthogonal ones."""
    sliced_keys: Literal["tied", "next", "shuffled"] = "tied"
    """With sliced frames, a head's key: its query's slice, the next head's, or every num_heads-th channel."""
    freeze: Annotated[str, AfterValidator(lambda text: text.strip() or "none")] = "none"
    """What is frozen, where and when: none, qk, qk@1-3, qk:until0.5 … (see `oelm inspect --policies`)."""
    lr_scale: str = ""
    """Factors on the learning rate by part or pattern of names, the first that matches: qk=0.1, blocks.0.*=2."""
    tie_qk: bool = False
    """One matrix is both Q and K of a layer."""
    key_shift: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """Share of every head's key channels that are taken from the token before."""
    key_conv: Annotated[int, Field(ge=0, le=64)] = 0
    """Causal convolution of the keys over so many tokens, per channel; starts as the identity. 0: none."""
    core: bool = False
    """A trained d_head x d_head matrix per head on the queries; starts as the identity."""
    lora: Annotated[int, Field(ge=0, le=4_096)] = 0
    """Rank of a trained addition to Q and K; starts as zero. 0: none."""
    qk_gain: bool = False
    """A trained gain per channel of the queries; starts at 1."""
    temperature: bool = False
    """A trained gain per head; starts at 1."""
    qk_norm: bool = False
    """Queries and keys are scaled to unit root mean square, head by head."""
    qk_bias: bool = False
    """Trained biases of Q and K; start at 0."""
    relative_bias: bool = False
    """A trained addition to the attention logits, per head and distance; starts at 0."""
    rope: Literal["none", "half", "full"] = "none"
    """Rotary positions on none, half or all channels of a head, in place of learned positions."""


class ModelFields(ArmFields):
    """Model"""

    arch: str = encoders.GPT
    """gpt, bert-base (the shape, drawn), or a pretrained encoder: folder, package:NAME or a name on the hub."""
    labels: Annotated[int, Field(ge=0, le=1_000)] = 0
    """Classes to tell apart; taken from the prepared data unless set. 0: language modelling."""
    preset: str = "medium-512"
    """Size: sets the model's shape and matching training defaults (medium-512, pocket, tiny; encoder for encoders)."""
    vocab_size: Annotated[int, Field(gt=0, le=2**31)] = 50_257
    """Tokens in the vocabulary; taken from the prepared data unless set."""
    d_model: Annotated[int, Field(gt=0, le=65_536)] = 512
    """Width of the residual stream."""
    num_layers: Annotated[int, Field(gt=0, le=1_000)] = 6
    """Transformer blocks."""
    num_heads: Annotated[int, Field(gt=0, le=4_096)] = 8
    """Attention heads; must divide d_model."""
    d_ff: Annotated[int, Field(gt=0, le=1_048_576)] = 2048
    """Width of the feed-forward layer."""
    seq_len: Annotated[int, Field(gt=0, le=1_048_576)] = 512
    """Tokens in a window."""
    dropout: Fraction = 0.1
    """Dropout on embeddings, attention weights and residual branches."""


class DataFields(_Fields):
    """Data"""

    dataset: str = "tinystories"
    """Prepared data set: the folder of that name in data/ (or $OELM_DATA); or csv:FILE, tsv:, jsonl:, parquet: of
    labelled texts, which is prepared first."""
    data_path: str = ""
    """Folder with train.bin, val.bin, test.bin; overrides the place that `dataset` implies."""


class OptimFields(_Fields):
    """Optimisation"""

    max_steps: Positive = 100_000
    """Optimizer steps in the whole run."""
    num_epochs: Annotated[float, Field(ge=0, le=100_000, allow_inf_nan=False)] = 0.0
    """Passes over the training data; sets max_steps. 0: as max_steps says."""
    batch_size: Annotated[int, Field(gt=0, le=1_000_000)] = 8
    """Windows per step in each process (as published: two processes double the step)."""
    micro_batch: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Windows per forward pass; the rest of the batch is accumulated. 0: the whole batch at once."""
    max_lr: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 3e-4
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.0
    """Learning rate at the end of the schedule."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """After the warm-up: cosine to min_lr, constant, or constant with a linear decay in the last fifth."""
    warmup_steps: Count = 1_000
    """Steps of linear warm-up."""
    beta1: Fraction = 0.9
    """AdamW: decay of the gradient average."""
    beta2: Fraction = 0.999
    """AdamW: decay of the squared gradient average."""
    weight_decay: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.01
    """AdamW: decoupled decay of matrices and embeddings (not of biases and norms)."""
    grad_clip: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 1.0
    """Largest gradient norm; 0: no clipping."""


class RunFields(_Fields):
    """Run"""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    """Seed of the initial weights, the batch order and dropout."""
    out_dir: str = ""
    """Run folder; default: outputs/<dataset>_<arm>_seed<seed>."""
    use_test: bool = True
    """Evaluate the test split at the end; leave it closed while arms are still being chosen."""
    val_interval: Positive = 1_000
    """Steps between validations (on the whole split); the state is saved with each."""
    save_interval: Positive = 5_000
    """Steps between checkpoints that are kept."""
    keep_saves: Count = 0
    """How many of these to keep, newest first; 0: all."""
    log_interval: Positive = 100
    """Steps between lines in training.log (more often in short runs)."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute."""
    threads: Annotated[int, Field(ge=0, le=4_096)] = 0
    """CPU threads; 0: all cores, shared by the processes."""
    use_amp: bool = True
    """Mixed precision on a GPU: bfloat16 where it has it, else float16 with loss scaling."""
    compile: bool = False
    """Compile the model with torch.compile."""
    num_workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Background threads that read batches ahead; 0: read in the loop."""
    processes: Annotated[int, Field(gt=0, le=100_000)] = 1
    """Processes that share a step; set by torchrun."""


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


GROUPS: tuple[type[_Fields], ...] = (ArmFields, ModelFields, DataFields, OptimFields, RunFields)
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
