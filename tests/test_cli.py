import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["prepare", "--help"], []])
def test_help_imports_no_torch(arguments):
    code = (
        "import sys\nfrom oelm.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as stop: assert not stop.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "oelm" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["trian"]),
        (["train", "--max_rl", "1"], ["--max_rl", "--max_lr"]),
        (["train", "--max-lr"], ["max_lr"]),
        (["inspect", "--model_type", "oelm_v9"], ["oelm_v9", "did you mean oelm_v3"]),
        (["inspect", "--num_heads", "7"], ["num_heads"]),
        (["run", "plan.toml", "--partition", "gpu"], ["--partition is for --on slurm"]),
        (["run", "plan.toml", "--time", "9"], ["--time is for --on slurm"]),
        (["run", "plan.toml", "--on", "slurm", "--detach"], ["--detach is for runs here"]),
        (["run", "plan.toml", "--on", "slurm", "--slots", "4"], ["--slots is for runs here"]),
        (["train", "--dataset", "tinystorys"], ["tinystorys", "did you mean tinystories"]),
        (["train", "--dataset", "tinystories"], ["oelm prepare tinystories"]),
        (["train", "nothere.toml"], ["nothere.toml"]),
        (["train", "--resume", "nothere"], ["nothere", "run folder"]),
        (["train", "--data_path", "nothere"], ["nothere"]),
        (["generate", "nothere"], ["nothere", "config.toml"]),
        (["generate", "x", "--top_p", "2"], ["top_p"]),
        (["prepare", "nonsense"], ["nonsense", "--from"]),
        (["prepare", "mine", "--from", "nothere.txt"], ["nothere.txt"]),
        (["prepare", "mine", "--from", ".", "--tokenizer", "gpt3"], ["gpt3", "bpe:N"]),
        (["prepare", "mine", "--from", ".", "--tokenizer", "bpe:5"], ["bpe:5", "257"]),
        (["prepare", "../up", "--from", "."], ["../up"]),
        (["demo", "--slots", "-1"], ["--slots"]),
        (["train", "--resume"], ["holds no run to resume"]),
        (["train", "--out_dir", "x" * 300], ["too long"]),
        (["generate", "x", "--temperature", "1e-45"], ["temperature"]),
        (["prepare", "mine", "--from", ".", "--tokenizer", "bpe:²"], ["bpe:²"]),
        (["prepare", "mine", "--from", ".", "--workers", "-3"], ["--workers -3"]),
        (["run", "nothere.toml"], ["nothere.toml"]),
        (["status", "nothere"], ["nothere"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(oelm, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OELM_DATA", raising=False)
    result = oelm(*arguments)
    assert result.code == 2
    assert len(result.err.strip().splitlines()) == 1
    for word in words:
        assert word in result.err
    assert not list(tmp_path.iterdir()), "something was written"


def test_inspect_gives_the_published_counts(oelm):
    baseline = json.loads(oelm("inspect", "--model_type", "baseline", "--preset", "medium-512", "--json").out)
    assert (baseline["total"], baseline["trainable"], baseline["frozen"]) == (44_896_768, 44_896_768, 0)
    frozen = json.loads(oelm("inspect", "--model-type", "oelm_v2", "--json").out)
    assert (frozen["total"], frozen["trainable"], frozen["frozen"]) == (44_896_768, 41_751_040, 3_145_728)


def test_inspect_shows_a_table_of_parts_and_bounds(oelm):
    shown = oelm("inspect", "--model_type", "oelm_v2").out
    for text in ("attention q", "3,145,728", "41,751,040", "1.022", "1.071", "477.8 MiB"):
        assert text in shown
    assert "there is none" not in shown
    assert "100% (there is none)" in oelm("inspect", "--model_type", "oelm_v3").out
    assert "oelm_matched" in oelm("inspect", "--arms").out
    assert json.loads(oelm("inspect", "--arms", "--json").out)["drawn"]["oelm_v2"]["freeze"] == "qk"


def test_generate_continues_a_prompt_reproducibly(oelm, tiny, tmp_path):
    assert tiny("--max_steps", 5).code == 0
    options = ("generate", tmp_path / "run", "--prompt", "the cat", "--max_tokens", 40, "--top_k", 20, "--seed", 3)
    first = oelm(*options).out
    assert first.startswith("the cat")
    assert len(first) > len("the cat\n")
    assert oelm(*options).out == first
    greedy = ("generate", tmp_path / "run", "--prompt", "the", "--temperature", 0, "--max_tokens", 10)
    assert oelm(*greedy, "--seed", 1).out == oelm(*greedy, "--seed", 2).out


def test_generate_refuses_a_tokenizer_that_is_not_the_checkpoints(oelm, tiny, tmp_path):
    from tests.conftest import make_data

    small = make_data(tmp_path / "small", "bpe:300")
    assert tiny("--max_steps", 2, "--data_path", small).code == 0
    text = (tmp_path / "run/tokenizer.json").read_text()
    (tmp_path / "run/tokenizer.json").write_text(text + "\n")
    result = oelm("generate", tmp_path / "run", "--prompt", "x")
    assert (result.code, "tokenizer" in result.err) == (2, True)
