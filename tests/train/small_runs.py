"""Small runs, and what tests ask of them."""

import json
import os
import signal
import sys
import threading
import time

import torch
from safetensors.torch import load_file

from oelm.config import resolve
from oelm.model.build import build_model
from oelm.train.folder import RunFolder

SMALL = ("--max_steps", 12, "--val_interval", 5, "--save_interval", 10)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "oelm")


def weights(run):
    folder = RunFolder(run)
    frozen = load_file(folder.frozen) if folder.frozen.exists() else {}
    return {**load_file(folder.last / "model.safetensors"), **frozen}


def summary(run):
    return json.loads((run / "summary.json").read_text())


def command(data, run, *arguments, launcher=(sys.executable, "-m", "oelm")):
    fixed = ("--preset", "tiny", "--data_path", data, "--threads", 1, "--device", "cpu", "--out_dir", run)
    return [str(word) for word in (*launcher, "train", *fixed, *arguments)]


def frames(seed=42):
    model = build_model(resolve({"preset": "tiny", "model_type": "oelm_v2", "seed": seed}))
    return {n: p.detach() for n, p in model.named_parameters() if n.endswith(("q.weight", "k.weight"))}


def assert_frozen(run):
    """The frozen tensors are still the frames of the seed, bit for bit, and in no optimizer state."""
    after = load_file(run / "frozen.safetensors")
    assert after.keys() == frames().keys()
    assert all(torch.equal(after[name], frame) for name, frame in frames().items())
    state = {key.rpartition("/")[0] for key in load_file(run / "last/optimizer.safetensors")}
    assert state
    assert not state & after.keys()
    assert not load_file(run / "last/model.safetensors").keys() & after.keys()


class stop_after:  # noqa: N801  # reads as a verb
    """Send this process SIGTERM once a run has done some steps."""

    def __init__(self, run, steps):
        self.run, self.steps, self.done = run, steps, False

    def __enter__(self):
        def watch():
            while not self.done:
                log = self.run / "training.log"
                if log.exists() and f"step {self.steps}/" in log.read_text():
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
                time.sleep(0.001)

        self.thread = threading.Thread(target=watch)
        self.thread.start()

    def __exit__(self, *_):
        self.done = True
        self.thread.join()
