"""Checkpoints: safetensors and JSON with a hash manifest, atomic, no pickle.

    step-00001000/  model.safetensors  optimizer.safetensors  state.json  manifest.json
    last -> step-00001000      best -> step-00000500

A checkpoint is written under another name, synced, and renamed; the links are replaced by rename.
Whatever the moment of a crash, the newest whole checkpoint can be found and proved whole.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from oelm.config import RunConfig
from oelm.errors import UserError
from oelm.files import fsync_file, fsync_folder, sha256_file, write_json
from oelm.model import freeze
from oelm.train.folder import RunFolder

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    model: Tensors
    optimizer: Tensors
    state: dict[str, Any]


def save(folder: RunFolder, step: int, model: Mapping[str, Tensor], optimizer: Tensors, state: dict[str, Any]) -> Path:
    """Write the checkpoint of `step` and point `last` at it."""
    final = folder.step_folder(step)
    work = folder.path / f".saving-{final.name}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        write_tensors(work / "model.safetensors", model)
        write_tensors(work / "optimizer.safetensors", optimizer)
        write_json(work / "state.json", state)
        write_json(work / "manifest.json", {p.name: sha256_file(p) for p in sorted(work.iterdir())})
        fsync_folder(work)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    replaced = final.with_name(final.name + ".old")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    work.rename(final)
    fsync_folder(folder.path)
    link(folder.last, final)
    _remove(replaced)
    return final


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # its own kind of error, also for a full disk
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from None
    path.chmod(0o666 & ~_umask())  # safetensors keeps its files to their owner; colleagues may load these
    fsync_file(path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def link(name: Path, target: Path) -> None:
    temporary = name.with_name(f".{name.name}.link")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    os.replace(temporary, name)
    fsync_folder(name.parent)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; ValueError says what is damaged."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
            if sha256_file(path / name) != manifest[name]:
                raise ValueError(f"{name} does not match its hash")
        state = json.loads((path / "state.json").read_text())
        if not isinstance(state["step"], int) or f"step-{state['step']:08d}" != path.resolve().name[:13]:
            raise ValueError("state.json is of another step")
        model, optimizer = load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors")
        return Checkpoint(path.resolve(), model, optimizer, state)
    except PermissionError as error:
        raise UserError(f"no right to read {error.filename}: ask its owner") from None
    except (OSError, KeyError, TypeError, AttributeError, SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def newest(folder: RunFolder, warn: Callable[[str], None], at_most: int = 10**9) -> Checkpoint | None:
    """The newest whole checkpoint, not behind step `at_most`; damaged ones are named loudly and passed over.

    None: there is none to look at. Where all are damaged, nothing is trained anew unasked.
    """
    found = [(step, path.suffix != ".old", path) for step, path in folder.checkpoints() if step <= at_most]
    for _, _, path in sorted(found, reverse=True):
        try:
            return load(path)
        except ValueError as error:
            warn(f"WARNING: checkpoint {path} is damaged ({error}): falling back to the one before it")
    if found:
        raise UserError(
            f"every checkpoint in {folder.path} is damaged: restore a copy, or start again in another --out_dir"
        )
    return None


def pick(folder: RunFolder, which: str, warn: Callable[[str], None]) -> Checkpoint:
    """The checkpoint called best, last or step-…; the newest whole one if it is damaged."""
    path = folder.path / which
    if not path.exists() and (which != "last" or not folder.last_step()):
        have = ", ".join(sorted(p.name for p in folder.path.glob("step-*"))) or "none"
        packed = have == "none" and folder.finished()
        why = "it was packed without its weights" if packed else "the best is known only after a validation"
        raise UserError(f"no checkpoint {which} in {folder.path} (it has: {have}): {why}")
    if path.exists():
        try:
            return load(path)
        except ValueError as error:
            warn(f"WARNING: checkpoint {path} is damaged ({error}): looking for another one")
    found = newest(folder, warn)
    if found is None:
        raise UserError(f"{folder.path} has no checkpoint yet: let it train up to its first validation")
    return found


def give_weights(
    model: nn.Module, found: Checkpoint, folder: RunFolder, config: RunConfig, assign: bool = False
) -> None:
    """Give the model every parameter, each once: of those that layers share, files know one name only.

    What is frozen for the whole run comes from its own file, and must still be what it was at the start.
    """
    own = [name for name, _ in model.named_parameters()]
    once = freeze.policy_of(model, config).always(own)
    try:
        tensors = {**found.model, **(load_file(folder.frozen) if once else {})}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder.frozen} is damaged or missing ({error}): restore it from a copy") from None
    try:
        if tensors.keys() != {*own}:
            raise RuntimeError(f"parameters differ: {', '.join(sorted({*own} ^ tensors.keys())[:4])}")
        model.load_state_dict(tensors, strict=False, assign=assign)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1]
        raise UserError(f"{folder.config_file} does not describe the checkpoint: {reason}") from None
    if freeze.fingerprint(model, once) != found.state.get("frozen_hash"):
        raise UserError(f"{folder.frozen} is damaged: its frozen parameters are not those of the run")


def point_at(folder: RunFolder, found: Checkpoint, best_step: int) -> None:
    """Set the links as they must be after `found`: a crash may have come between a rename and its links."""
    final = folder.step_folder(found.state["step"])
    if found.path.name != final.name:
        _remove(final)
        found.path.rename(final)
    link(folder.last, final)
    if folder.step_folder(best_step).exists():
        link(folder.best, folder.step_folder(best_step))


def prune(folder: RunFolder, save_interval: int, keep_saves: int) -> None:
    """Keep the two newest, the best, and those at save intervals (the newest `keep_saves` of them if > 0)."""
    steps = {int(path.name[5:]): path for path in folder.path.glob("step-????????")}
    ordered = sorted(steps, reverse=True)
    saves = [step for step in ordered if step % save_interval == 0]
    keep = {*ordered[:2], *(saves[:keep_saves] if keep_saves else saves)}
    for step, path in steps.items():
        if step not in keep and path.resolve() != folder.best.resolve():
            _remove(path)


def set_aside(folder: RunFolder, step: int) -> None:
    """Rename what lies behind the step that a run goes on from: it must not count among the newest checkpoints."""
    for there, path in folder.checkpoints():
        if there > step:
            aside = path.with_name(f"aside-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def sweep(folder: RunFolder) -> None:
    """Clear away what a killed process left behind."""
    for pattern in (".saving-*", ".removing-*", ".*.tmp", ".*.link"):
        for path in folder.path.glob(pattern):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _remove(path: Path) -> None:
    """Rename before deleting, so that a half-deleted checkpoint is never mistaken for a damaged one."""
    if path.exists():
        doomed = path.with_name(f".removing-{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
