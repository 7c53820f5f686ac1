import json
import random
import shutil

import pytest
import torch

from oelm.errors import UserError
from oelm.train import checkpoint
from oelm.train.folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def save(folder, step):
    tensors = {"w": torch.full((4, 4), float(step))}
    return checkpoint.save(folder, step, tensors, {"w/exp_avg": tensors["w"] * 2}, {"step": step})


def test_a_checkpoint_comes_back_as_it_went(folder):
    save(folder, 3)
    found = checkpoint.load(folder.last)
    assert found.state == {"step": 3}
    assert torch.equal(found.model["w"], torch.full((4, 4), 3.0))
    assert torch.equal(found.optimizer["w/exp_avg"], torch.full((4, 4), 6.0))
    assert not [p for p in folder.path.iterdir() if p.name.startswith(".")]


def test_any_single_damage_is_detected(folder):
    """Bit flips, truncation, swapped and missing files, in every file."""
    save(folder, 1)
    save(folder, 2)
    chance = random.Random(0)
    good = folder.step_folder(2)
    names = sorted(p.name for p in good.iterdir())
    for trial in range(200):
        work = folder.path / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(good, work)
        target = work / names[trial % len(names)]
        content = bytearray(target.read_bytes())
        match chance.choice(("flip", "cut", "swap", "remove")):
            case "flip":
                content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
                target.write_bytes(content)
            case "cut":
                target.write_bytes(content[: chance.randrange(len(content))])
            case "swap":
                shutil.copy(folder.step_folder(1) / target.name, target)
            case "remove":
                target.unlink()
        with pytest.raises(ValueError):
            checkpoint.load(work)


def test_a_damaged_checkpoint_falls_back_loudly_to_the_one_before(folder):
    for step in (1, 2, 3):
        save(folder, step)
    (folder.step_folder(3) / "model.safetensors").write_bytes(b"junk")
    said = []
    assert checkpoint.newest(folder, said.append).state["step"] == 2
    assert len(said) == 1
    assert "WARNING" in said[0]
    assert "step-00000003 is damaged" in said[0]
    for step in (1, 2):
        (folder.step_folder(step) / "state.json").unlink()
    with pytest.raises(UserError, match="every checkpoint"):
        checkpoint.newest(folder, said.append)


def test_a_save_that_dies_at_any_point_leaves_a_loadable_checkpoint(folder, monkeypatch):
    """Die at the n-th write, sync or rename of a save, for every n, also when it replaces a checkpoint."""
    import os
    from pathlib import Path

    class Died(BaseException):
        pass

    places = [(os, "fsync"), (os, "replace"), (Path, "rename"), (Path, "symlink_to"), (shutil, "rmtree")]
    originals = {(owner, name): getattr(owner, name) for owner, name in places}
    points = 0
    for replaces in (False, True):
        n = 0
        while True:
            shutil.rmtree(folder.path)
            folder.path.mkdir()
            save(folder, 1)
            if replaces:
                save(folder, 2)
            left = [n]

            def dying(key, left=left):
                def call(*arguments, **options):
                    if left[0] == 0:
                        raise Died
                    left[0] -= 1
                    return originals[key](*arguments, **options)

                return call

            with monkeypatch.context() as patch:
                for owner, name in places:
                    patch.setattr(owner, name, dying((owner, name)))
                try:
                    save(folder, 2)
                    finished = True
                except Died:
                    finished = False
            checkpoint.sweep(folder)
            found = checkpoint.newest(folder, lambda line: None)
            assert found is not None
            assert found.state["step"] in (1, 2)
            if finished or replaces:
                assert found.state["step"] == 2
            if finished:
                break
            n += 1
            points += 1
    assert points > 20


def test_pruning_keeps_the_two_newest_the_best_and_the_saves(folder):
    for step in range(1, 11):
        save(folder, step)
    checkpoint.link(folder.best, folder.step_folder(3))
    checkpoint.prune(folder, save_interval=4, keep_saves=0)
    assert sorted(int(p.name[5:]) for p in folder.path.glob("step-*")) == [3, 4, 8, 9, 10]
    checkpoint.prune(folder, save_interval=4, keep_saves=1)
    assert sorted(int(p.name[5:]) for p in folder.path.glob("step-*")) == [3, 8, 9, 10]


def test_nothing_is_ever_unpickled(folder):
    """A pickle in the place of a tensor file is refused by its hash, and again as a tensor file."""
    import pickle

    save(folder, 1)
    bomb = pickle.dumps(print)
    target = folder.step_folder(1) / "model.safetensors"
    target.write_bytes(bomb)
    with pytest.raises(ValueError, match="does not match its hash"):
        checkpoint.load(folder.step_folder(1))
    from oelm.files import sha256_file

    manifest = json.loads((folder.step_folder(1) / "manifest.json").read_text())
    manifest["model.safetensors"] = sha256_file(target)
    (folder.step_folder(1) / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError):
        checkpoint.load(folder.step_folder(1))
