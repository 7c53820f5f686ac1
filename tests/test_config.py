import pytest

from oelm.arms import DRAWN
from oelm.cli.parser import with_underscores
from oelm.config import ARM_KEYS, OPERATIONAL, PRESETS, RunConfig, load_toml, resolve
from oelm.errors import UserError


def test_defaults_are_the_published_phase_3_settings():
    config = resolve({})
    assert (config.d_model, config.num_layers, config.num_heads, config.d_ff) == (512, 6, 8, 2048)
    assert (config.seq_len, config.vocab_size, config.dropout, config.batch_size) == (512, 50_257, 0.1, 8)
    assert (config.beta1, config.beta2, config.weight_decay, config.grad_clip) == (0.9, 0.999, 0.01, 1.0)
    assert (config.warmup_steps, config.min_lr, config.schedule, config.seed) == (1_000, 0.0, "cosine", 42)
    assert (config.val_interval, config.save_interval, config.use_amp) == (1_000, 5_000, True)


def test_every_published_flag_is_a_setting():
    published = {
        "model_type", "dataset", "data_path", "max_lr", "min_lr", "max_steps", "warmup_steps", "batch_size", "seq_len",
        "vocab_size", "d_model", "num_layers", "num_heads", "d_ff", "dropout", "beta1", "beta2", "weight_decay",
        "grad_clip", "val_interval", "save_interval", "out_dir", "seed", "num_workers", "use_amp",
    }  # fmt: skip
    assert published <= RunConfig.model_fields.keys()


def test_order_is_defaults_preset_arm_file_flag():
    file = {"preset": "pocket", "model_type": "oelm_v2", "max_lr": 0.5, "batch_size": 3}
    config = resolve({"batch_size": "5"}, file)
    assert config.d_model == 128  # preset over default
    assert (config.frames, config.freeze) == ("orthogonal", "qk")  # arm
    assert config.max_lr == 0.5  # file over preset
    assert config.batch_size == 5  # flag over file
    assert resolve({"model_type": "oelm_v2", "freeze": "none"}).freeze == "none"  # flag over arm


def test_an_arm_brings_no_training_setting():
    for name in DRAWN:
        arm, baseline = resolve({"model_type": name}).model_dump(), resolve({}).model_dump()
        changed = {key for key in arm if arm[key] != baseline[key]}
        assert changed <= {"model_type", *ARM_KEYS} - {"lr_scale"}


def test_the_written_config_resolves_to_itself(tmp_path):
    config = resolve({"preset": "tiny", "model_type": "oelm_random", "max_lr": "0.001", "out_dir": "x/y"})
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert resolve({}, load_toml(tmp_path / "config.toml")) == config


def test_another_arm_over_a_written_config_is_that_arm_whole(tmp_path):
    (tmp_path / "config.toml").write_text(resolve({"preset": "pocket", "max_lr": 0.1}).to_toml())
    file = load_toml(tmp_path / "config.toml")
    config = resolve({"model_type": "oelm_v2"}, file)
    assert (config.frames, config.freeze, config.max_lr) == ("orthogonal", "qk", 0.1)
    assert resolve({"preset": "medium-512"}, file).d_model == 512
    assert resolve({"model_type": "oelm_v2"}, {**file, "label": "plain"}).label == ""


def test_a_flag_on_how_long_a_run_is_wins_over_a_file_that_says_it_the_other_way():
    epochs = {"preset": "tiny", "num_epochs": 3.0, "max_steps": 77}  # as a run writes it
    lengths = [
        resolve({"max_steps": 5}, epochs), resolve({"num_epochs": 2.0}, epochs), resolve({}, epochs),
        resolve({"num_epochs": 2.0}, {"max_steps": 9}), resolve({}, {"max_steps": 9}),
    ]  # fmt: skip
    assert [config.num_epochs for config in lengths] == [0, 2, 3, 2, 0]
    assert [config.max_steps for config in lengths if not config.num_epochs] == [5, 9]
    for zero in ("0.0", "0e0", "-0"):  # as a command line says it
        assert resolve({"num_epochs": zero}, {"max_steps": 9}).max_steps == 9


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"d_model": "-5"}, ["d_model", "-5", "greater than 0"]),
        ({"max_lr": "nan"}, ["max_lr"]),
        ({"max_lr": "1e300"}, ["max_lr", "100"]),
        ({"max_steps": "0"}, ["max_steps"]),
        ({"max_steps": "many"}, ["max_steps", "many"]),
        ({"seq_len": "99999999999"}, ["seq_len"]),
        ({"dropout": "1"}, ["dropout", "less than 1"]),
        ({"beta2": "1.5"}, ["beta2"]),
        ({"num_heads": "7"}, ["num_heads 7", "d_model 512", "try 8"]),
        ({"min_lr": "0.1", "max_lr": "0.01"}, ["min_lr", "max_lr"]),
        ({"micro_batch": "3"}, ["micro_batch 3", "batch_size 8"]),
        ({"schedule": "linear"}, ["schedule", "cosine"]),
        ({"model_type": "oelm_v4"}, ["unknown arm", "oelm_v"]),
        ({"preset": "poket"}, ["unknown preset", "pocket"]),
        ({"lr": "1"}, ["unknown setting lr"]),
        ({"use_amp": "perhaps"}, ["use_amp"]),
        ({"freeze": "qk@9"}, ["freeze qk@9", "layers 0 to 5"]),
        ({"lr_scale": "qk"}, ["lr_scale qk", "PATTERN=FACTOR"]),
        ({"sliced_keys": "next"}, ["sliced_keys next", "not sliced"]),
        ({"key_shift": "0.001"}, ["key_shift 0.001", "64 channels"]),
        ({"max_steps": 3, "num_epochs": 0.1}, ["--max_steps and --num_epochs", "one of them"]),
        ({"arch": "bert-base", "d_model": "abc"}, ["d_model 'abc'"]),
        ({"arch": "bert-base", "d_model": [1]}, ["d_model [1]"]),
        ({"arch": "package:__main__"}, ["no such package"]),
    ],
)
def test_a_bad_value_is_named_in_one_line(flags, words):
    with pytest.raises(UserError) as error:
        resolve(flags)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_policy_that_freezes_nothing_has_one_name():
    assert {resolve({"freeze": text}).identity() for text in ("", "none", " none ")} == {resolve({}).identity()}


def test_flags_take_dashes_or_underscores_and_values_keep_theirs():
    argv = ["--max-lr=1e-3", "--out-dir", "a-b_c", "--d_model", "8", "-h", "--from=x-y"]
    assert with_underscores(argv) == ["--max_lr=1e-3", "--out_dir", "a-b_c", "--d_model", "8", "-h", "--from=x-y"]
    assert with_underscores(["--prompt", "--a well-known cat"]) == ["--prompt", "--a well-known cat"]


def test_presets_are_of_the_documented_sizes():
    pocket, tiny = resolve({"preset": "pocket"}), resolve({"preset": "tiny"})
    assert (pocket.d_model, pocket.num_layers, pocket.num_heads, pocket.d_ff) == (128, 4, 4, 512)
    assert (pocket.seq_len, pocket.vocab_size, pocket.batch_size, pocket.dropout) == (128, 1024, 16, 0)
    assert (tiny.d_model, tiny.num_layers, tiny.num_heads, tiny.d_ff) == (32, 2, 2, 64)
    assert (tiny.seq_len, tiny.vocab_size, tiny.batch_size) == (32, 257, 4)
    assert PRESETS["pocket"].keys() == PRESETS["tiny"].keys()  # what switching a preset replaces
    assert RunConfig.model_fields.keys() >= OPERATIONAL


@pytest.mark.parametrize(
    ("freeze", "gpt", "bert"),
    [("qk@1", True, True), ("*query*", False, True), ("*attention.k.*", True, False), ("*norm*", False, False),
     ("ffn; v:until0.5", False, False), ("*", True, True)],
)  # fmt: skip
def test_whether_queries_or_keys_are_frozen_is_told_by_their_names(freeze, gpt, bert):
    found = [resolve({"freeze": freeze, "arch": arch}).freezes_qk for arch in ("gpt", "bert-base")]
    assert found == [gpt, bert]


def test_a_changed_arm_has_a_folder_of_its_own_and_a_name_that_fits():
    changed = resolve({"model_type": "oelm_v2", "freeze": "qk@1:last0.2", "seed": 3}).folder
    assert changed.name == "tinystories_oelm_v2+freeze=qk-1-last0.2_seed3"
    assert len(resolve({"label": "层" * 200}).folder.name.encode()) < 255
