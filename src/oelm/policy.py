"""Freezing policies as text: what is frozen, in which layers, and when.

    qk                      Q and K of every layer, for the whole run
    qk@1-3                  of layers 1 to 3 (the lowest is 0); also @1-  @0,2  @top0.5  @bottom2
    qk:until0.5             trained from half of the run on
    qk:last0.1              trained in its last tenth only (the same as until0.9)
    qk:from0.1              trained first, frozen as they are after a tenth of the run
    qk:from0.1+polar        ... and replaced by each head's orthonormal polar factor when they freeze
    qk:from0.1+polar-scale  ... keeping the head's scale
    qk:every8               trained at every 8th step
    qk:topdown0.2-0.8       thawed layer by layer from the top, the first at 0.2 and the last at 0.8 of the run
    qk:bottomup0.2-0.8      ... from the bottom
    q; ffn@top1; *norm*     several clauses: what any of them freezes is frozen

What: q, k, qk, v, o, ffn, embeddings, or a pattern of parameter names (* stands for anything).
"""
# No torch here: a policy is checked with the config.

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property

PARTS: dict[str, tuple[str, ...]] = {
    "q": ("blocks.*.attention.q.weight", "*.attention.self.query.*", "*.attention.q_lin.*"),
    "k": ("blocks.*.attention.k.weight", "*.attention.self.key.*", "*.attention.k_lin.*"),
    "v": ("blocks.*.attention.v.weight", "*.attention.self.value.*", "*.attention.v_lin.*"),
    "o": ("blocks.*.attention.o.weight", "*.attention.output.dense.*", "*.attention.out_lin.*"),
    "ffn": ("blocks.*.ffn.*", "*.layer.*.intermediate.dense.*", "*.layer.[0-9].output.dense.*",
            "*.layer.[0-9][0-9].output.dense.*", "*.layer.*.ffn.*"),
    "embeddings": ("tokens.weight", "positions.weight", "*.embeddings.*"),
}  # fmt: skip
"""Parts by the names of their parameters: this package's GPT, then encoders like BERT and DistilBERT (with biases)."""
PARTS["qk"] = PARTS["q"] + PARTS["k"]
GPT_QK = ("blocks.{}.attention.q.weight", "blocks.{}.attention.k.weight")
ENCODER_QK = tuple(
    f"{place}.{role}.weight"
    for place, roles in {
        "bert.encoder.layer.{}.attention.self": ("query", "key"),
        "roberta.encoder.layer.{}.attention.self": ("query", "key"),
        "distilbert.transformer.layer.{}.attention": ("q_lin", "k_lin"),
    }.items()
    for role in roles
)
"""Names of the matrices, by layer, for patterns that are to be read without a model."""
MOST_SAMPLES = 1_000
"""Steps of a phase that are looked at one by one."""
CLAUSE = re.compile(r"(?P<what>[\w.*?-]+)(@(?P<layers>[\w.,-]+))?(:(?P<when>[\w.+-]+))?")
WHEN = re.compile(
    r"(?P<kind>until|last|from)(?P<share>[\d.]+)(?P<then>\+polar|\+polar-scale)?"
    r"|(?P<every>every)(?P<period>\d+)"
    r"|(?P<order>topdown|bottomup)(?P<first>[\d.]+)-(?P<second>[\d.]+)"
)


@dataclass(frozen=True)
class When:
    """When a clause holds. Shares are of the whole run."""

    kind: str = "always"
    """always, until, from, every, topdown or bottomup."""
    share: float = 0.0
    end: float = 0.0
    """Of topdown and bottomup: when the last layer thaws."""
    period: int = 1
    then: str = ""
    """polar or polar-scale: what becomes of a head when it freezes."""

    def holds(self, step: int, steps: int, place: int, layers: int) -> bool:
        """Whether update `step` of `steps` leaves a parameter alone; its layer is the `place`-th of `layers`."""
        match self.kind:
            case "until":
                return step < round(self.share * steps)
            case "from":
                return step >= round(self.share * steps)
            case "every":
                return (step + 1) % self.period != 0
            case "topdown" | "bottomup":
                turn = layers - 1 - place if self.kind == "topdown" else place
                share = self.share + (self.end - self.share) * turn / max(1, layers - 1)
                return step < round(share * steps)
        return True

    def changes(self, steps: int, layers: int) -> list[int]:
        """Steps at which it may begin or cease to hold; those of `every` are no phases."""
        match self.kind:
            case "until" | "from":
                return [round(self.share * steps)]
            case "topdown" | "bottomup":
                width = self.end - self.share
                return [round((self.share + width * i / max(1, layers - 1)) * steps) for i in range(layers)]
        return []

    def changes_within(self, steps: int, layers: int) -> bool:
        """Whether a run of so many steps ever sees it both hold and not hold."""
        if self.kind == "every":
            return self.period <= steps
        return any(0 < step < steps for step in self.changes(steps, layers))


@dataclass(frozen=True)
class Clause:
    what: str
    layers: tuple[int, ...] | None
    """None: every layer, and what belongs to none."""
    when: When

    def matches(self, name: str) -> bool:
        layer = layer_of(name)
        there = self.layers is None or layer in self.layers
        return there and matches(self.what, name)

    def holds(self, name: str, step: int, steps: int, num_layers: int) -> bool:
        places = self.layers if self.layers is not None else tuple(range(num_layers))
        layer = layer_of(name)
        place = places.index(layer) if layer in places else 0
        return self.when.holds(step, steps, place, len(places))


@dataclass(frozen=True)
class Policy:
    clauses: tuple[Clause, ...]
    num_layers: int
    steps: int

    def frozen(self, names: Iterable[str], step: int) -> list[str]:
        """Which of the named parameters update `step` must leave alone."""
        return [name for name in names if any(self._holds(clause, name, step) for clause in self.clauses)]

    def mostly_frozen(self, names: Iterable[str], step: int) -> list[str]:
        """The same for most updates of the phase that `step` is in, those of an `every` turn apart."""
        clauses = [clause for clause in self.clauses if clause.when.kind == "every"]
        return [n for n in names if self.out_of_training(n, step) or any(clause.matches(n) for clause in clauses)]

    def always(self, names: Iterable[str]) -> list[str]:
        """Frozen for the whole run."""
        constant = [clause for clause in self.clauses if clause.when.kind == "always"]
        return [name for name in names if any(clause.matches(name) for clause in constant)]

    def polar(self, name: str, step: int) -> str:
        """What becomes of a parameter that freezes before update `step`: "", polar or polar-scale."""
        found = [c.when.then for c in self.clauses if c.when.then and self._holds(c, name, step)]
        return found[0] if found and step and not self.out_of_training(name, step - 1) else ""

    def phases(self) -> list[int]:
        """First steps of the phases of the run; within one, what is frozen stays the same (but for `every`)."""
        starts = {0}
        for clause in self.clauses:
            count = len(clause.layers) if clause.layers is not None else self.num_layers
            starts |= {step for step in clause.when.changes(self.steps, count) if 0 < step < self.steps}
        return sorted(starts)

    def samples(self) -> Iterator[tuple[int, range]]:
        """The length of each phase, and steps that stand for it: until `every` repeats itself, if it does so soon."""
        window = min(MOST_SAMPLES, math.lcm(*(clause.when.period for clause in self.clauses)))
        for start, end in itertools.pairwise([*self.phases(), self.steps]):
            yield end - start, range(start, min(end, start + window))

    @cached_property
    def constant(self) -> bool:
        """Nothing ever changes."""
        return self.phases() == [0] and all(clause.when.kind != "every" for clause in self.clauses)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Clauses that freeze nothing."""
        known = list(names)
        return [clause.what for clause in self.clauses if not any(clause.matches(name) for name in known)]

    def touches_qk(self, encoder: bool) -> bool:
        """Some matrix of Q or K is frozen at some time."""
        kinds = ENCODER_QK if encoder else GPT_QK
        names = [kind.format(layer) for kind in kinds for layer in range(self.num_layers)]
        return any(clause.matches(name) for clause in self.clauses for name in names)

    def _holds(self, clause: Clause, name: str, step: int) -> bool:
        return clause.matches(name) and clause.holds(name, step, self.steps, self.num_layers)

    def out_of_training(self, name: str, step: int) -> bool:
        """Frozen, and not just resting until its turn comes: what rests keeps its Adam moments."""
        return any(self._holds(clause, name, step) for clause in self.clauses if clause.when.kind != "every")


@cache
def parse(text: str, num_layers: int, steps: int) -> Policy:
    """The policy that `text` describes; ValueError says what is wrong with it."""
    clauses = [] if text.strip() in ("", "none") else [_clause(part.strip(), num_layers) for part in text.split(";")]
    for clause in clauses:
        layers = len(clause.layers) if clause.layers is not None else num_layers
        if clause.when.kind != "always" and not clause.when.changes_within(steps, layers):
            raise ValueError(
                f"in {steps:,} steps {clause.when.kind} never changes anything: the share is too small or large"
            )
    return Policy(tuple(clauses), num_layers, steps)


def matches(what: str, name: str) -> bool:
    """Whether a parameter belongs to a part, or fits a pattern of names."""
    return any(fnmatchcase(name, pattern) for pattern in PARTS.get(what, (what,)))


def layer_of(name: str) -> int | None:
    found = re.search(r"(?:^|\.)(?:blocks|layer)\.(\d+)\.", name)
    return int(found[1]) if found else None


def _clause(text: str, num_layers: int) -> Clause:
    found = CLAUSE.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is no clause: write WHAT, WHAT@LAYERS, WHAT:WHEN or both, such as qk@1-3:until0.5")
    what = found["what"]
    if what not in PARTS and not set(what) & set("*.?"):
        raise ValueError(f"{what!r} is neither a part ({', '.join(PARTS)}) nor a pattern of parameter names")
    layers = _layers(found["layers"], num_layers) if found["layers"] else None
    when = _when(found["when"]) if found["when"] else When()
    if when.then and what not in ("q", "k", "qk"):
        raise ValueError(f"{text!r}: a polar factor is taken of q, k or qk only")
    return Clause(what, layers, when)


def _layers(text: str, count: int) -> tuple[int, ...]:
    chosen: set[int] = set()
    for item in text.split(","):
        if found := re.fullmatch(r"(top|bottom)(\d{1,6}|0?\.\d+)", item):
            number = _number_of(found[2], count)
            first, last = (count - number, count - 1) if found[1] == "top" else (0, number - 1)
        elif found := re.fullmatch(r"(\d{1,6})(-?)(\d{0,6})", item):
            first, last = int(found[1]), int(found[3] or (count - 1 if found[2] else found[1]))
        else:
            raise ValueError(f"layers {item!r}: take 0, 1-3, 1-, 0,2, top2, bottom0.5")
        if not 0 <= first <= last < count:
            raise ValueError(f"layers {item!r}: the model has layers 0 to {count - 1}")
        chosen |= set(range(first, last + 1))
    return tuple(sorted(chosen))


def _number_of(text: str, count: int) -> int:
    """So many layers, or a share of all; a share is at least one layer."""
    if "." not in text:
        return int(text)
    return max(1, round(float(text) * count)) if float(text) else 0


def _when(text: str) -> When:
    found = WHEN.fullmatch(text)
    if not found:
        raise ValueError(
            f"{text!r}: take until0.5, last0.1, from0.1, from0.1+polar, from0.1+polar-scale, every8, "
            "topdown0.2-0.8 or bottomup0.2-0.8"
        )
    if found["every"]:
        period = int(found["period"])
        if period < 2:
            raise ValueError(f"{text!r}: take a period of 2 or more")
        return When("every", period=period)
    if found["order"]:
        first, second = _share(found["first"]), _share(found["second"])
        if second < first:
            raise ValueError(f"{text!r}: the second share is below the first")
        return When(found["order"], first, second)
    share = _share(found["share"])
    if found["kind"] == "last":
        return When("until", 1 - share)
    then = (found["then"] or "").removeprefix("+")
    if then and found["kind"] != "from":
        raise ValueError(f"{text!r}: a polar factor is taken where a part freezes: from0.1{found['then']}")
    return When(found["kind"], share, then=then)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no share of the run") from None
    if not 0 < value < 1:
        raise ValueError(f"{text}: a share of the run lies between 0 and 1")
    return value


def parse_rates(text: str) -> dict[str, float]:
    """Factors on the learning rate by pattern: "*attention.q*=0.1, blocks.0.*=2"; the first that matches counts."""
    factors = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        pattern, equals, factor = item.rpartition("=")
        try:
            value = float(factor)
        except ValueError:
            value = -1.0
        if not equals or not 0 < value <= 1000:
            raise ValueError(f"{item!r}: write PATTERN=FACTOR, such as *attention.q*=0.1")
        if pattern.strip() in factors:
            raise ValueError(f"{pattern.strip()} has two factors: leave one out")
        factors[pattern.strip()] = value
    return factors


def rate_factor(name: str, factors: dict[str, float]) -> float:
    for pattern, factor in factors.items():
        if matches(pattern, name):
            return factor
    return 1.0
