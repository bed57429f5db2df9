"""Curves of long runs: the points that are drawn."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.apps.gallery import charts
from flowrl.apps.gallery.charts import thin

VALUES = st.lists(
    st.one_of(st.floats(-1e3, 1e3), st.just(float("nan")), st.sampled_from([0.0, 1.0])), min_size=1, max_size=400
)


@settings(deadline=None)
@given(VALUES, st.integers(10, 60))
def test_first_and_last_stay_in_order_and_the_curve_stays_within_its_pieces(values, limit):
    y = np.asarray(values)
    kept = thin(y, limit)
    assert (np.diff(kept) > 0).all()
    assert kept[0] == 0
    assert kept[-1] == len(y) - 1
    assert len(kept) <= max(limit * 1.25, 10)
    assert len(y) > limit or len(kept) == len(y)
    assert np.isnan(y[kept]).any() == np.isnan(y).any()
    # Each value lies between the lowest and the highest kept value of its piece: no peak is cut anywhere.
    length = -(-len(y) // (limit // 4))
    for start in range(0, len(y), length):
        piece = y[start : start + length]
        drawn = y[kept[(kept >= start) & (kept < start + length)]]
        if np.isfinite(piece).any():
            assert np.nanmin(drawn) <= np.nanmin(piece)
            assert np.nanmax(drawn) >= np.nanmax(piece)


def test_one_spike_of_ten_thousand_rows_can_be_read_off():
    y = np.zeros(10_000)
    y[6789] = 42.0
    svg = str(charts.line_chart([charts.Series("x", np.arange(1, 10_001), y)]))
    assert "iteration 6790: 42" in svg
    assert len(svg) < 60_000
