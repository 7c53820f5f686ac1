"""The loss of every training step by oelm and by plain code, from the same weights on the same batches.

    python -m bench.agreement --data data/tinystories-bpe1024 --out results/bench-agreement

The plain code (bench.plain_gpt) has none of oelm's optimisations: attention and loss are written out, every
gradient is dense, AdamW and clipping are torch's defaults. Writes PREFIX.json, with both curves, and PREFIX.md.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from bench import PREPARED, again, run
from bench.plain_gpt import PlainGPT, plain_steps
from oelm.config import RunConfig, resolve
from oelm.data.tokens import TokenData, open_data
from oelm.files import write_atomic
from oelm.machine import cores, tune
from oelm.model import products
from oelm.model.build import build_model
from oelm.model.gpt import GPT
from oelm.train.distributed import World
from oelm.train.language import LanguageModelling
from oelm.train.optim import learning_rate
from oelm.train.step import Update


def translate(model: GPT) -> dict[str, torch.Tensor]:
    """The weights of a GPT under the names of the plain one."""
    ours = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    theirs = {f"norm.{part}": ours[f"final_norm.{part}"] for part in ("weight", "bias")}
    theirs |= {"wte.weight": ours["tokens.weight"], "wpe.weight": ours["positions.weight"]}
    names = {"ln1": "attention_norm", "ln2": "ffn_norm", "mlp.0": "ffn.up", "mlp.2": "ffn.down"}
    for i in range(model.config.num_layers):
        block = f"blocks.{i}."
        theirs |= {
            f"{block}{a}.{part}": ours[f"{block}{b}.{part}"] for a, b in names.items() for part in ("weight", "bias")
        }
        theirs[f"{block}qkv.weight"] = torch.cat([ours[f"{block}attention.{role}.weight"] for role in "qkv"])
        theirs[f"{block}out.weight"] = ours[f"{block}attention.o.weight"]
    return theirs


def curves(config: RunConfig, data: TokenData) -> tuple[np.ndarray, np.ndarray]:
    """(oelm's loss, the plain code's loss) of every step."""
    world = World(0, 1, torch.device("cpu"))
    task = LanguageModelling(config, data, world)
    model = build_model(config)
    assert isinstance(model, GPT)
    plain = PlainGPT(config)
    plain.load_state_dict(translate(model), strict=False)  # its masks are no weights
    theirs = plain_steps(config, plain, data.splits["train"])
    update = Update(model, config, world, task.loss)
    losses = []
    for step in range(config.max_steps):
        loss, _ = update.gradient(step, task.micro_batches(step))
        update.apply(learning_rate(config, step))
        losses.append((loss, next(theirs)))
    ours, others = np.array(losses).T
    return ours, others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/tinystories-bpe1024", help=PREPARED)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(cores())
    products.LARGE = products.LARGE_ALONE = 0  # pocket has no large ones: all are to go their way
    tune()
    config = resolve(dict(preset="pocket", data_path=options.data, max_steps=options.steps, dropout=0.0))
    ours, plain = curves(config, open_data("", options.data))
    apart = np.abs(ours - plain)
    found = {"largest": apart.max(), "at_step": int(apart.argmax()) + 1, "oelm": list(ours), "plain": list(plain)}
    text = (
        f"# The same losses without any optimisation\n\nPocket, {options.data}, {options.steps} steps from the same "
        f"weights on the same batches. Loss {ours[0]:.4f} at the first step, {ours[-1]:.4f} at the last.\n\n"
        f"Largest difference of a step's loss: {apart.max():.1e} (step {apart.argmax() + 1}); median "
        f"{np.median(apart):.1e}.\n{again('agreement', options)}"
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out.with_name(f"{options.out.name}.json"), json.dumps(found, indent=1) + "\n")
    write_atomic(options.out.with_name(f"{options.out.name}.md"), text)
    print(text)


if __name__ == "__main__":
    run(main)
