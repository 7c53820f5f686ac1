import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data.tokens import WindowOrder, check_data, open_data, permute, read_windows
from oelm.errors import UserError


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**56))
def test_permute_visits_every_index_once(size, key):
    shuffled = permute(np.arange(size, dtype=np.uint64), size, key)
    assert sorted(shuffled.tolist()) == list(range(size))


def test_permutations_look_random():
    """Mean displacement of a random permutation of n is n/3; neighbours stay neighbours 2 times in n."""
    n = 10_000
    shuffled = permute(np.arange(n, dtype=np.uint64), n, 12345).astype(np.int64)
    assert np.abs(shuffled - np.arange(n)).mean() == pytest.approx(n / 3, rel=0.03)
    assert (np.abs(np.diff(shuffled)) == 1).sum() < 20
    other = permute(np.arange(n, dtype=np.uint64), n, 12346).astype(np.int64)
    assert (shuffled == other).sum() < 20


@settings(max_examples=100, deadline=None)
@given(
    length=st.integers(2, 2000),
    seq_len=st.integers(1, 60),
    batch=st.integers(1, 17),
    seed=st.integers(0, 2**62),
    epoch=st.integers(0, 3),
)
def test_every_window_once_per_epoch_and_inside_the_data(length, seq_len, batch, seed, epoch):
    if length < seq_len + 1:
        return
    order = WindowOrder(length, seq_len, batch, seed)
    first, last = epoch * order.per_epoch, (epoch + 1) * order.per_epoch
    steps = range(first // batch, (last - 1) // batch + 1)
    starts = np.concatenate([order.starts(step) for step in steps])[first - steps[0] * batch :][: order.per_epoch]
    assert starts.min() >= 0
    assert starts.max() + seq_len + 1 <= length
    ordered = np.sort(starts)
    assert (np.diff(ordered) == seq_len).all()  # no window twice, none left out between them
    assert len(ordered) == (length - 1) // seq_len


def test_the_order_depends_on_seed_and_epoch():
    order = WindowOrder(5_001, 10, 500, 1)
    assert not np.array_equal(order.starts(0), order.starts(1))
    assert not np.array_equal(order.starts(0), WindowOrder(5_001, 10, 500, 2).starts(0))


def test_windows_are_inputs_and_next_tokens():
    windows = read_windows(np.arange(100, dtype=np.uint16), np.array([0, 40]), 5)
    assert windows.tolist() == [[0, 1, 2, 3, 4, 5], [40, 41, 42, 43, 44, 45]]
    assert windows.dtype == np.int64


def write_bins(folder, train=100, val=100, test=None, dtype=np.uint16, value=5):
    for split, count in (("train", train), ("val", val), ("test", test)):
        if count is not None:
            np.full(count, value, dtype=dtype).tofile(folder / f"{split}.bin")


def test_token_files_without_meta_are_accepted(tmp_path):
    write_bins(tmp_path)
    data = open_data("tinystories", str(tmp_path))
    assert (data.tokenizer, data.vocab_size, sorted(data.splits)) == ("gpt2", None, ["train", "val"])
    assert data.tokens_per_byte("val") is None
    check_data(data, seq_len=99, vocab_size=6)


@pytest.mark.parametrize(
    ("bins", "seq_len", "vocab", "words"),
    [
        (dict(val=20), 32, 257, ["val split", "20", "33"]),
        (dict(train=33, val=33), 33, 257, ["train split", "33", "34"]),
        (dict(value=300), 32, 257, ["token id 300", "257"]),
        (dict(value=257), 32, 257, ["token id 257"]),
    ],
)
def test_unusable_data_are_refused_with_the_numbers(tmp_path, bins, seq_len, vocab, words):
    write_bins(tmp_path, **bins)
    with pytest.raises(UserError) as error:
        check_data(open_data("x", str(tmp_path)), seq_len, vocab)
    for word in words:
        assert word in str(error.value)


def test_empty_cut_off_and_missing_files_are_named(tmp_path):
    write_bins(tmp_path)
    (tmp_path / "val.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"val\.bin is empty"):
        open_data("x", str(tmp_path))
    (tmp_path / "val.bin").write_bytes(b"abc")
    with pytest.raises(UserError, match=r"val\.bin is cut off"):
        open_data("x", str(tmp_path))
    (tmp_path / "val.bin").unlink()
    with pytest.raises(UserError, match=r"val\.bin is missing"):
        open_data("x", str(tmp_path))


def test_meta_and_files_must_agree(data, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(data, copy)
    with open(copy / "train.bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(UserError, match=r"meta\.json says"):
        open_data("x", str(copy))
    (copy / "meta.json").write_text(json.dumps({"tokenizer": "bytes"}))
    with pytest.raises(UserError, match=r"meta\.json is damaged"):
        open_data("x", str(copy))
