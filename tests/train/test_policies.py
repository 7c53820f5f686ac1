"""A slice of the programme of policies: the rest is `make policies`."""

import pytest

from tests.conftest import make_data
from tests.programmes.policies import POLICIES, TWO_PROCESSES, apart, check


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("policies") / "data")


@pytest.mark.parametrize("freeze", ["qk:until0.5", "qk:from0.35+polar", "qk:every4"])
def test_who_is_trained_when_and_bits_survive_kills_around_a_change(data, tmp_path, freeze):
    index = next(i for i, (text, _, extra) in enumerate(POLICIES) if text == freeze and not extra)
    check(data, tmp_path, index, torchrun=False)


def test_two_processes_agree_with_one_across_a_change(data, tmp_path):
    index = next(i for i, (text, _, _) in enumerate(POLICIES) if text == "qk:until0.5")
    assert apart(data, tmp_path, index, *TWO_PROCESSES) <= 1e-5
