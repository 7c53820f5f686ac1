"""The table of arms: how Query/Key start, what of them is frozen and when, and what is added to them.

An arm is a set of defaults for config fields of the same names; it never carries a learning rate.
Adding an arm is one entry here.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Arm:
    about: str
    settings: dict[str, Any]
    """Config fields that the arm sets; the others of the group stay at their defaults."""


def _arm(about: str, **settings: Any) -> Arm:
    return Arm(about, settings)


ARMS: dict[str, Arm] = {
    "baseline": _arm("Q/K from N(0, 0.02²) like every other matrix, trained"),
    "oelm_v2": _arm("OELM-Freeze: head-wise orthogonal Q/K, frozen", frames="orthogonal", freeze="qk"),
    "oelm_random": _arm("OELM-Random, the published control: Q/K from N(0, 0.02²), frozen", freeze="qk"),
    "oelm_matched": _arm("the fair control: Q/K from N(0, 1/d_model), frozen", frames="matched", freeze="qk"),
    "oelm": _arm(
        "OELM v1: one orthogonal d_model x d_model matrix for all heads, frozen", frames="global", freeze="qk"
    ),
    "oelm_shared": _arm("head-wise orthogonal Q/K, one frame for all layers, frozen", frames="shared", freeze="qk"),
    "oelm_sliced": _arm(
        "free frames: a head's Q/K are its slice of the input, no parameters", frames="sliced", freeze="qk"
    ),
    "orthogonal": _arm("head-wise orthogonal Q/K, trained", frames="orthogonal"),
}
