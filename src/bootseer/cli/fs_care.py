"""``bootseer fs fsck|gc``: what is wrong with a store, and its garbage."""

from __future__ import annotations

from typing import Annotated

import typer

from bootseer.cli._fs import Url, files_text, place, progress
from bootseer.cli._shared import AsJson, DryRun, age_value, answer, print_json, print_table
from bootseer.units import age_text, count_text, one_line, size_text


def fsck(
    url: Url,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what can be mended without guessing")] = False,
    read: Annotated[
        bool, typer.Option("--read", help="Read all contents instead, and check every chunk, digest and COMMIT")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Name what is lost, damaged or garbage at or below URL. Contents are read with --read only.

    Exit code 65 when errors are left.

    --repair rebuilds a lost or damaged pointer when all of its stripes are whole (after reading and checking every
    byte), and undoes a gc that was broken off.
    """
    from bootseer.errors import DataError
    from bootseer.stripefs.maintenance import check
    from bootseer.stripefs.maintenance.repair import repair as mend

    fs, path = place(url)
    if read:
        if repair:
            raise typer.BadParameter("--read only looks")
        with progress("fsck", as_json) as update:
            stats = fs.verify(path, progress=update)
        total = sum(stat.size for stat in stats)
        line = f"{url}: {files_text(len(stats), total)}, all right"
        answer({"ok": True, "url": url, "files": len(stats), "bytes": total}, as_json, line)
        return
    report = check.fsck(fs.backend, path)
    repairs = []
    if repair and any(finding.repair for finding in report.findings):
        repairs = mend(fs.backend, report)
        report = check.fsck(fs.backend, path)
    if as_json:
        print_json({"ok": not report.errors, "report": report, "repairs": repairs})
    else:
        for made in repairs:
            typer.echo(one_line(f"{made.path}: {made.done or f'not repaired: {made.failed}'}"))
        rows = [
            [
                finding.level,
                finding.kind,
                finding.path,
                size_text(finding.size) if finding.size else "",
                age_text(finding.age) if finding.level == "garbage" else "",
                finding.detail + ("; --repair: " + finding.repair if finding.repair else ""),
            ]
            for finding in report.findings
        ]
        if rows:
            print_table("", ["", "kind", "path", "size", "age", "what"], rows, left=["", "kind", "path", "what"])
        counts = (
            f"{count_text(report.folders, 'folder', 'folders')}, {count_text(report.files, 'file', 'files')}: "
            f"{count_text(len(report.errors), 'error', 'errors')}, {len(report.garbage)} of garbage"
        )
        typer.echo(counts)
    if report.errors:
        first = report.errors[0]
        more = f" and {len(report.errors) - 1} more" if len(report.errors) > 1 else ""
        mendable = not repair and any(finding.repair for finding in report.errors)
        lost = {
            "other-version": "write it again",
            "stripes-elsewhere": "copy what is in .bsx there, too (`cp -r ckpt/*` leaves it out), or use fs cp",
        }.get(first.kind, "restore it from a copy")
        hint = "run again with --repair" if mendable else lost
        raise DataError(f"{url} has errors: {one_line(first.path)}: {first.kind}{more}", hint=hint)


def gc(
    url: Url,
    age: Annotated[
        float | None,
        typer.Option(
            parser=age_value, metavar="AGE", help="Leave alone what is younger: 90s, 12h, 7d", show_default="1d"
        ),
    ] = None,
    dry_run: DryRun = False,
    lost: Annotated[
        bool, typer.Option("--lost", help="Also whole stripes whose pointer is gone, as after `hdfs dfs -rm` of a file")
    ] = False,
    taken: Annotated[bool, typer.Option("--open", help="Also files that a writer on HDFS still has open")] = False,
    keep: Annotated[
        int,
        typer.Option(
            "--keep",
            metavar="N",
            min=0,
            help="Also complete checkpoints in URL but the newest N of those whose names differ in numbers alone",
        ),
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Remove what interrupted writers left, and nothing else: what `bootseer fs fsck` names as garbage.

    What a writer may still be writing is kept, and so is everything in doubt. With --keep a checkpoint that was the
    newest one less than --age ago stays, too: a start may be loading it.

    Example: bootseer fs gc hdfs://nn:8020/jobs/llama-7b --keep 3
    """
    from bootseer.stripefs.maintenance import collect

    fs, path = place(url)
    found = collect.gc(
        fs.backend, path, age=collect.AGE if age is None else age, dry_run=dry_run, lost=lost, taken=taken, keep=keep
    )
    gone = [removal for removal in found if not removal.kept]
    size = sum(removal.size for removal in gone)
    if as_json:
        kept = [removal for removal in found if removal.kept]
        print_json({"url": url, "dry_run": dry_run, "removed": gone, "bytes": size, "kept": kept})
        return
    rows = [
        [removal.kind, removal.path, size_text(removal.size), age_text(removal.age), removal.kept or "remove"]
        for removal in found
    ]
    if rows:
        print_table("", ["kind", "path", "size", "age", "done"], rows, left=["kind", "path", "done"])
    what = "would be removed" if dry_run else "removed"
    typer.echo(
        f"{len(gone)} of {len(found)} {'checkpoints and ' if keep else ''}pieces of garbage {what}, {size_text(size)}"
    )
