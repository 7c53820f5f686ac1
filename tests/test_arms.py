from oelm.arms import DRAWN


def test_the_published_arms_and_their_controls():
    kinds = {
        name: (arm.settings.get("frames", "normal"), arm.settings.get("freeze", "none")) for name, arm in DRAWN.items()
    }
    assert kinds == {
        "baseline": ("normal", "none"),
        "oelm_v2": ("orthogonal", "qk"),
        "oelm_random": ("normal", "qk"),
        "oelm_matched": ("matched", "qk"),
        "oelm": ("global", "qk"),
        "oelm_shared": ("shared", "qk"),
        "oelm_sliced": ("sliced", "qk"),
        "oelm_lowest": ("orthogonal", "qk@1-"),
        "oelm_v3_free": ("sliced", "qk"),
        "oelm_v3": ("sliced", "qk"),
        "orthogonal": ("orthogonal", "none"),
    }
