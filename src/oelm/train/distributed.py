"""Processes that share a run: who this one is, and the few words they exchange."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oelm.errors import UserError
from oelm.machine import place_in_world, threads_for, tune


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Sum of each value over the processes."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def any(self, flag: bool) -> bool:
        return self.sum(float(flag))[0] > 0

    def from_leader(self, value: int) -> int:
        """What the leading process says."""
        return int(self.sum(float(value) if self.leads else 0.0)[0])

    def wrap(self, model: nn.Module) -> nn.Module:
        """Average gradients over the processes, if there are several."""
        if self.size == 1:
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)


@contextmanager
def join(device: str, threads: int) -> Iterator[World]:
    """Set up this process as torchrun's environment says; alone without it."""
    rank, size = place_in_world()
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    place = pick_device(device, local_rank)
    torch.set_num_threads(threads_for(threads, local_size if size > 1 else 1))
    tune()
    if size == 1:
        yield World(0, 1, place)
        return
    backend = "nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=30))
    try:
        yield World(rank, size, place)
    finally:
        dist.destroy_process_group()


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise UserError("--device cuda: torch sees no CUDA GPU here; take --device cpu")
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: torch sees no Apple GPU here; take --device cpu")
    return torch.device(name)
