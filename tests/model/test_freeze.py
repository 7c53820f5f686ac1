import pytest
import torch

from oelm.config import resolve
from oelm.errors import UserError
from oelm.model import freeze
from oelm.model.build import build_model
from tests.small_encoder import make_encoder


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
    names = freeze.apply(model, config)
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


LATE = "blocks.*:every3; tokens.weight:from0.5; positions.weight:from0.5; final_norm.*:from0.5"


@pytest.mark.parametrize("freeze_all", ["*", "*:until0.5", "*:from0.5", "*:every2", LATE])
def test_a_policy_that_leaves_nothing_to_train_is_refused(freeze_all):
    config = resolve({"preset": "tiny", "freeze": freeze_all})
    with pytest.raises(UserError, match="nothing would be trained"):
        freeze.policy_of(build_model(config), config)


def test_an_encoders_matrices_become_polar_factors_and_its_biases_stay(tmp_path):
    arch = make_encoder(tmp_path / "encoder")
    settings = {"arch": str(arch), "labels": 3, "max_steps": 10, "model_type": "baseline"}
    config = resolve({**settings, "freeze": "qk:from0.5+polar"})
    model = build_model(config)
    before = {name: p.clone() for name, p in model.named_parameters()}
    changed = freeze.orthogonalise(model, config, 5)
    assert len(changed) == 4
    for name, parameter in model.named_parameters():
        if name in changed:
            block = parameter[:16].double()
            assert torch.allclose(block @ block.T, torch.eye(16, dtype=torch.float64), atol=1e-5)
        else:
            assert torch.equal(parameter, before[name])
