"""The table of arms: how Query/Key start, what of them is frozen and when, and what is added to them.

An arm is a set of defaults for config fields of the same names; it never carries a learning rate.
Adding an arm is one entry here. In a pretrained encoder an arm may mean something else than in a drawn model.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Arm:
    about: str
    settings: dict[str, Any] | None
    """Config fields that the arm sets; the others of the group stay at their defaults. None: for encoders only."""
    pretrained: dict[str, Any] | None = None
    """What it sets instead for a pretrained encoder; None: the same."""
    about_pretrained: str = ""

    def settings_for(self, pretrained: bool) -> dict[str, Any] | None:
        return self.pretrained if pretrained and self.pretrained is not None else self.settings


def _arm(about: str, **settings: Any) -> Arm:
    return Arm(about, settings)


ARMS: dict[str, Arm] = {
    "baseline": Arm(
        "Q/K from N(0, 0.02²) like every other matrix, trained", {},
        {"frames": "pretrained"}, "pretrained Q/K, untouched, trained",
    ),
    "frozen": Arm("", None, {"frames": "pretrained", "freeze": "qk"}, "pretrained Q/K, frozen as they are"),
    "oelm_v2": Arm(
        "OELM-Freeze: head-wise orthogonal Q/K, frozen", {"frames": "orthogonal", "freeze": "qk"},
        {"frames": "factor", "freeze": "qk"},
        "each head's pretrained block replaced by its orthonormal factor, frozen (frames factor-scale keeps its scale)",
    ),
    "oelm_random": _arm("OELM-Random, the published control: Q/K from N(0, 0.02²), frozen", freeze="qk"),
    "oelm_matched": _arm("the fair control: Q/K from N(0, 1/d_model), frozen", frames="matched", freeze="qk"),
    "oelm": _arm(
        "OELM v1: one orthogonal d_model x d_model matrix for all heads, frozen", frames="global", freeze="qk"
    ),
    "oelm_shared": _arm("head-wise orthogonal Q/K, one frame for all layers, frozen", frames="shared", freeze="qk"),
    "oelm_sliced": _arm(
        "free frames: a head's Q/K are its slice of the input, no parameters", frames="sliced", freeze="qk"
    ),
    "oelm_lowest": _arm(
        "head-wise orthogonal Q/K, trained in the lowest layer and frozen above it", frames="orthogonal", freeze="qk@1-"
    ),
    "oelm_v3_free": _arm(
        "free frames with the keys of the token before and half-rotary positions: no Q/K parameters",
        frames="sliced", freeze="qk", key_shift=1.0, rope="half",
    ),
    "oelm_v3": _arm(
        "oelm_v3_free with a trained d_head x d_head matrix per head",
        frames="sliced", freeze="qk", key_shift=1.0, rope="half", core=True,
    ),
    "orthogonal": _arm("head-wise orthogonal Q/K, trained", frames="orthogonal"),
    "damaged_baseline": Arm(
        "", None, {"frames": "normal"}, "the published mistake: pretrained Q/K overwritten with N(0, 0.02²), trained"
    ),
}  # fmt: skip
DRAWN = {name: arm for name, arm in ARMS.items() if arm.settings is not None}
"""Those that a model without pretrained weights can be."""
