"""The table of arms: how Query/Key start, and what of them is frozen.

An arm is a set of defaults for config fields of the same names; it never carries a learning rate.
Adding an arm is one entry here.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    frames: str
    """How the Q/K matrices start (see `oelm.model.frames`)."""
    freeze: str
    """What is frozen (see `oelm.model.freeze`)."""
    about: str

    def fields(self) -> dict[str, str]:
        return {"frames": self.frames, "freeze": self.freeze, "sliced_keys": "tied"}


ARMS: dict[str, Arm] = {
    "baseline": Arm("normal", "none", "Q/K from N(0, 0.02²) like every other matrix, trained"),
    "oelm_v2": Arm("orthogonal", "qk", "OELM-Freeze: head-wise orthogonal Q/K, frozen"),
    "oelm_random": Arm("normal", "qk", "OELM-Random, the published control: Q/K from N(0, 0.02²), frozen"),
    "oelm_matched": Arm("matched", "qk", "the fair control: Q/K from N(0, 1/d_model), frozen"),
    "oelm": Arm("global", "qk", "OELM v1: one orthogonal d_model x d_model matrix for all heads, frozen"),
    "oelm_shared": Arm("shared", "qk", "head-wise orthogonal Q/K, one frame for all layers, frozen"),
    "oelm_sliced": Arm("sliced", "qk", "free frames: a head's Q/K are its slice of the input, no parameters"),
    "orthogonal": Arm("orthogonal", "none", "head-wise orthogonal Q/K, trained"),
}
