# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay contexts`: what is stored in a folder, whether it is whole, and its removal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_relay.sparse.context_file import CONTEXT_SUFFIX, QUERIES_SUFFIX, ContextFile
from vllm_relay.sparse.section_table import MAGIC


def run_list(path: Path, *, as_json: bool = False, console: Console | None = None) -> int:
    """One line per context. Returns the exit status: 1 if one cannot be opened."""
    return _run(path, _describe, _list_table, as_json, console)


def run_show(path: Path, *, as_json: bool = False, console: Console | None = None) -> int:
    """All that header and table say. Returns the exit status: 1 if a context cannot be opened."""
    return _run(path, _describe_in_full, _show_tables, as_json, console)


def run_verify(path: Path, *, as_json: bool = False, console: Console | None = None) -> int:
    """Reads every byte. Returns the exit status: 1 if a context is damaged."""
    return _run(path, _verify, _verify_table, as_json, console)


def run_delete(
    path: Path,
    *,
    confirm: Callable[[str], bool],
    as_json: bool = False,
    console: Console | None = None,
) -> int:
    """Deletes one context, or all of a folder, with their training queries; the folder stays.

    Args:
        confirm: asked once, with the question; nothing is deleted unless it says so.

    Returns:
        The exit status: 0 if all are gone.
    """
    console = console or Console(soft_wrap=True)
    try:
        paths = find_contexts(path)
    except OSError as error:
        return _refuse(console, str(error))
    if paths and not confirm(_question(path, paths)):
        return _refuse(console, "nothing was deleted")
    reports = []
    for each in paths:
        try:
            if each.suffix == CONTEXT_SUFFIX:
                each.with_suffix(QUERIES_SUFFIX).unlink(missing_ok=True)
            each.unlink()
            reports.append({"path": str(each), "error": None})
        except OSError as error:
            reports.append({"path": str(each), "error": str(error)})
    deleted = [report["path"] for report in reports if report["error"] is None]
    if as_json:
        console.print_json(json.dumps(reports))
    else:
        _print_errors(console, reports)
        console.print(f"{len(deleted)} deleted")
    return 0 if len(deleted) == len(reports) else 1


def find_contexts(path: Path) -> list[Path]:
    """The contexts of a folder by name, or the one at `path`.

    Raises:
        FileNotFoundError: there is nothing.
        OSError: a file that is no context, or cannot be read.
    """
    if path.is_dir():
        return sorted(each for each in path.glob(f"*{CONTEXT_SUFFIX}") if each.is_file())
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist, expected a context or a folder of *{CONTEXT_SUFFIX}"
        )
    if path.suffix != CONTEXT_SUFFIX:
        if not path.is_file():
            raise OSError(f"{path} is no regular file")
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise OSError(f"{path} is no context: it does not begin with {MAGIC!r}")
    return [path]


def _run(
    path: Path,
    report_of: Callable[[Path], dict[str, Any]],
    print_reports: Callable[[Console, list[dict[str, Any]]], None],
    as_json: bool,
    console: Console | None,
) -> int:
    console = console or Console(soft_wrap=True)
    try:
        paths = find_contexts(path)
    except OSError as error:
        return _refuse(console, str(error))
    reports = []
    for each in paths:
        try:
            report = report_of(each)
        except (OSError, ValueError) as error:
            report = {"error": str(error)}
        reports.append({"path": str(each), "error": None, **report})
    if as_json:
        console.print_json(json.dumps(reports))
    elif not reports:
        console.print(f"{path}: no contexts (*{CONTEXT_SUFFIX})", markup=False)
    else:
        print_reports(console, reports)
    return 1 if any(report["error"] for report in reports) else 0


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
        "index_kinds": context.index_kinds,
        "num_bytes": context.file.num_bytes,
    }


def _verify(path: Path) -> dict[str, Any]:
    with ContextFile.open(path) as context:
        context.verify()
        return {"num_bytes": context.file.num_bytes}


def _list_table(console: Console, reports: list[dict[str, Any]]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("file", "model", "tokens", "layers x kv heads", "dtype", "indexes", "size"):
        table.add_column(
            name, justify="right" if name in ("tokens", "size") else "left", no_wrap=True
        )
    for report in reports:
        if report["error"]:
            continue
        fingerprint = report["fingerprint"]
        table.add_row(
            escape(Path(report["path"]).name),
            escape(fingerprint["model"]),
            str(report["num_tokens"]),
            f"{fingerprint['num_layers']} x {fingerprint['num_kv_heads']}",
            fingerprint["dtype"],
            escape(", ".join(f"{n} {kind}" for kind, n in report["index_kinds"].items())) or "-",
            size_text(report["num_bytes"]),
        )
    if table.row_count:
        _print_whole(console, table)
    _print_errors(console, reports)


def _show_tables(console: Console, reports: list[dict[str, Any]]) -> None:
    for report in reports:
        if report["error"]:
            continue
        table = Table(box=None, pad_edge=False, show_header=False)
        console.print(report["path"], markup=False)
        rows = {
            **report["fingerprint"],
            "tokens": report["num_tokens"],
            "indexes": ", ".join(f"{n} {k}" for k, n in report["index_kinds"].items()) or "-",
            "size": size_text(report["num_bytes"]),
            "sections": report["num_sections"],
            **{f"stored {part}": size_text(n) for part, n in report["bytes_of_parts"].items()},
        }
        for name, value in rows.items():
            table.add_row(escape(name), escape(str(value)))
        _print_whole(console, table)
    _print_errors(console, reports)


def _verify_table(console: Console, reports: list[dict[str, Any]]) -> None:
    for report in reports:
        if not report["error"]:
            console.print(
                f"whole: {report['path']}, {size_text(report['num_bytes'])}", markup=False
            )
    _print_errors(console, reports)


def _print_whole(console: Console, table: Table) -> None:
    """As wide as it is, also where the console is narrower: rich cuts names and numbers."""
    table.width = console.measure(table, options=console.options.update(width=10_000)).maximum
    console.print(table, crop=False)


def _print_errors(console: Console, reports: list[dict[str, Any]]) -> None:
    for report in reports:
        if report["error"]:
            console.print(f"contexts: {report['error']}", style="red", markup=False)


def _question(path: Path, paths: list[Path]) -> str:
    what = str(paths[0]) if len(paths) == 1 else f"{len(paths)} contexts in {path}"
    return f"Delete {what}, {size_text(sum(each.stat().st_size for each in paths))}?"


def _refuse(console: Console, message: str) -> int:
    console.print(f"contexts: {message}", style="red", markup=False)
    return 1


def size_text(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
