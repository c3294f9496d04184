"""The pages of `bootseer profile serve` in a real browser: each in its states, light and dark, wide and narrow.

A screenshot of each lies in ``.cache/pages`` afterwards. axe finds no serious fault in any of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright import sync_api as playwright

from bootseer.profile import starts
from bootseer.profile.index import key
from support.pages import TOKEN, Server, serving
from support.startups import StartUp

pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="there is no chromium: scripts/setup installs it where Debian has it"
)
SHOTS = Path(__file__).parents[2] / ".cache" / "pages"
HOSTILE = "<script>document.title='taken'</script><img src=x onerror=alert(1)>" + "y" * 4096
STAGES = ("image", "env", "import", "dist_init", "checkpoint_load", "first_step")


def big(job: str, cycle: int = 0, *, nodes: int = 24, until: int = len(STAGES), zero: float = 0.0) -> StartUp:
    """``until``: stages that have ended; the next one is open."""
    made = StartUp(job, "42", cycle, zero=zero)
    for number in range(nodes):
        at = 0.0
        for place, stage in enumerate(STAGES[: until + 1]):
            took = 5.0 + (number * 7 + place * 3) % 5 + (40 if number == 3 and stage == "env" else 0)
            made.span(f"gpu-{number:03}.example", stage, at, at + took if place < until else None, team="vision")
            at += took
    return made


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("jobs")
    big("llama-70b").write(folder / "a.jsonl")
    big("llama-70b", 1, zero=500).write(folder / "b.jsonl")
    big("running", until=2, zero=900).write(folder / "c.jsonl")
    big("many", nodes=450, zero=1200).write(folder / "d.jsonl")
    for week in range(8):
        run = big(f"week-{week}", nodes=4, zero=week * 7 * 86_400.0)
        run.span("gpu-000.example", "alloc", 0, 1, run_seconds=900 + 300 * week)
        run.write(folder / f"week-{week}.jsonl")
    hostile = StartUp(HOSTILE, HOSTILE, zero=100)
    hostile.span(HOSTILE, HOSTILE, 0, 10, team=HOSTILE)
    hostile.write(folder / "e.jsonl")
    kept = big("kept", zero=2000).write(folder / "kept.jsonl")
    (folder / "kept.parquet").write_bytes(starts.compact([kept])[0])
    kept.unlink()
    with serving(folder) as server:
        yield server, folder


def of(job: str, attempt: str = "42", cycle: int = 0) -> str:
    return key((job, attempt, cycle))


PAGES = {
    "jobs": "/",
    "jobs-none": "/?q=nobody",
    "job": f"/job/{of('llama-70b')}",
    "job-running": f"/job/{of('running')}",
    "job-450-nodes": f"/job/{of('many')}",
    "job-hostile": f"/job/{of(HOSTILE, HOSTILE)}",
    "job-kept": f"/job/{of('kept')}",
    "compare": f"/compare/{of('llama-70b')}/{of('llama-70b', cycle=1)}",
    "compare-part": f"/compare/{of('llama-70b')}/{of('running')}",
    "fleet": "/fleet?period=week",
    "fleet-none": "/fleet?team=nobody",
    "growth": "/growth",
    "unknown": "/job/nothing",
}
WIDE = ("jobs", "job", "fleet")
ALIKE = ("jobs-none", "job-kept", "compare-part", "fleet-none")
"""The same templates as others, with less in them."""


def looks() -> Iterator[object]:
    """Each kind of page is shown narrow and dark; those with most on them also wide and light; all with ``--soak``."""
    always = {("dark", 380): PAGES.keys() - ALIKE, ("light", 1280): WIDE}
    for name in PAGES:
        for scheme, width in (("dark", 380), ("light", 1280), ("dark", 1280), ("light", 380)):
            names = always.get((scheme, width), ())
            yield pytest.param(name, scheme, width, marks=[] if name in names else [pytest.mark.soak])


@pytest.mark.parametrize(("name", "scheme", "width"), list(looks()))
def test_each_page_is_whole(
    name: str, scheme: str, width: int, browser: playwright.Browser, site: tuple[Server, Path]
) -> None:
    """Nothing is wider than the window, no script of a name runs, nothing fails, axe has nothing serious to say."""
    troubles: list[str] = []
    with browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}) as context:
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda line: troubles.append(line.text) if line.type == "error" else None)
        page.goto(f"http://127.0.0.1:{site[0].port}{PAGES[name]}", wait_until="load")
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SHOTS / f"{name}-{scheme}-{width}.png", full_page=True)
        assert page.title().endswith(" - bootseer")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found = Axe().run(page).response["violations"]
    if name == "unknown":
        troubles = [line for line in troubles if "404" not in line]
    assert troubles == []
    assert [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found if one["impact"] in SERIOUS] == []


SERIOUS = ("serious", "critical")


def test_a_page_follows_its_start_up(browser: playwright.Browser, site: tuple[Server, Path]) -> None:
    server, folder = site
    big("followed", until=3, zero=3000).write(folder / "followed.jsonl")
    with browser.new_context() as context:
        page = context.new_page()
        address = f"http://127.0.0.1:{server.port}/job/{of('followed')}"
        for _ in range(100):
            page.goto(address)
            if page.get_by_text("This start-up has not ended").count():
                break
            page.wait_for_timeout(100)
        page.evaluate("window.loaded = 'once'")
        big("followed", zero=3000).write(folder / "followed.jsonl")
        page.get_by_text("Brought up to date at").wait_for(timeout=30_000)
        assert not page.get_by_text("This start-up has not ended").count()
        assert page.evaluate("window.loaded") == "once"


def test_a_page_says_that_its_server_is_gone(browser: playwright.Browser, tmp_path: Path) -> None:
    big("running", until=2).write(tmp_path / "a.jsonl")
    with browser.new_context() as context:
        page = context.new_page()
        with serving(tmp_path) as server:
            page.goto(f"http://127.0.0.1:{server.port}/job/{of('running')}")
            assert not page.get_by_text("does not answer").count()
        page.get_by_text("The server does not answer: this page may be old.").wait_for(timeout=10_000)


def test_all_can_be_reached_by_keyboard(browser: playwright.Browser, site: tuple[Server, Path]) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{site[0].port}/?q=llama")
        wanted = page.locator("a, input, button, .scroll").count()
        seen = set()
        for _ in range(3 * wanted):
            page.keyboard.press("Tab")
            seen.add(page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))
            shown = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert shown != "none" or page.evaluate("document.activeElement === document.body")
        radios = page.locator("input[type=radio]").count()
        assert len(seen) >= wanted - radios + 2  # one of each group of radio buttons; arrows reach the others
        page.get_by_role("button", name="Compare the two chosen").focus()
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Two start-ups").wait_for()


def test_a_browser_asks_for_the_token_once(browser: playwright.Browser, tmp_path: Path) -> None:
    big("secret").write(tmp_path / "a.jsonl")
    (tmp_path / "token").write_text(TOKEN)
    with serving(tmp_path, "--token-file", tmp_path / "token") as server, browser.new_context() as context:
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{server.port}/fleet?period=day")
        assert not page.get_by_text("secret").count()
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Read").click()
        page.get_by_role("heading", name="Fleet").wait_for()
        assert page.url.endswith("/fleet?period=day")
        page.goto(f"http://127.0.0.1:{server.port}/")
        page.get_by_role("link", name="secret").wait_for()
        assert TOKEN not in page.url
