import pytest

from oelm.config import resolve
from oelm.errors import UserError


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("./nowhere", "no such folder"),
        ("package:no_such_package", "pip install no-such-package"),
        ("package:numpy", "holds no config.json"),
        ("brt", "unknown arch brt"),
    ],
)
def test_an_encoder_that_is_not_there_is_refused(arch, message):
    with pytest.raises(UserError, match=message):
        resolve({"arch": arch, "labels": 3})


def test_the_shape_is_the_encoders_own(encoder):
    assert resolve({"arch": str(encoder)}).num_layers == 2
    with pytest.raises(UserError, match=r"d_model 64: arch .* has 32"):
        resolve({"arch": str(encoder), "d_model": 64})
    with pytest.raises(UserError, match=r"seq_len 65: .* has positions for 64"):
        resolve({"arch": str(encoder), "seq_len": 65})
