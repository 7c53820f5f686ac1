"""Crashes at the worst moment, and files that are not what they were."""

import json
import shutil

import pytest
from safetensors import SafetensorError

from oelm.errors import UserError
from oelm.files import sha256_file
from oelm.train import checkpoint
from oelm.train.folder import RunFolder
from tests.programmes.kill_resume import fingerprint

SMALL = ("--max_steps", 12, "--val_interval", 5, "--save_interval", 10)


class Killed(BaseException):
    pass


@pytest.fixture
def interrupted(tiny, tmp_path, monkeypatch):
    """A run that died at step 11, with checkpoints at 5 and 10."""
    from oelm.train.loop import Trainer

    real = Trainer._step

    def step(self, read):
        if self.state.step == 11:
            raise Killed
        real(self, read)

    def make(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_step", step)
            with pytest.raises(Killed):
                tiny(*SMALL, *arguments)
        return RunFolder(tmp_path / "run")

    return make


@pytest.mark.parametrize("dies_at", [0, 1, 2, 3, 4])
def test_a_death_between_a_checkpoint_and_its_links_is_mended(tiny, tmp_path, oelm, monkeypatch, dies_at):
    """The n-th link of the run is never made: `last` or `best`, early or at the very end."""
    assert tiny(*SMALL, out="whole").code == 0
    real, count = checkpoint.link, [0]

    def link(name, target):
        if count[0] == dies_at:
            raise Killed
        count[0] += 1
        real(name, target)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "link", link)
        with pytest.raises(Killed):
            tiny(*SMALL)
    assert oelm("train", "--resume", tmp_path / "run").code == 0
    run, whole = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "whole")
    assert fingerprint(run) == fingerprint(whole)
    assert (run.last.resolve().name, run.best.resolve().name) == (whole.last.resolve().name, whole.best.resolve().name)


def test_a_full_disk_as_safetensors_reports_it(tiny, tmp_path, monkeypatch):
    def full(tensors, path):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    result = tiny(*SMALL)
    assert (result.code, "disk full while saving step 5" in result.err) == (2, True)


def test_a_refused_start_leaves_nothing_and_a_refused_resume_changes_nothing(interrupted, tiny, data, tmp_path, oelm):
    folder = interrupted()
    before = folder.config_file.read_text()
    other = tmp_path / "other"
    shutil.copytree(data, other)
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps({**meta, "source_hash": "another"}))
    assert "data are not those" in oelm("train", "--resume", folder.path, "--data_path", other).err
    assert folder.config_file.read_text() == before
    assert oelm("train", "--resume", folder.path).code == 0


@pytest.mark.parametrize("damage", ["flip", "empty", "missing", "text"])
def test_damaged_metrics_are_made_again_from_an_earlier_checkpoint(interrupted, tiny, tmp_path, oelm, damage):
    assert tiny(*SMALL, out="whole").code == 0
    folder = interrupted()
    lines = folder.metrics.read_text().splitlines(keepends=True)
    match damage:
        case "flip":
            lines[7] = lines[7].replace('"step"', '"stup"')
            folder.metrics.write_text("".join(lines))
        case "empty":
            folder.metrics.write_text("")
        case "missing":
            folder.metrics.unlink()
        case "text":
            lines[2] = lines[2].replace('"step": 3', '"step": "3"')
            folder.metrics.write_text("".join(lines))
    result = oelm("train", "--resume", folder.path)
    assert result.code == 0
    assert "is whole only up to step" in result.out
    assert fingerprint(folder) == fingerprint(RunFolder(tmp_path / "whole"))


def test_where_every_checkpoint_is_damaged_nothing_is_trained_anew(interrupted, oelm):
    folder = interrupted()
    before = folder.metrics.read_bytes()
    for path in folder.path.glob("step-*"):
        (path / "model.safetensors").write_bytes(b"junk")
    result = oelm("train", "--resume", folder.path)
    assert (result.code, "every checkpoint" in result.err) == (2, True)
    assert folder.metrics.read_bytes() == before


def test_a_damaged_checkpoint_does_not_count_among_the_newest(interrupted, oelm, monkeypatch):
    """It goes on from step 5 and saves at 10 and 12: what was damaged is kept elsewhere, and takes no place."""
    folder = interrupted()
    (folder.step_folder(10) / "model.safetensors").write_bytes(b"junk")
    seen = []
    prune = checkpoint.prune
    monkeypatch.setattr(checkpoint, "prune", lambda folder, *a: (seen.append(folder.last_step()), prune(folder, *a)))
    assert oelm("train", "--resume", folder.path).code == 0
    assert seen == [10, 12]
    assert sorted(p.name for p in folder.path.glob("*step-*")) == [
        "aside-step-00000010", "step-00000010", "step-00000012",
    ]  # fmt: skip


def test_an_edited_config_is_refused(interrupted, oelm):
    folder = interrupted()
    folder.config_file.write_text(folder.config_file.read_text().replace("max_lr = 0.004", "max_lr = 0.005"))
    result = oelm("train", "--resume", folder.path)
    assert (result.code, "was edited" in result.err) == (2, True)


def rewrite_state(path, **changes):
    """Change state.json and make the manifest agree, as no accident would."""
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, **changes}))
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "state.json": sha256_file(path / "state.json")}))


@pytest.mark.parametrize("changes", [{"step": 9}, {"step": 99}, {"step": "10"}])
def test_a_state_of_another_step_is_a_damaged_checkpoint(interrupted, changes):
    folder = interrupted()
    rewrite_state(folder.step_folder(10), **changes)
    with pytest.raises(ValueError):
        checkpoint.load(folder.step_folder(10))


@pytest.mark.parametrize("changes", [{"elapsed": None}, {"best_loss": "low"}, {"data": None}, {"best_step": "x"}])
def test_a_state_of_wrong_types_is_refused_in_one_line(interrupted, oelm, changes):
    folder = interrupted()
    rewrite_state(folder.step_folder(10), **changes)
    result = oelm("train", "--resume", folder.path)
    assert (result.code, len(result.err.strip().splitlines())) == (2, 1)
    assert "state.json is damaged" in result.err


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", '{"parts": 3}'])
def test_environment_and_summary_are_no_obstacle(interrupted, oelm, content):
    folder = interrupted()
    folder.environment.write_text(content)
    folder.summary.write_text(content)
    assert oelm("train", "--resume", folder.path).code == 0


@pytest.mark.parametrize("damage", ["missing", "cut", "flip"])
def test_damaged_frames_are_refused_by_train_and_generate(interrupted, oelm, damage):
    folder = interrupted("--model_type", "oelm_v2")
    content = bytearray(folder.frozen.read_bytes())
    if damage == "missing":
        folder.frozen.unlink()
    else:
        content[-1] ^= 1
        folder.frozen.write_bytes(content if damage == "flip" else content[:100])
    for verb in (("train", "--resume", folder.path), ("generate", folder.path, "--max_tokens", 3)):
        result = oelm(*verb)
        assert (result.code, "frozen.safetensors is damaged" in result.err) == (2, True)


@pytest.mark.parametrize(
    "content", [None, "", "5\n", '{"step": 0}\n', '{"step": 0, "frozen": {}}\n', '{"step": 0, "fro']
)
def test_a_lost_freeze_audit_is_made_anew(interrupted, oelm, content):
    folder = interrupted("--freeze", "qk:from0.5")
    folder.audit.unlink() if content is None else folder.audit.write_text(content)
    result = oelm("train", "--resume", folder.path)
    assert (result.code, "freeze_audit.jsonl is damaged or missing" in result.out) == (0, True)
    last = json.loads(folder.audit.read_text().splitlines()[-1])
    assert last["step"] == 9
    assert {name.split(".")[3] for name in last["frozen"]} == {"q", "k"}


def test_what_is_frozen_is_proved_after_the_audit_was_lost_too(interrupted, oelm, monkeypatch):
    from oelm.train.step import Update

    folder = interrupted("--freeze", "qk:from0.5")
    folder.audit.unlink()
    real = Update.apply

    def meddle(self, rate):
        real(self, rate)
        self.model.get_parameter("blocks.0.attention.q.weight").data.add_(1.0)

    monkeypatch.setattr(Update, "apply", meddle)
    result = oelm("train", "--resume", folder.path)
    assert (result.code, "frozen parameters changed" in result.err) == (1, True)


def test_resuming_what_is_finished_says_so(tiny, tmp_path, oelm):
    assert tiny(*SMALL).code == 0
    result = oelm("train", "--resume", tmp_path / "run")
    assert (result.code, "holds a finished run: there is nothing left to resume" in result.err) == (2, True)


def test_a_run_that_diverges_ends_in_words(tiny):
    result = tiny("--max_steps", 3, "--max_lr", 100, "--warmup_steps", 0, "--val_interval", 1)
    assert result.code in (0, 1)
    assert len(result.err.strip().splitlines()) <= 1


def test_a_model_too_large_for_the_machine_is_one_line(tiny):
    result = tiny("--vocab_size", 2**31, "--d_model", 65_536)
    assert (result.code, "out of memory" in result.err) == (1, True)


def test_no_right_to_read_is_not_damage(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001/manifest.json").write_text('{"model.safetensors": ""}')
    monkeypatch.setattr(checkpoint, "sha256_file", denied)
    with pytest.raises(UserError, match="no right to read"):
        checkpoint.load(tmp_path / "step-00000001")
