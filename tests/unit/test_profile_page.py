"""The page of one start-up: what it shows, and that names in it are only names."""

from __future__ import annotations

import re
import xml.etree.ElementTree as xml
from html.parser import HTMLParser

import pytest

from bootseer.errors import NotFoundError
from bootseer.profile import page
from support.startups import StartUp

SVG = re.compile(r"<svg.*</svg>", re.DOTALL)


class Seen(HTMLParser):
    """The tags and the text of a page; every tag that is opened is closed."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not [name for name, _ in attrs if name.startswith("on")]
        self.tags.append(tag)
        if tag not in ("meta", "line", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "rect"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def bars(document: str) -> list[tuple[str, float, float]]:
    """Title, place and width of each bar of the time line."""
    found = SVG.search(document)
    assert found
    drawn = xml.fromstring(found[0])
    return [
        (group.findtext("title") or "", float(rect.get("x", "")), float(rect.get("width", "")))
        for group in drawn.iter("g")
        for rect in group.iter("rect")
    ]


def test_bars_are_where_the_spans_are() -> None:
    made = StartUp()
    for node, env in (("n1", 20), ("n2", 60)):
        made.span(node, "env", 0, env)
        made.span(node, "first_step", 60, 82)  # the scale: 82 s are 820 wide
    document = page.html(made.log())
    assert bars(document) == [
        ("env: 60.00 s from 0.00 s on", 170.0, 600.0),
        ("first_step: 22.00 s from 60.00 s on", 770.0, 220.0),
        ("env: 20.00 s from 0.00 s on", 170.0, 200.0),
        ("waiting in env: 40.00 s from 20.00 s on", 370.0, 400.0),
        ("first_step: 22.00 s from 60.00 s on", 770.0, 220.0),
    ]
    text = " ".join(Seen(document).texts)
    assert "to the first step, last on n1 82.0 s" in " ".join(text.split())
    assert text.index("n2") < text.rindex("n1")


def test_an_open_start_has_its_states() -> None:
    made = StartUp()
    made.span("n1", "env", 0, 10)
    made.span("n1", "import", 10, None)
    text = " ".join(Seen(page.html(made.log())).texts)
    assert "no end yet" in text
    assert "OPEN" in text


def test_many_nodes_are_bands() -> None:
    made = StartUp()
    for number in range(450):
        made.span(f"n{number}", "env", 0, 10 + (number == 321) * 30)
        made.span(f"n{number}", "first_step", 40, 50)
    seen = Seen(page.html(made.log()))
    assert "n321 (+2)" in seen.texts
    assert sum("(+2)" in text for text in seen.texts) == 2 * 150  # as a label and as its tooltip
    assert "250 nodes with less own work are left out." in seen.texts


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '" onload="x', "../&lt;", "\x1b[31m", "x" * 4096])
def test_names_are_only_names(name: str) -> None:
    plain, hostile = StartUp("job"), StartUp(name)
    for made, said in ((plain, "name"), (hostile, name)):
        made.span(said, said, 0, 10, how=said)
        made.span(said, "first_step", 10, 20)
    assert set(Seen(page.html(hostile.log())).tags) == set(Seen(page.html(plain.log())).tags)
    assert "\x1b" not in page.html(hostile.log())
    page.html(hostile.log()).encode()


def test_a_job_that_still_waits_for_its_nodes() -> None:
    made = StartUp()
    made.span("slurm", "queue", 0, None)
    text = " ".join(Seen(page.html(made.log())).texts)
    assert "1 span has no end yet (OPEN)" in text


def test_a_short_start_up_has_seconds_with_more_places() -> None:
    """All of it was 0.0 s, with a time line of eight times 0.0 s."""
    made = StartUp()
    made.span("n0", "image", 0, 0.024)
    made.span("n0", "first_step", 0.024, 0.08)
    made.span("n0", "y" * 60, 0.08, 0.09)
    texts = Seen(page.html(made.log())).texts
    assert {"0.024", "0.056", "0.080", "0.010 s", "0.080 s"} <= set(texts)
    assert "0.0" not in texts
    assert "y" * 60 not in texts  # as a head it made the table wide


def test_no_start_up() -> None:
    with pytest.raises(NotFoundError, match="no span of"):
        page.html(StartUp().log())


def test_who_is_stuck_is_on_top_and_drawn_until_now() -> None:
    made = StartUp()
    for node in ("n1", "n2", "n3"):
        made.span(node, "image", 0, 10 if node != "n3" else None)
        if node != "n3":
            made.span(node, "env", 10, 60)
    log = made.log()
    document = page.html(log, now=log.spans.begin.wall[0] + 100 * 10**9)
    assert bars(document)[0] == ("image: 100.00 s from 0.00 s on", 170.0, 820.0)
    text = " ".join(Seen(document).texts)
    assert text.index("still in image: 1 node since 100 s (n3)".replace("in image", "in     image")) < text.index(
        "no end"
    )
    assert "n3: image" in text
