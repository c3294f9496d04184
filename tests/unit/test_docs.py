"""The pages say what is so: commands in them exist with these options, links lead somewhere, the reference is fresh."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from support import clireference, docsite

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(bootseer [^`]+)`")
LINE = re.compile(r"^(?:sudo |[A-Z_]+=\S* )*(?:\S*/)?(bootseer(?: .*)?)$", re.MULTILINE)
FIRST_LINE = re.compile(r"bootseer [a-z ]+ \d")
"""Of a stored format, such as a pointer."""
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


def commands(text: str) -> list[str]:
    blocks = [block for language, block in FENCE.findall(text) if language in ("", "sh", "bash")]
    fenced = [line for block in blocks for line in LINE.findall(block.replace("\\\n", " "))]
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = [*fenced, *(" ".join(found.split()) for found in INLINE.findall(outside))]
    return [line for line in found if not FIRST_LINE.fullmatch(line)]


def trouble(line: str) -> str:
    """What is wrong with a command as a page writes it; words in capitals stand for anything."""
    try:
        words = shlex.split(line, comments=True)[1:]
    except ValueError:
        words = line.split()[1:]
    command = clireference.command_line()
    places = [command]
    while words:
        word = words.pop(0)
        if word in ("...", "|", "&&", ";", "GROUP", "VERB", "[OPTIONS]") or word.startswith(">"):
            return ""
        if hasattr(places[0], "commands") and not word.startswith("-"):
            verbs = word.rstrip(",;:").split("|")
            if missing := [verb for verb in verbs if verb not in places[0].commands]:
                return f"no verb {missing[0]}"
            places = [places[0].commands[verb] for verb in verbs]
        elif word.strip("[]").startswith("-") and word != "-":
            option, sign, _ = word.strip("[]").partition("=")
            for place in places:
                known = {name: one for one in place.params for name in [*one.opts, *one.secondary_opts]}
                if option not in known and option not in ("--help", "-h"):
                    return f"no option {option}"
            takes = option in known and not (known[option].is_flag or known[option].count)
            if takes and not sign and words:
                words.pop(0)
        elif places[0].context_settings.get("allow_interspersed_args") is False:
            return ""  # from here on it is the command's
    return ""


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_the_pages_exist(path: Path) -> None:
    found = [(line, trouble(line)) for line in commands(path.read_text())]
    assert [(line, wrong) for line, wrong in found if wrong] == []


def test_what_does_not_exist_is_found() -> None:
    page = "```sh\nsudo bootseer image fly REF  # up\n```\n`bootseer fs gc --nothing URL` `bootseer fs ls|sing URL`\n"
    assert [trouble(line) for line in commands(page)] == ["no verb fly", "no option --nothing", "no verb sing"]
    assert trouble("bootseer env run --target /x pip --fly") == ""


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in LINK.findall(path.read_text()):
        page = (path.parent / target).resolve() if target else path
        assert page.exists(), target
        if anchor and page.suffix == ".md":
            heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
            names = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in names, f"{target}#{anchor}"


def test_the_reference_of_the_command_line_is_fresh() -> None:
    assert clireference.PAGE.read_text() == clireference.page(), "run: python -m support.clireference"


def test_the_site_has_every_page_and_its_links_lead_to_them(tmp_path: Path) -> None:
    docsite.assemble(tmp_path)
    pages = sorted((tmp_path / "pages").rglob("*.md"))
    assert len(pages) == len({*PAGES, ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"})
    assert (tmp_path / "pages/index.md").read_text().startswith("# bootseer\n")
    gone = [
        (page, link)
        for page in pages
        for link, _ in LINK.findall(page.read_text())
        if not (page.parent / link).exists()
    ]
    assert gone == []
