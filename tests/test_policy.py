import pytest

from oelm.policy import Policy, parse, parse_rates, rate_factor

NAMES = ["tokens.weight", "positions.weight"] + [
    f"blocks.{layer}.{rest}"
    for layer in range(4)
    for rest in (
        "attention_norm.weight",
        *(f"attention.{role}.weight" for role in "qkvo"),
        "ffn.up.weight",
        "ffn.up.bias",
    )
]


def policy(text, steps=100) -> Policy:
    return parse(text, 4, steps)


def qk(*layers):
    return {f"blocks.{layer}.attention.{role}.weight" for layer in layers for role in "qk"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", set()),
        ("qk", qk(0, 1, 2, 3)),
        ("qk@1-3", qk(1, 2, 3)),
        ("qk@1-", qk(1, 2, 3)),
        ("qk@0,2", qk(0, 2)),
        ("qk@top0.5", qk(2, 3)),
        ("qk@top0.25", qk(3)),
        ("qk@bottom2", qk(0, 1)),
        ("qk@top0.1", qk(3)),  # at least one layer
        ("qk@0;qk@3", qk(0, 3)),
        ("embeddings", {"tokens.weight", "positions.weight"}),
        ("ffn@1", {"blocks.1.ffn.up.weight", "blocks.1.ffn.up.bias"}),
        ("*attention_norm*@2", {"blocks.2.attention_norm.weight"}),
    ],
)
def test_what_and_where(text, expected):
    assert set(policy(text).frozen(NAMES, 0)) == expected


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("qk:until0.5", {0: True, 49: True, 50: False, 99: False}),
        ("qk:last0.1", {0: True, 89: True, 90: False}),
        ("qk:from0.1", {0: False, 9: False, 10: True, 99: True}),
        ("qk:every8", {0: True, 6: True, 7: False, 8: True, 15: False}),
    ],
)
def test_when(text, changes):
    for step, frozen in changes.items():
        assert set(policy(text).frozen(NAMES, step)) == (qk(0, 1, 2, 3) if frozen else set()), step


def test_layers_thaw_one_after_the_other():
    """From 0.2 to 0.8 in four layers: at 20, 40, 60 and 80."""
    down, up = policy("qk:topdown0.2-0.8"), policy("qk:bottomup0.2-0.8")
    for step, left in ((19, 4), (20, 3), (39, 3), (40, 2), (60, 1), (79, 1), (80, 0)):
        assert set(down.frozen(NAMES, step)) == qk(*range(left)), step
        assert set(up.frozen(NAMES, step)) == qk(*range(4 - left, 4)), step
    assert down.phases() == [0, 20, 40, 60, 80]


def test_only_what_waits_for_its_turn_rests():
    both = policy("qk@0:every2; qk@1")
    assert {name for name in both.frozen(NAMES, 0) if not both.out_of_training(name, 0)} == qk(0)
    assert set(both.always(NAMES)) == qk(1)
    assert both.phases() == [0]
    assert not both.constant
    assert policy("qk@1; ffn").constant


def test_a_polar_factor_is_taken_at_the_moment_of_freezing_only():
    found = policy("qk@1:from0.3+polar-scale")
    name = "blocks.1.attention.q.weight"
    assert [step for step in range(100) if found.polar(name, step)] == [30]
    assert found.polar(name, 30) == "polar-scale"
    assert found.polar("blocks.0.attention.q.weight", 30) == ""
    resting = policy("qk:every8; qk:from0.3+polar")  # at step 29 it only waits for its turn
    assert [step for step in range(100) if resting.polar(name, step)] == [30]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qkv", "neither a part"),
        ("qk@4", "layers 0 to 3"),
        ("qk@top5", "layers 0 to 3"),
        ("qk@middle", "take 0, 1-3"),
        ("qk@4-", "layers 0 to 3"),
        ("qk@top0", "layers 0 to 3"),
        ("qk@bottom0.0", "layers 0 to 3"),
        ("qk@1-0,1", "layers 0 to 3"),
        ("qk@0-999999", "layers 0 to 3"),
        ("qk@0-999999999999", "take 0, 1-3"),
        ("qk:until0.001", "in 100 steps until never changes anything"),
        ("qk:from0.001+polar", "never changes anything"),
        ("qk:every101", "never changes anything"),
        ("qk@0:topdown0.001-0.5", "never changes anything"),
        ("qk:later", "take until0.5"),
        ("qk:until1.5", "between 0 and 1"),
        ("qk:until0", "between 0 and 1"),
        ("qk:every1", "period of 2"),
        ("qk:topdown0.8-0.2", "below the first"),
        ("ffn:from0.1+polar", "q, k or qk only"),
        ("qk:until0.1+polar", "where a part freezes"),
        ("qk;", "is no clause"),
        ("qk until 0.5", "is no clause"),
    ],
)
def test_a_policy_that_means_nothing_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        policy(text)


def test_patterns_that_match_nothing_are_found():
    assert policy("*.attention.x.*; qk").unmatched(NAMES) == ["*.attention.x.*"]


def test_rates_by_part_and_pattern_the_first_that_matches():
    factors = parse_rates("qk=0.1, blocks.0.*=2")
    assert rate_factor("blocks.0.attention.q.weight", factors) == 0.1
    assert rate_factor("blocks.0.ffn.up.weight", factors) == 2
    assert rate_factor("tokens.weight", factors) == 1
    for text in ("qk", "qk=", "qk=0", "qk=-1", "qk=x"):
        with pytest.raises(ValueError, match="PATTERN=FACTOR"):
            parse_rates(text)
    with pytest.raises(ValueError, match="qk has two factors"):
        parse_rates("qk=0.1, qk=5")
