"""Flashy's averages weight each rank by its count, whatever form its metrics have."""

import objcomm
from objcomm.compat import flashy
from tests.ranks import ranks


@ranks(1, 2)
def test_lists_and_mappings_are_averaged_by_count() -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    count = 3 * rank + 1
    mean = sum(each * (3 * each + 1) for each in range(size)) / sum(
        3 * each + 1 for each in range(size)
    )
    assert flashy.average([rank, 1.0], count) == [mean, 1.0]
    assert flashy.average({"loss": rank}, count) == {"loss": mean}
    assert flashy.average_metrics({"loss": rank}, count) == {"loss": mean}
