from concurrent.futures import ThreadPoolExecutor

import pytest

from oelm.config import RunConfig, resolve
from oelm.data.fit import open_fitting, with_prepared
from oelm.errors import UserError
from tests.small_encoder import make_encoder, make_pairs, make_rows, prepared


def test_a_special_token_outside_the_vocabulary_is_refused(tmp_path):
    prepared(tmp_path, make_rows(90))  # letters lie below 128, end-of-text is 256
    config = resolve({"preset": "tiny", "data_path": str(tmp_path / "out"), "vocab_size": 200})
    with pytest.raises(UserError, match=r"special token 256 .* outside the vocabulary of 200"):
        open_fitting(config, vocab_is_set=True)


def test_pairs_are_refused_by_an_encoder_without_a_second_token_type(tmp_path):
    encoder = make_encoder(tmp_path / "encoder", type_vocab_size=1)
    pairs = make_pairs(tmp_path / "pairs", encoder)
    with pytest.raises(UserError, match="no token type for the second text"):
        open_fitting(resolve({"arch": str(encoder), "data_path": str(pairs), "seq_len": 32}))


def named(dataset: str) -> RunConfig:
    return resolve({"preset": "tiny", "dataset": dataset})


def test_a_file_that_is_not_called_what_the_dataset_says_is_refused(tmp_path):
    table = tmp_path / "rows.csv"
    table.write_text("text,label\nyes,1\n")
    with pytest.raises(UserError, match=r"rename it to rows\.tsv"):
        with_prepared(named(f"tsv:{table}"), rank=0)


def test_two_runs_that_need_the_same_file_prepare_it_once(tmp_path, monkeypatch):
    monkeypatch.setenv("OELM_DATA", str(tmp_path))
    table = tmp_path / "rows.csv"
    table.write_text("text,label\n" + "".join(f"a text with the number {n},{n % 2}\n" for n in range(90)))
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(with_prepared, named(f"csv:{table}"), 0) for _ in range(2)]
        first, second = (run.result().dataset for run in runs)
    assert first == second
    assert (tmp_path / first / "meta.json").exists()
