"""report.html stands alone, and says what was found."""

import re
from html.parser import HTMLParser

from fp4ext.pages.chart import Line, chart, number, ticks
from fp4ext.train import pretrain


class Page(HTMLParser):
    """Collects tags and addresses, and checks that tags nest."""

    VOID = {"meta", "br", "wbr", "link", "img"}

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.addresses = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.addresses += [value for key, value in attrs if key in ("src", "href", "xlink:href", "data", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_report_stands_alone(micro, tmp_path):
    result = pretrain(micro(), tmp_path / "run", tensorboard=False)
    text = result.report.read_text()
    page = Page(re.sub("<script>.*?</script>", "", text, flags=re.S))  # which sorts a table
    assert not page.addresses and not {"script", "link", "img", "iframe"} & set(page.seen)
    assert not re.search(r"https?://|@import|url\(|//cdn", text)
    assert "prefers-color-scheme:dark" in text and 'name="viewport"' in text
    for expected in (
        "nat/byte",
        "mnat",
        "bit/element",
        "s/step",
        f"{result.rows[0].final_loss:.4f}",
        "python -m fp4ext pretrain",
    ):
        assert expected in text
    assert page.seen.count("svg") == 4  # one chart, wide and narrow, each with its clipped inside
    assert (tmp_path / "run" / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_chart_escapes_and_survives_little_data():
    assert "nothing to draw" in chart([], "a", "b", 400, 200)
    one = chart([Line("<b>&", [(0, 1.0)], 0)], "label", "unit", 400, 200)
    assert "<b>" not in one and "&lt;b&gt;&amp;" in one
    Page(one)
    assert "nan" not in chart([Line("flat", [(0, 2.0), (5, 2.0)], 0)], "l", "u", 400, 200, zero=True)


def test_ticks():
    assert ticks(0, 300, 6) == [0, 50, 100, 150, 200, 250, 300]
    assert ticks(-0.23, 0.41, 6) == [-0.2, 0.0, 0.2, 0.4]
    assert number(-10.0) == "−10" and number(2.5) == "2.5"
