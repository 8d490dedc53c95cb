"""How the measures of a context are told to people."""

from collections.abc import Sequence

from kvdb.types import ERROR, MEASURES

DRAWN: Sequence[str] = (*MEASURES, ERROR)
TITLES = {
    "retrieved": "retrieved\nshare of the searched tokens that a query needs",
    "dense": "dense\nshare of queries that the search gave up",
    "sharpness": "sharpness\nsoftmax weight of the largest token",
    "window_hits": "window hits\nshare of queries whose largest token lies in the window",
    ERROR: "error\nbound on its 95th percentile, by audits",
}
FORMS = {"retrieved": "{:.2%}", "dense": "{:.0%}", "sharpness": "{:.0%}", "window_hits": "{:.0%}", ERROR: "{:.2%}"}
"""How values are written."""
LOGARITHMIC = {"retrieved", ERROR}
"""Small values of these matter, so colours and shades stand for their logarithm."""
LOWEST = 1e-4
"""Where logarithmic colours begin."""
