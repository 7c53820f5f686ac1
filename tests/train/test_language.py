import math

import numpy as np
import pytest
import torch

from oelm.config import resolve
from oelm.data.tokens import TokenData, open_data
from oelm.train.distributed import World
from oelm.train.language import LanguageModelling
from oelm.train.task import Interrupted, ReadAhead

CPU = torch.device("cpu")


def task(data, rank=0, size=1, **settings):
    config = resolve({"preset": "tiny", "data_path": str(data), "processes": size, **settings})
    return LanguageModelling(config, open_data("x", str(data)), World(rank, size, CPU))


def test_targets_are_the_next_tokens(data):
    (inputs, targets), *_ = task(data).micro_batches(3)
    assert inputs.shape == targets.shape == (4, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_micro_batches_make_up_the_batch(data):
    whole = task(data).micro_batches(7)[0][0]
    parts = task(data, micro_batch=2).micro_batches(7)
    assert len(parts) == 2
    assert torch.equal(torch.cat([part[0] for part in parts]), whole)


def test_two_processes_share_the_batch_of_one(data):
    whole = task(data, batch_size=8).micro_batches(5)[0][0]
    shares = [task(data, rank, 2, batch_size=4).micro_batches(5)[0][0] for rank in (0, 1)]
    assert torch.equal(torch.cat(shares), whole)


def test_arms_of_one_seed_see_the_same_batches(data):
    for step in (0, 50):
        batches = [task(data, model_type=arm).micro_batches(step)[0][0] for arm in ("baseline", "oelm_v2")]
        assert torch.equal(*batches)
        assert not torch.equal(batches[0], task(data, seed=7).micro_batches(step)[0][0])


@pytest.mark.parametrize("length", [33, 64, 65, 66, 1000, 9001])
def test_evaluation_weighs_every_token_of_the_split_once(length):
    """Against a loop over single tokens' probabilities in float64."""
    tokens = np.random.default_rng(0).integers(0, 257, length).astype(np.uint16)
    config = resolve({"preset": "tiny"})
    made = LanguageModelling(config, TokenData(None, None, {"train": tokens, "val": tokens}), World(0, 1, CPU))
    model = made.build_model().eval()
    with torch.no_grad():
        model.tokens.weight.mul_(30)  # uneven predictions
    found = made.evaluate(model, "val", lambda: False).values
    total = 0.0
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        for start in range(0, length - 1, 32):
            window = ids[start : start + 33]
            logp = model(window[None, :-1])[0].double().log_softmax(-1)
            total -= logp[torch.arange(len(window) - 1), window[1:]].sum().item()
    assert found["tokens"] == length - 1
    assert found["loss"] == pytest.approx(total / (length - 1), rel=1e-5)
    assert found["ppl"] == pytest.approx(math.exp(found["loss"]))


def test_bits_per_byte_counts_the_texts_bytes(data):
    made = task(data)
    found = made.evaluate(made.build_model().eval(), "val", lambda: False).values
    counts = made.data.meta["splits"]["val"]
    assert found["bpb"] == pytest.approx(found["loss"] / math.log(2) * counts["tokens"] / counts["bytes"])
    assert found["bpb"] == pytest.approx(8, rel=0.05)  # an untrained model guesses among 257 byte tokens


def test_the_test_split_is_also_summed_document_by_document(data):
    """Rows add up to the whole split; each equals the losses of its own tokens, counted by hand."""
    made = task(data)
    model = made.build_model().eval()
    found = made.evaluate(model, "test", lambda: False)
    tokens = made.data.splits["test"].astype(np.int64)
    ends = np.flatnonzero(tokens == 256)
    assert found.documents.shape == (len(ends), 2)
    assert found.documents[:, 1].sum() == len(tokens) - 1
    assert found.documents[:, 0].sum() / (len(tokens) - 1) == pytest.approx(found.values["loss"], rel=1e-9)
    assert found.documents[0, 1] == ends[0]  # the very first token is not predicted
    assert found.documents[3, 1] == ends[3] - ends[2]
    single = []
    for position in range(ends[2] + 1, ends[3] + 1):
        start = (position - 1) // 32 * 32
        window = torch.from_numpy(tokens[start : position + 1])
        with torch.no_grad():
            single.append(-model(window[None, :-1])[0, -1].double().log_softmax(-1)[window[-1]].item())
    assert found.documents[3, 0] == pytest.approx(sum(single), rel=1e-5)
    assert made.evaluate(model, "val", lambda: False).documents is None


def test_evaluation_can_be_interrupted(data):
    made = task(data)
    with pytest.raises(Interrupted):
        made.evaluate(made.build_model(), "val", lambda: True)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_reading_ahead_gives_the_same_batches(data, workers):
    made = task(data)
    read = ReadAhead(made.micro_batches, workers, last=9)
    for step in range(10):
        assert torch.equal(read(step)[0][0], made.micro_batches(step)[0][0])
    read.close()
