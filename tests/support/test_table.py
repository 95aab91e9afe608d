"""Tables as text and as HTML."""

from xml.etree import ElementTree

from depthfold.support.table import ROWS, Table

EVIL = "</td></table><script>alert(1)</script><img src=x onerror=alert(2)>&amp;'\""


def cells(html):
    """The text of every cell, row by row. The HTML is also well-formed XML."""
    return [tuple(cell.text or "" for cell in row) for row in ElementTree.fromstring(html).iter("tr")]


def paragraphs(html):
    return [paragraph.text for paragraph in ElementTree.fromstring(html).iter("p")]


def test_text_aligns_columns_and_keeps_empty_lines():
    table = Table(("title", ""), ("a", "ms"), (("one", "1"), ("fifteen", "")), ("", "a note"))
    assert table.text() == "title\n\na        ms\n-------  --\none      1\nfifteen\n\na note"


def test_html_has_the_same_cells_and_lines_as_the_text():
    table = Table(("title", ""), ("a", "ms"), (("one", "1"), ("fifteen", "")), ("", "  a note"))
    assert cells(table.html()) == [table.header, *table.rows]
    assert paragraphs(table.html()) == ["title", "a note"]


def test_long_table_is_cut_in_html_only():
    rows = tuple((str(n),) for n in range(ROWS + 1300))
    table = Table(("title",), ("n",), rows)
    assert cells(table.html()) == [("n",), *rows[:ROWS]]
    assert paragraphs(table.html()) == ["title", "... 1,300 more"]
    assert table.text().splitlines()[-1] == str(ROWS + 1299)
    assert "more" not in Table(("title",), ("n",), rows[:ROWS]).html()
    assert "<p>... 7 more</p>" in Table(("title",), ("n",), rows[:ROWS], left_out=7).html()


def test_html_escapes_all_text():
    html = Table((EVIL,), (EVIL,), ((EVIL,),), (EVIL,)).html()
    assert cells(html) == [(EVIL,), (EVIL,)]
    assert paragraphs(html) == [EVIL, EVIL]
    assert "<script" not in html and "<img" not in html


def test_table_without_rows_has_only_its_lines():
    table = Table(("title",), ("a",), (), ("", "a note"))
    assert table.text() == "title\n\na note"
    assert "<table" not in table.html() and paragraphs(table.html()) == ["title", "a note"]
