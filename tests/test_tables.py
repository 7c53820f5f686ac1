import pytest

from oelm.tables import fitting

WIDTHS = {"run": 10, "arm": 8, "steps": 7, "time": 6}


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (39, ["run", "arm", "steps", "time"]),  # 31 and two between and behind each
        (38, ["run", "arm", "time"]),
        (30, ["run", "arm", "time"]),
        (29, ["run", "time"]),
        (5, ["run", "time"]),
    ],
)
def test_columns_give_way_in_their_order_and_only_where_they_must(width, shown):
    assert fitting(WIDTHS, ("steps", "elapsed", "arm"), width) == shown
