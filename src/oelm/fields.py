"""What can be set about a run: every setting with its default, its range and a sentence, which --help shows."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from oelm import encoders

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


GROUPS: tuple[type[_Fields], ...] = (ArmFields, ModelFields, DataFields, OptimFields, RunFields)
