import pytest

from oelm.arms import DRAWN
from oelm.config import resolve
from oelm.model import cost
from oelm.model.build import build_model


def test_parameters_of_medium_512_to_the_last_one():
    table = {part.name: part.total for part in cost.parts(resolve({}))}
    assert table == {
        "token embedding": 50_257 * 512,
        "position embedding": 512 * 512,
        "norms": 6 * 4 * 512 + 2 * 512,
        **{f"attention {role}": 6 * 512 * 512 for role in "qkvo"},
        "ffn": 6 * (2 * 512 * 2048 + 2048 + 512),
    }
    assert sum(table.values()) == 44_896_768


@pytest.mark.parametrize("arm", DRAWN)
def test_frozen_arms_freeze_3145728_parameters_of_medium_512(arm):
    frozen = sum(part.frozen for part in cost.parts(resolve({"model_type": arm})))
    matrices = {"oelm_shared": 2, "oelm_sliced": 0, "oelm_lowest": 10, "oelm_v3_free": 0, "oelm_v3": 0}.get(arm, 12)
    assert frozen == (matrices * 262_144 if DRAWN[arm].settings.get("freeze") else 0)


def test_checkpoints_are_of_the_published_sizes():
    mib = {arm: cost.checkpoint_bytes(resolve({"model_type": arm}))["checkpoint"] / 2**20 for arm in DRAWN}
    assert mib["baseline"] == pytest.approx(513.8, abs=0.05)
    assert mib["oelm_v2"] == pytest.approx(477.8, abs=0.05)


def test_flops_of_medium_512():
    assert cost.flops(resolve({})).step == pytest.approx(286.5e6, rel=1e-3)
    assert cost.flops(resolve({}), causal=True).step == pytest.approx(277e6, rel=1e-3)
    saved = cost.flops(resolve({})).step - cost.flops(resolve({"model_type": "oelm_v2"})).step
    assert saved == 2 * 3_145_728


@pytest.mark.parametrize("settings", [{"model_type": "oelm_shared"}, {"model_type": "oelm_v2", "tie_qk": True}])
def test_a_matrix_used_more_than_once_saves_its_gradient_each_time(settings):
    assert cost.flops(resolve(settings)).step == cost.flops(resolve({"model_type": "oelm_v2"})).step


@pytest.mark.parametrize(
    ("policy", "checkpoint", "once"),
    [
        ("qk", 3 * (44_896_768 - 3_145_728), 3_145_728),
        ("qk:until0.5", 3 * 44_896_768, 0),  # the larger ones, behind the thaw
        ("qk:from0.5", 3 * 44_896_768, 0),
        ("qk:every8", 3 * 44_896_768, 0),  # what rests keeps its moments
        ("q; k:until0.5", 3 * (44_896_768 - 1_572_864), 1_572_864),
    ],
)
def test_checkpoints_hold_what_is_ever_trained(policy, checkpoint, once):
    sizes = cost.checkpoint_bytes(resolve({"model_type": "baseline", "freeze": policy}))
    assert sizes == {"checkpoint": 4 * checkpoint, "frozen_once": 4 * once}


def test_a_phase_that_begins_with_a_turn_is_shown_as_what_rests_in_it():
    rows = cost.phases(resolve({"preset": "tiny", "max_steps": 100, "freeze": "qk:every2; v:until0.51"}))
    assert [(row["step"], row["qk_share"], row["rests"]) for row in rows] == [(0, 1.0, True), (51, 1.0, True)]


def test_turns_that_hardly_ever_meet_are_not_walked_to_their_end():
    policy = resolve({"freeze": "q:every97; k:every101; v:every103"}).policy
    assert sum(len(steps) for _, steps in policy.samples()) == 1_000


def test_bounds_on_what_freezing_can_save():
    bounds = cost.freezing_bounds(resolve({"model_type": "oelm_v2"}))
    assert bounds["no_qk_weight_gradient"] == pytest.approx(1.022, abs=5e-4)
    assert bounds["free_qk_projection"] == pytest.approx(1.071, abs=5e-4)
    # BERT-base at 128 tokens has no output head over the vocabulary.
    bert = resolve(dict(d_model=768, num_layers=12, num_heads=12, d_ff=3072, seq_len=128, vocab_size=1))
    assert cost.freezing_bounds(bert)["no_qk_weight_gradient"] == pytest.approx(1.057, abs=5e-4)
    assert cost.freezing_bounds(bert)["free_qk_projection"] == pytest.approx(1.194, abs=5e-4)


def test_activation_memory_is_what_a_real_forward_pass_keeps():
    import torch

    config = resolve({"preset": "tiny", "model_type": "oelm_v2"})
    model, kept = build_model(config), {}
    weights = {p.data_ptr() for p in model.parameters()}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for name, p in model.named_parameters():
        p.requires_grad_(not name.endswith(("q.weight", "k.weight")))
    x = torch.zeros(config.batch_size, config.seq_len, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(x, x.clone())
    made = sum(gradient.nbytes for gradient in loss.grad_fn.gradients)
    assert cost.activation_bytes(config) == pytest.approx(sum(kept.values()) + made, rel=0.02)
