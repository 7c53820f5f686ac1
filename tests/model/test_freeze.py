import pytest
import torch

from oelm.config import resolve
from oelm.errors import UserError
from oelm.model import freeze
from oelm.model.build import build_model


def test_frozen_arms_freeze_q_and_k_of_every_layer_and_nothing_else():
    config = resolve({"preset": "tiny", "model_type": "oelm_v2"})
    model = build_model(config)
    frozen = freeze.apply(model, config)
    assert frozen == [f"blocks.{i}.attention.{role}.weight" for i in range(2) for role in "qk"]
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == set(frozen)


def test_the_baseline_freezes_nothing():
    config = resolve({"preset": "tiny"})
    model = build_model(config)
    assert freeze.apply(model, config) == []
    assert all(p.requires_grad for p in model.parameters())


def test_the_fingerprint_sees_a_single_flipped_bit():
    config = resolve({"preset": "tiny", "model_type": "oelm_v2"})
    model = build_model(config)
    names = freeze.frozen_names(model, config)
    before = freeze.fingerprint(model, names)
    with torch.no_grad():
        weight = model.blocks[1].attention.k.weight.view(torch.int32)
        weight[3, 4] ^= 1
    assert freeze.fingerprint(model, names) != before


@pytest.mark.parametrize("settings", [{"freeze": "blocks.9.*"}, {"lr_scale": "*.attention.x.*=2"}])
def test_a_pattern_that_matches_nothing_is_refused(settings):
    config = resolve({"preset": "tiny", **settings})
    with pytest.raises(UserError, match="matches no parameter"):
        freeze.policy_of(build_model(config), config)
