"""Writes the pages: run it after a report was added to ``bench/results``, and name that in ``reports.SCENARIOS``."""

from __future__ import annotations

import re
import sys

from bench.page import detail, model, overview
from bench.page.reports import ROOT, SCENARIOS, load
from bootseer.errors import BootseerError

BETWEEN = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)


def pages() -> dict[str, str]:
    """Every page that is written, by its path below the repository. Raises `DataError`, as `load` and `misses` do."""
    reports = load()
    made = {f"docs/benchmarks/{scenario.slug}.md": detail.page(scenario, reports) for scenario in SCENARIOS}
    made["docs/benchmarks.md"] = overview.screen(reports)
    made[f"docs/{overview.CHART}"] = overview.chart(reports)
    readme = (ROOT / "README.md").read_text()
    shown = "\n".join(overview.table(reports, "docs/benchmarks/")) + "\n"
    made["README.md"] = BETWEEN.sub(lambda _: shown, readme)
    made[model.TABLE] = model.table(reports)
    made[model.PAGE] = model.page((ROOT / model.PAGE).read_text(), reports)
    return made


def main() -> int:
    """Write them, and what the model says of large jobs, which takes half a minute."""
    (ROOT / "docs/benchmarks").mkdir(exist_ok=True)
    try:
        made = pages()
    except BootseerError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return exc.exit_code
    for path, text in made.items():
        (ROOT / path).write_text(text)
    (ROOT / model.PAGE).write_text(model.shown(made[model.PAGE]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
