# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay contexts`: what is stored in a folder, whether it is whole, and its removal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_relay.arguments import reading_command_line
from vllm_relay.progress import showing_progress
from vllm_relay.sparse.contexts.disk.context_file import CONTEXT_SUFFIX, ContextFile
from vllm_relay.sparse.contexts.disk.context_folder import (
    FoundContext,
    delete_context,
    delete_unused_links,
    find_contexts,
    parent_path,
)
from vllm_relay.sparse.files.damage import IndexDamagedError


def run_list(path: Path, *, as_json: bool = False, console: Console | None = None) -> int:
    """One line per context. Returns the exit status: 1 if one cannot be opened, or is not there in
    all ranks."""
    return _run(path, _describe, _list_table, as_json, console, merge=_of_one_context)


def run_show(path: Path, *, as_json: bool = False, console: Console | None = None) -> int:
    """All that header and table say of each file. Returns the exit status: as `run_list`."""
    return _run(path, _describe_in_full, _show_tables, as_json, console)


def run_verify(path: Path, *, as_json: bool = False, console: Console | None = None) -> int:
    """Reads every byte. Returns the exit status: 1 if a context is damaged, or is not there in all
    ranks."""
    return _run(path, _verify, _verify_table, as_json, console)


def run_delete(
    path: Path,
    *,
    confirm: Callable[[str], bool],
    as_json: bool = False,
    console: Console | None = None,
) -> int:
    """Deletes one context, or all of a folder, with their training queries and in all ranks; the
    folder stays, and so does as a link what other contexts continue.

    Args:
        confirm: asked once, with the question; nothing is deleted unless it says so.

    Returns:
        The exit status: 0 if all are gone.
    """
    console = console or Console(soft_wrap=True)
    with reading_command_line():
        contexts = find_contexts(path)
    if contexts and not confirm(_question(path, contexts)):
        console.print("contexts: nothing was deleted", style="red")
        return 1
    reports = [
        _report(file, _delete_file, OSError) for context in contexts for file in context.files
    ]
    for folder in {file.parent for context in contexts for file in context.files}:
        links = _report(folder, _delete_links, OSError)
        reports += [links] if links["error"] else []
    failed = {report["path"] for report in reports if report["error"]}
    num_deleted = sum(failed.isdisjoint(map(str, context.files)) for context in contexts)
    if as_json:
        console.print_json(json.dumps(reports))
    else:
        _print_errors(console, reports)
        console.print(f"{num_deleted} deleted")
    return 1 if failed else 0


def _delete_file(path: Path) -> dict[str, Any]:
    if path.suffix == CONTEXT_SUFFIX:
        delete_context(path)
    else:
        path.unlink()
    return {}


def _delete_links(folder: Path) -> dict[str, Any]:
    delete_unused_links(folder)
    return {}


def _run(
    path: Path,
    report_of: Callable[[Path], dict[str, Any]],
    print_reports: Callable[[Console, list[dict[str, Any]]], None],
    as_json: bool,
    console: Console | None,
    merge: Callable[[FoundContext, list[dict[str, Any]]], list[dict[str, Any]]] | None = None,
) -> int:
    """Args: merge: what to say of a context, from what is said of its files; None: that."""
    console = console or Console(soft_wrap=True)
    with reading_command_line():
        contexts = find_contexts(path)
    reports = []
    files = [file for context in contexts for file in context.files]
    of_file = {}
    with showing_progress("reading") as show:
        for number, file in enumerate(files):
            show(file.name, number / len(files))
            of_file[file] = _report(file, report_of)
    for context in contexts:
        of_files = [of_file[file] for file in context.files]
        if context.problem is not None:
            of_files.append({"path": str(context.path), "error": context.problem})
        reports += of_files if merge is None else merge(context, of_files)
    if as_json:
        console.print_json(json.dumps(reports))
    elif not reports:
        console.print(f"{path}: no contexts (*{CONTEXT_SUFFIX})", markup=False)
    else:
        whole = [report for report in reports if not report["error"]]
        if whole:
            print_reports(console, whole)
        _print_errors(console, reports)
    return 1 if any(report["error"] for report in reports) else 0


def _report(
    path: Path,
    report_of: Callable[[Path], dict[str, Any]],
    expected: type[Exception] | tuple[type[Exception], ...] = (OSError, ValueError),
) -> dict[str, Any]:
    try:
        return {"path": str(path), "error": None, **report_of(path)}
    except expected as error:
        return {"path": str(path), "error": str(error)}


def _of_one_context(context: FoundContext, reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first rank's report with the indexes and bytes of all; or the errors."""
    wrong = [report for report in reports if report["error"]]
    if wrong:
        return wrong
    kinds: Counter[str] = Counter()
    for report in reports:
        kinds.update(report["index_kinds"])
    num_bytes = sum(report["num_bytes"] for report in reports)
    whole = {"path": str(context.path), "num_ranks": len(reports)}
    return [{**reports[0], **whole, "index_kinds": dict(kinds), "num_bytes": num_bytes}]


def _describe(path: Path) -> dict[str, Any]:
    with ContextFile.open(path) as context:
        return _summary(context)


def _describe_in_full(path: Path) -> dict[str, Any]:
    with ContextFile.open(path) as context:
        parts: dict[str, int] = {}
        for section in context.file.sections.values():
            part = section.name.split("/", 4)[-1]
            parts[part] = parts.get(part, 0) + section.num_bytes
        return {
            **_summary(context),
            "num_sections": len(context.file.sections),
            "bytes_of_parts": parts,
            "plans": context.plans,
        }


def _summary(context: ContextFile) -> dict[str, Any]:
    return {
        "fingerprint": asdict(context.fingerprint),
        "num_tokens": context.num_tokens,
        "parent": None if context.parent is None else context.parent._asdict(),
        "index_kinds": context.index_kinds,
        "num_bytes": context.file.num_bytes,
    }


def _verify(path: Path) -> dict[str, Any]:
    with ContextFile.open(path) as context:
        context.verify()
        _verify_parent(context)
        return {"num_bytes": context.file.num_bytes}


def _verify_parent(context: ContextFile) -> None:
    """Reads every byte of what a context continues, too; a damaged one is named. Raises
    IndexDamagedError: there is something wrong with one of them."""
    if context.parent is None:
        return
    path = parent_path(context.path.parent, context.parent.context_id)
    try:
        with ContextFile.open(path, expected=context.fingerprint) as parent:
            if not parent.own_begin < context.own_begin <= parent.num_tokens:
                raise IndexDamagedError(
                    f"{path}: its own tokens are {parent.own_begin} to {parent.num_tokens}"
                )
            parent.verify()
            if not np.array_equal(
                parent.tokens[: context.own_begin], context.tokens[: context.own_begin]
            ):
                raise IndexDamagedError(f"{path}: it has other tokens")
            _verify_parent(parent)
    except RecursionError:
        raise IndexDamagedError(f"{context.path}: continues too many others") from None
    except (OSError, ValueError) as error:
        raise IndexDamagedError(f"{context.path} continues {path}: {error}") from error


def _list_table(console: Console, reports: list[dict[str, Any]]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    rows = []
    for report in reports:
        fingerprint = report["fingerprint"]
        rows.append(
            {
                "file": Path(report["path"]).name,
                "model": fingerprint["model"],
                "tokens": str(report["num_tokens"]),
                "ranks": str(report["num_ranks"]),
                "layers x kv heads": f"{fingerprint['num_layers']} x {fingerprint['num_kv_heads']}",
                "dtype": fingerprint["dtype"],
                "indexes": _kinds_text(report),
                "size": size_text(report["num_bytes"]),
                "continues": _parent_text(report),
            }
        )
    names = [each for each in rows[0] if each != "continues" or any(r["parent"] for r in reports)]
    for name in names:
        is_number = name in ("tokens", "ranks", "size")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(row[name]) for name in names))
    _print_whole(console, table)


def _show_tables(console: Console, reports: list[dict[str, Any]]) -> None:
    for report in reports:
        table = Table(box=None, pad_edge=False, show_header=False)
        console.print(report["path"], markup=False)
        rows = {
            **report["fingerprint"],
            "tokens": report["num_tokens"],
            "continues": _parent_text(report),
            "indexes": _kinds_text(report),
            "size": size_text(report["num_bytes"]),
            "sections": report["num_sections"],
            **{f"stored {part}": size_text(n) for part, n in report["bytes_of_parts"].items()},
        }
        for name, value in rows.items():
            table.add_row(escape(name), escape(str(value)))
        _print_whole(console, table)


def _kinds_text(report: dict[str, Any]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in report["index_kinds"].items()) or "-"


def _parent_text(report: dict[str, Any]) -> str:
    parent = report["parent"]
    return "-" if parent is None else f"{parent['num_tokens']} tokens of {parent['context_id']}"


def _verify_table(console: Console, reports: list[dict[str, Any]]) -> None:
    for report in reports:
        console.print(f"whole: {report['path']}, {size_text(report['num_bytes'])}", markup=False)


def _print_whole(console: Console, table: Table) -> None:
    """As wide as it is, also where the console is narrower: rich cuts names and numbers."""
    table.width = console.measure(table, options=console.options.update(width=10_000)).maximum
    console.print(table, crop=False)


def _print_errors(console: Console, reports: list[dict[str, Any]]) -> None:
    for report in reports:
        if report["error"]:
            console.print(f"contexts: {report['error']}", style="red", markup=False)


def _question(path: Path, contexts: list[FoundContext]) -> str:
    what = str(contexts[0].path) if len(contexts) == 1 else f"{len(contexts)} contexts in {path}"
    num_bytes = sum(file.stat().st_size for context in contexts for file in context.files)
    return f"Delete {what}, {size_text(num_bytes)}?"


def size_text(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
