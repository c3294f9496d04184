"""The documents as the source of a site, for ``scripts/site``: ``python -m support.docsite FOLDER``.

Its first page is the README. Links lead to where their pages are there; files that are no pages come along.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import bootseer

ROOT = Path(__file__).parents[2]
PLACES = {
    "README.md": "index.md", "docs/README.md": "contents.md", "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md", "docs/internals": "internals/architecture.md",
}  # fmt: skip
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
_CONFIG = """site_name: bootseer {version}
docs_dir: pages
site_dir: site
use_directory_urls: false
theme: {{name: mkdocs, highlightjs: false}}
markdown_extensions: [tables, fenced_code, toc]
validation:
  omitted_files: warn
  absolute_links: warn
  unrecognized_links: warn
  anchors: warn
"""


def assemble(target: Path) -> None:
    """Write the configuration and ``pages`` into ``target``."""
    pages = target / "pages"
    sources = [ROOT / name for name in PLACES if name.endswith(".md")]
    sources += [path for path in (ROOT / "docs").rglob("*") if path.is_file() and path not in sources]
    for source in sources:
        place = pages / _place(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            text = source.read_text()
            place.write_text(_LINK.sub(lambda found: _led(found[1], source, pages), text))  # noqa: B023 - called at once
        else:
            shutil.copyfile(source, place)
    (target / "properdocs.yml").write_text(_CONFIG.format(version=bootseer.__version__))


def _place(source: Path) -> str:
    name = source.relative_to(ROOT).as_posix()
    return PLACES.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else f"files/{name}")


def _led(link: str, source: Path, pages: Path) -> str:
    """Where a link of ``source`` leads in the site."""
    aim = Path(os.path.normpath(source.parent / link))
    place = pages / _place(aim)
    if not aim.is_relative_to(ROOT / "docs") and aim.is_file() and aim.suffix != ".md" and not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(aim, place)
    return os.path.relpath(place, (pages / _place(source)).parent)


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
