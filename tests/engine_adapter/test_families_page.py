"""docs/families.md says of every family what is so."""

from tests.engine_adapter.families_table import PAGE, page, table


def test_the_page_has_the_table_that_the_models_give():
    text = PAGE.read_text()
    assert page(text, table()) == text, "write it anew: python -m tests.engine_adapter.families_table"
