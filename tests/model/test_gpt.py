import math

import pytest
import torch

from oelm.arms import DRAWN
from oelm.config import resolve
from oelm.model.build import build_model

SHAPE = dict(preset="tiny", d_model=48, num_heads=3, num_layers=3, d_ff=96, seq_len=24, vocab_size=101)


def gpt(**settings):
    return build_model(resolve({**SHAPE, **settings})).eval()


def tokens(rows=2, length=24, seed=0):
    return torch.randint(0, 101, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_logits_agree_with_transformers_gpt2():
    transformers = pytest.importorskip("transformers")
    ours = gpt()
    with torch.no_grad():  # biases and norms of a trained model are not at their start values
        for name, parameter in ours.named_parameters():
            if parameter.ndim == 1:
                generator = torch.Generator().manual_seed(len(name))
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=101, n_positions=24, n_embd=48, n_layer=3, n_head=3, n_inner=96, activation_function="gelu",
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    ).eval()  # fmt: skip
    weights = dict(ours.named_parameters())
    state = {"transformer.wte.weight": weights["tokens.weight"], "transformer.wpe.weight": weights["positions.weight"]}
    for i in range(3):
        ours_at, theirs_at = f"blocks.{i}.", f"transformer.h.{i}."
        qkv = [weights[f"{ours_at}attention.{role}.weight"].T for role in "qkv"]
        state[f"{theirs_at}attn.c_attn.weight"] = torch.cat(qkv, dim=1)
        state[f"{theirs_at}attn.c_attn.bias"] = torch.zeros(3 * 48)
        state[f"{theirs_at}attn.c_proj.weight"] = weights[f"{ours_at}attention.o.weight"].T
        state[f"{theirs_at}attn.c_proj.bias"] = torch.zeros(48)
        for norm, name in (("ln_1", "attention_norm"), ("ln_2", "ffn_norm")):
            for kind in ("weight", "bias"):
                state[f"{theirs_at}{norm}.{kind}"] = weights[f"{ours_at}{name}.{kind}"]
        for layer, name in (("c_fc", "up"), ("c_proj", "down")):
            state[f"{theirs_at}mlp.{layer}.weight"] = weights[f"{ours_at}ffn.{name}.weight"].T
            state[f"{theirs_at}mlp.{layer}.bias"] = weights[f"{ours_at}ffn.{name}.bias"]
    for kind in ("weight", "bias"):
        state[f"transformer.ln_f.{kind}"] = weights[f"final_norm.{kind}"]
    state["lm_head.weight"] = weights["tokens.weight"]
    theirs.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("arm", ["baseline", "oelm_v2"])
def test_changing_a_token_leaves_earlier_logits_bit_equal(arm):
    model, x = gpt(model_type=arm), tokens(1)
    with torch.no_grad():
        before = model(x)
        for j in range(24):
            changed = x.clone()
            changed[0, j] = (changed[0, j] + 1) % 101
            after = model(changed)
            assert torch.equal(before[:, :j], after[:, :j])
            assert not torch.equal(before[:, j:], after[:, j:])


def test_arms_of_one_seed_share_all_weights_but_q_and_k():
    models = {name: dict(gpt(model_type=name).named_parameters()) for name in DRAWN}
    for name, weights in models.items():
        added = weights.keys() - models["baseline"].keys()
        assert added == {key for key in weights if key.endswith("core") and name == "oelm_v3"}
        for key, tensor in models["baseline"].items():
            same = key in weights and torch.equal(tensor, weights[key])
            is_qk = key.endswith(("attention.q.weight", "attention.k.weight"))
            if key == "positions.weight" and name.startswith("oelm_v3"):
                continue  # rotary positions have no weights
            assert same == (not is_qk or name in ("baseline", "oelm_random")), (name, key)
    assert all(torch.equal(models["oelm_v2"][key], tensor) for key, tensor in models["orthogonal"].items())


def test_matrices_start_at_std_002_and_norms_at_one():
    for name, parameter in gpt(d_model=192).named_parameters():
        if parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("norm.weight")))), name


def test_the_first_loss_is_that_of_guessing():
    model, x = gpt(), tokens(8)
    assert model(x[:, :-1], x[:, 1:]).item() == pytest.approx(math.log(101), abs=0.1)


def test_dropout_is_active_in_training_only():
    model, x = gpt(dropout=0.5), tokens()
    with torch.no_grad():
        assert torch.equal(model(x), model(x))
        model.train()
        assert not torch.equal(model(x), model(x))


def test_shared_frames_are_one_pair_of_matrices_in_every_layer():
    model = gpt(model_type="oelm_shared")
    first, *others = [block.attention for block in model.blocks]
    assert all(other.q.weight is first.q.weight and other.k.weight is first.k.weight for other in others)
    own = dict(gpt(model_type="oelm_v2").named_parameters())
    assert torch.equal(first.q.weight, own["blocks.0.attention.q.weight"])
    baseline = sum(p.numel() for p in gpt().parameters())
    assert baseline - sum(p.numel() for p in model.parameters()) == 2 * 2 * 48 * 48


def test_sliced_frames_have_no_query_or_key_parameters():
    names = [name for name, _ in gpt(model_type="oelm_sliced").named_parameters()]
    assert not [name for name in names if "attention.q" in name or "attention.k" in name]


@pytest.mark.parametrize("arm", ["baseline", "oelm_sliced", "oelm_v3"])
@pytest.mark.parametrize("shape", [(0, 24), (2, 0)])
def test_no_tokens_make_no_logits_and_no_error(arm, shape):
    nothing = torch.zeros(shape, dtype=torch.long)
    assert gpt(model_type=arm)(nothing).shape == (*shape, 101)
    assert gpt(model_type=arm)(nothing, nothing).isnan()


def test_an_embedding_of_another_kind_is_called_as_any_other():
    ours, ids = gpt(), tokens()
    before = ours(ids, ids)
    plain = torch.nn.Embedding(101, 48)
    plain.weight = ours.tokens.weight
    ours.tokens = plain
    torch.testing.assert_close(ours(ids, ids), before)
    torch.nn.utils.parametrize.register_parametrization(ours.tokens, "weight", torch.nn.Tanh())
    ours(ids, ids).backward()
    assert ours.tokens.parametrizations.weight.original.grad.abs().sum() > 0
