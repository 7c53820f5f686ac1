import pytest

from oelm.config import resolve
from oelm.data.fit import open_fitting
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
