import builtins
import json
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from oelm.arms import ARMS
from oelm.bench import contest as module
from oelm.bench.contest import arithmetic, configure, contender
from oelm.config import resolve
from oelm.errors import UserError
from oelm.model.products import multiply


@pytest.mark.parametrize(
    ("shape", "arm", "bound"), [("medium-512", "oelm_sliced", 1.071), ("medium-512", "oelm_v2", 1.022),
                                ("bert-base", "oelm_sliced", 1.194), ("bert-base", "oelm_v2", 1.057)],
)  # fmt: skip
def test_bounds_are_the_published_arithmetic(shape, arm, bound):
    full, less = (arithmetic(configure(shape, {}, name), shape, causal=False) for name in ("baseline", arm))
    assert full / less == pytest.approx(bound, abs=6e-4)


def test_the_arithmetic_of_medium_512_is_277_megaflop_a_token():
    config = configure("medium-512", {})
    assert arithmetic(config, "medium-512", causal=True) / config.tokens_per_step / 1e6 == pytest.approx(277, abs=0.5)


@pytest.fixture
def small(monkeypatch):
    tiny = dict(d_model=16, num_layers=1, num_heads=2, d_ff=32, seq_len=8, vocab_size=64, batch_size=2)
    for shape in module.SHAPES:
        monkeypatch.setitem(module.SHAPES, shape, tiny)
    monkeypatch.setattr(module.measure, "gemm", lambda: {"gemm": module.measure.Gemm(8, 8, 8, multiply)})


@pytest.fixture
def inside(monkeypatch):
    """Contenders in this process: what is not about processes need not wait for them. Who was made, in order."""
    made = []

    class Inside(module.measure.Apart):
        def __init__(self, make, *arguments):
            made.append(arguments[0])
            self.step = make(*arguments)

        def begin(self):
            pass

        def work(self, seconds=None):
            return module.measure.stopwatch(self.step)

        def memory(self):
            return 0

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(module.measure, "Apart", Inside)
    return made


def test_a_table_a_picture_and_json_are_written(small, oelm, tmp_path):
    result = oelm("bench", "baseline", "oelm_sliced", "published", "--repeats", 3, "--out", tmp_path / "a" / "b.c")
    assert result.code == 0, result.err
    assert [path.name for path in sorted((tmp_path / "a").iterdir())] == ["b.c.json", "b.c.md", "b.c.svg"]
    found = json.loads((tmp_path / "a" / "b.c.json").read_text())
    assert [entry["name"] for entry in found["entries"]] == ["baseline", "oelm_sliced", "published"]
    assert found["entries"][0]["speedup"]["value"] == 1.0
    assert found["repeats"] == 3
    assert "oelm_sliced" in result.out
    text = (tmp_path / "a" / "b.c.md").read_text()
    assert text.startswith("# b.c\n")
    assert "\noelm bench baseline oelm_sliced published --shape medium-512 --repeats 3 --out PREFIX\n" in text
    assert "bounds take 6 repeats" in text


@pytest.mark.parametrize(("names", "steps"), [(("baseline", "oelm_v2"), 3 * 2), (("baseline", "published"), 3 * 2 * 2)])
def test_beside_a_peer_each_timed_step_has_an_untimed_one_before_it(small, inside, oelm, monkeypatch, names, steps):
    """One round, two to warm up; the products of the peak are not counted."""
    taken = []
    monkeypatch.setattr(module.measure, "stopwatch", lambda step: taken.append(step) or 1.0)
    assert oelm("bench", *names, "--repeats", 1).code == 0
    assert len([step for step in taken if not isinstance(step, module.measure.Gemm)]) == steps


def test_every_launch_makes_all_anew(small, inside, oelm):
    result = oelm("bench", "baseline", "oelm_sliced", "--launches", 2, "--repeats", 3, "--json")
    assert inside == 2 * ["baseline", "oelm_sliced"]
    found = json.loads(result.out)
    assert [len(entry["repeats"]) for entry in found["entries"]] == [6, 6]
    assert (found["launches"], found["repeats"]) == (2, 3)
    assert "--repeats 3 --launches 2" in found["command"]


def test_the_command_says_which_allocator_was_asked_for(small, inside, oelm, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_max=0")
    found = json.loads(oelm("bench", "baseline", "--repeats", 1, "--json").out)
    assert found["command"].startswith("GLIBC_TUNABLES=glibc.malloc.mmap_max=0 oelm bench baseline")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("oelm_slicd",), "did you mean oelm_sliced"),
        (("--shape", "medum-512"), "did you mean medium-512"),
        (("--repeats", "0"), "repeats and launches must be 1 or more"),
        (("--launches", "0"), "repeats and launches must be 1 or more"),
        (("baseline", "nanogpt"), "--nanogpt DIR"),
        (("baseline", "nanogpt", "--nanogpt", "nowhere"), "model.py is not there"),
        (("baseline", "published", "--shape", "bert-base"), "only arms"),
        (("baseline", "published+compil"), "did you mean published+compile"),
        (("baseline", "--shape", "encoder"), "--arch"),
        (("baseline", "--threads", "9999"), "leave --threads out"),
        (("baseline", "baseline+compile", "--shape", "bert-base"), "leave +compile out"),
        (("--dropout", "1.5"), "dropout"),
        (("--out", "/proc/nowhere/bench"), "cannot write to /proc/nowhere"),
        (("--out", "."), "no name for a file"),
        (("--batch_size", "0"), "batch_size"),
    ],
)
def test_a_contest_that_cannot_be_is_refused_in_one_line(small, oelm, arguments, message):
    result = oelm("bench", *arguments)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert message in result.err


@pytest.mark.parametrize(("percent", "said"), [(80, True), (2, False)])
def test_other_work_on_the_machine_is_named(small, inside, oelm, monkeypatch, tmp_path, percent, said):
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: percent)
    result = oelm("bench", "baseline", "--repeats", 1, "--out", tmp_path / "b")
    assert (result.code, f"Other work took {percent} %" in " ".join(result.out.split())) == (0, said)
    assert (f"Other work took {percent} %" in (tmp_path / "b.md").read_text()) == said
    assert json.loads((tmp_path / "b.json").read_text())["busy"] == percent
    result = oelm("bench", "baseline", "--repeats", 1, "--json")
    assert (json.loads(result.out)["busy"], f"other work took {percent} %" in result.err) == (percent, said)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("class Own(Exception): pass\nraise Own('mine')", "the peer nanogpt failed: Own: mine"),
        ("import os; os._exit(3)", "a measured process died: exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "a measured process died: not enough memory?"),
    ],
)
def test_a_peer_that_fails_is_named_with_its_reason(small, oelm, tmp_path, program, reason):
    (tmp_path / "model.py").write_text(f"print('hello')\n{program}\n")
    result = oelm("bench", "baseline", "nanogpt", "--nanogpt", tmp_path, "--repeats", 1)
    assert (result.code, result.out.strip()) == (2, "")
    assert reason in result.err


def test_a_result_names_the_processor_and_the_version_of_a_peer(small, inside, oelm, tmp_path):
    transformers = pytest.importorskip("transformers")
    assert oelm("bench", "baseline", "transformers", "--repeats", 1, "--out", tmp_path / "b").code == 0
    text = (tmp_path / "b.md").read_text()
    facts = text.rstrip().splitlines()[-1].replace("\\", "")
    assert facts.startswith("cpu ")
    assert f"torch {torch.__version__}, oelm 0.1.0, transformers {transformers.__version__}, on 20" in facts


def test_theory_is_over_the_same_contender_as_the_speed_up(small, inside, oelm):
    """Baseline over sliced is the inverse of sliced over baseline."""

    def bounds(*names):
        found = json.loads(oelm("bench", *names, "--repeats", 1, "--json").out)
        return {entry["name"]: entry["bound"] for entry in found["entries"]}

    there, back = bounds("baseline", "oelm_sliced"), bounds("oelm_sliced", "baseline")
    assert there["baseline"] == back["oelm_sliced"] == 1
    assert there["oelm_sliced"] == pytest.approx(1 / back["baseline"]) != 1


def test_ctrl_c_while_a_contender_starts_is_answered(monkeypatch):
    """It comes while processes that should not hear it are started."""
    started = []
    Process = module.measure.multiprocessing.context.SpawnProcess
    start = Process.start

    def interrupted(self):
        signal.raise_signal(signal.SIGINT)
        start(self)
        started.append(self)

    monkeypatch.setattr(Process, "start", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            module.measure.Apart(time.sleep, 1)
    finally:
        signal.signal(signal.SIGINT, before)
    started[0].join(10)
    assert started[0].exitcode == -signal.SIGTERM


def test_a_step_of_every_contender_ends_in_an_update(small):
    for name in ("baseline", "oelm_v2", "oelm_shared", "oelm_sliced", "transformers", "published"):
        if name == "transformers":
            pytest.importorskip("transformers")
        made = []
        original = torch.nn.Module.__init__

        def note(self, *args, original=original, made=made, **options):
            made.append(self)
            original(self, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.Module, "__init__", note)
            step = contender(name, configure("pocket", {"max_lr": 1e-2}, name if name in ARMS else "baseline"))
        before = {id(p): p.detach().clone() for m in made for p in m._parameters.values() if p is not None}
        step()
        now = {id(p): p for m in made for p in m._parameters.values() if p is not None}
        assert any(not torch.equal(now[key], value) for key, value in before.items()), name


@pytest.mark.parametrize("name", ["oelm_v2+compile", "published+compile"])
def test_a_compiled_contender_is_the_same_model_through_the_compiler(small, oelm, monkeypatch, name):
    """The compiler is put aside for what it was given; contenders stay in this process."""
    given = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: given.append(type(model).__name__) or model)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model: given.append(type(model).__name__))
    step = contender(name, configure("pocket", {"compile": True}, name.split("+")[0].replace("published", "baseline")))
    step()
    assert given == ["GPT" if name.startswith("oelm") else "PublishedGPT"]
    result = oelm("bench", "--help")
    assert "+compile" in result.out


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("ValueError", "the peer published failed: ValueError: boom"), ("SystemExit", "failed: SystemExit: boom"),
     ("torch._inductor.exc.InductorError", "torch.compile: boom; leave +compile out")],
)  # fmt: skip
def test_what_fails_in_a_step_is_told_in_one_line(small, monkeypatch, kind, reason):
    """As the process that measures tells the one that asks."""
    place, _, name = kind.rpartition(".")
    error = type(name, (RuntimeError,), {"__module__": place}) if place else {**vars(builtins)}[name]

    def fails(*given):
        raise error("boom\nand more of it" if place else "boom")

    told = []
    pipe = SimpleNamespace(recv=lambda: "turn", send=told.append)
    monkeypatch.setattr(module, "peer", lambda *given: fails)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    module.measure._serve(pipe, 1, contender, ("published", configure("pocket", {})))
    assert isinstance(told[-1], UserError)
    assert str(told[-1]).endswith(reason)


def test_profile_finds_every_part_and_accounts_for_the_backward_pass(oelm, tmp_path):
    shape = ("--preset", "tiny", "--dropout", 0.1, "--steps", 2, "--threads", 1)
    result = oelm("profile", *shape, "--json", "--trace", tmp_path / "t" / "trace.json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert (found["config"]["preset"], found["threads"], found["steps"]) == ("tiny", 1, 2)
    parts = {part["name"]: part for part in found["parts"]}
    expected = {"embeddings", "norms", "attention weights", "ffn", "output head and loss", "dropout"}
    expected |= {"attention q, k, v", "attention o", "optimizer", "gradient norm and clipping"}
    assert expected <= parts.keys()
    for name in ("ffn", "attention weights", "attention q, k, v", "attention o", "norms"):
        assert parts[name]["backward"] > 0, name
    unexplained = parts.get("everything else", {"forward": 0.0, "backward": 0.0})
    whole = sum(part["forward"] + part["backward"] for part in parts.values())
    assert unexplained["forward"] + unexplained["backward"] < 0.25 * whole
    assert "traceEvents" in json.loads((tmp_path / "t" / "trace.json").read_text())


def test_an_encoder_can_be_profiled_too(oelm, encoder):
    shape = ("--arch", encoder, "--labels", 3, "--batch_size", 4, "--micro_batch", 2, "--steps", 1, "--threads", 1)
    result = oelm("profile", *shape, "--json")
    assert result.code == 0, result.err
    parts = {part["name"] for part in json.loads(result.out)["parts"]}
    assert {"embeddings", "norms", "attention weights", "ffn", "pooler and classifier", "attention q"} <= parts


def test_a_compiled_model_has_no_parts_to_profile(oelm):
    result = oelm("profile", "--preset", "tiny", "--compile")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "--no_compile" in result.err


def test_what_the_forward_pass_keeps_is_counted_by_part(oelm):
    shape = ("--preset", "tiny", "--steps", 1, "--threads", 1, "--batch_size", 64, "--json")
    parts = {part["name"]: part for part in json.loads(oelm("profile", *shape).out)["parts"]}
    config = resolve({"preset": "tiny", "batch_size": 64})
    inner, outer = (config.num_layers * 64 * config.seq_len * width * 4 for width in (config.d_ff, config.d_model))
    assert parts["ffn"]["kept"] == 2 * inner + outer  # what goes into GELU and comes out, and the residual stream


@pytest.mark.parametrize(
    ("trace", "message"),
    [("/proc/nowhere/t.json", "cannot write to /proc/nowhere"), ("/tmp", "no name for a file"),
     ("/dev/full", "no name for a file")],
)  # fmt: skip
def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_measured(oelm, trace, message):
    result = oelm("profile", "--preset", "tiny", "--trace", trace)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert message in result.err


def test_a_trace_that_the_profiler_could_not_finish_is_an_error(oelm, tmp_path, monkeypatch):
    def half(self, path):
        with open(path, "w") as file:
            file.write('{"traceEvents": [')

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", half)
    result = oelm("profile", "--preset", "tiny", "--steps", 1, "--threads", 1, "--trace", tmp_path / "t.json")
    assert result.code == 2
    assert "is the disk full?" in result.err
    assert not list(tmp_path.iterdir())
