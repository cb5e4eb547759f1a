# SPDX-License-Identifier: Apache-2.0
"""Answers of subqueries are looked up where they are used.

A call alone in the list of a subquery gives the key of its row; the SELECT that reads the
subquery looks the answer up. So joins, windows and limits leave out rows before they are asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlglot.tokens import TokenType

from vllm_relay.tables.sql.expressions import fold
from vllm_relay.tables.sql.text.call_sites import Call
from vllm_relay.tables.sql.text.edited import Edited
from vllm_relay.tables.sql.text.sources import Source, sources
from vllm_relay.tables.sql.text.structure import Query, Range, Select, select_items
from vllm_relay.tables.texts import quoted

_OPERANDS = (
    *(TokenType.VAR, TokenType.IDENTIFIER, TokenType.NUMBER, TokenType.STRING),
    *(TokenType.R_PAREN, TokenType.R_BRACKET),
)


_DIRECTIONS = ("ASC", "DESC", "NULLS", "FIRST", "LAST")
# after a name that is none of a column
_NO_COLUMN = (TokenType.DOT, TokenType.COLON, TokenType.L_PAREN)


@dataclass(frozen=True)
class _Use:
    """Where a subquery is read."""

    select: Select
    source: Source


def look_up_late(edited: Edited) -> None:
    """Move calls of subqueries to where their columns are used."""
    for query in sorted(edited.structure.all_queries, key=lambda query: query.range[1]):
        use = _only_use(edited, query)
        if use is None or query.is_set or len(query.selects) != 1 or query.is_recursive:
            continue
        for name, call in list(_bare_calls(edited, query.selects[0])):
            places = _places(edited, use, query, name)
            if places is not None:
                _move(edited, use, call, name, places)
    edited.sort_calls()


def _only_use(edited: Edited, query: Query) -> _Use | None:
    structure = edited.structure
    if query.above is not None and query.clause == "from":
        for source in sources(structure, query.above):
            if source.is_query and source.range[0] <= query.range[0] < source.range[1]:
                after = query.range[1] + 1
                words = [structure.word(n) for n in range(source.range[0], query.range[0] - 1)]
                renames = structure.is_type(source.range[1] - 1, TokenType.R_PAREN)
                if "LATERAL" in words or (renames and source.range[1] != after):
                    return None
                return _Use(query.above, source)
        return None
    if query.owner is None or query.clause != "with" or query.owner.is_recursive:
        return None
    name = next(name for name, cte in query.owner.ctes if cte is query)
    if structure.cte_names().count(fold(name)) != 1:
        return None
    opening = query.range[0] - 1
    before = [structure.word(n) for n in range(max(opening - 3, 0), opening)]
    if "MATERIALIZED" in before or structure.is_type(opening - 2, TokenType.R_PAREN):
        return None
    uses: list[_Use] = []
    for other in structure.all_queries:
        for select in other.selects:
            for source in sources(structure, select):
                if fold(structure.tokens[source.range[0]].text) == fold(name):
                    if structure.is_type(source.range[1] - 1, TokenType.R_PAREN):
                        return None
                    uses.append(_Use(select, source))
            if not sources(structure, select) and "from" in select.clauses:
                names = [fold(structure.tokens[n].text) for n in range(*select.clauses["from"])]
                if fold(name) in names:
                    return None
    return uses[0] if len(uses) == 1 else None


def _bare_calls(edited: Edited, select: Select) -> Iterator[tuple[str, Call]]:
    """Calls alone in a list that nothing else of the SELECT uses, by the names of their columns."""
    structure = edited.structure
    if "select" not in select.clauses or "group" in select.clauses:
        return
    if structure.is_type(select.clauses["select"][0], TokenType.DISTINCT) and not (
        structure.is_type(select.clauses["select"][0] + 1, TokenType.ON)
    ):
        return
    if any(structure.is_type(n, TokenType.NUMBER, TokenType.ALL)
           for n in range(*select.clauses.get("order", (0, 0)))):  # fmt: skip
        return
    for item in select_items(structure, select):
        for call in edited.calls:
            if call.range[0] != item[0] or call.select is not select:
                continue
            rest = (call.range[1], item[1])
            if call.names:
                if rest[0] != rest[1]:
                    continue
                own = list(call.names)
            elif rest[0] == rest[1]:
                own = [call.column or call.site.function]
            elif (
                rest[1] - rest[0] == 1
                or structure.is_type(rest[0], TokenType.ALIAS)
                and (rest[1] - rest[0] == 2)
            ):
                own = [structure.tokens[rest[1] - 1].text]
            else:
                continue
            for name in own:
                used = [
                    n for n in range(*select.range)
                    if not item[0] <= n < item[1] and fold(structure.tokens[n].text) == fold(name)
                    and not _in_source(edited, select, n)
                ]  # fmt: skip
                if not used:
                    yield name, call


def _in_source(edited: Edited, select: Select, number: int) -> bool:
    """Whether a token is in a subquery of FROM."""
    return any(
        query.above is select and query.clause == "from"
        and query.range[0] <= number < query.range[1]
        for query in edited.structure.all_queries
    )  # fmt: skip


@dataclass(frozen=True)
class _Place:
    """A reference to a column, or a star that stands for it too."""

    range: Range
    is_star: bool
    is_item: bool


def _places(edited: Edited, use: _Use, query: Query, name: str) -> list[_Place] | None:
    """Where a column of a subquery is used; None if that is not certain."""
    structure, select, source = edited.structure, use.select, use.source
    if "select" not in select.clauses or "window" in select.clauses:
        return None
    alias = fold(source.alias.strip('"'))
    others = [fold(other.alias.strip('"')) for other in sources(structure, select)]
    if not others or (alias and others.count(alias) != 1):
        return None
    items = select_items(structure, select)
    ordered = structure.split(select.clauses["order"]) if "order" in select.clauses else []
    found: list[_Place] = []
    begin, end = select.range
    has_item = False
    for number in range(begin, end):
        if query.range[0] <= number < query.range[1]:
            continue
        if source.range[0] <= number < source.range[1]:
            continue
        token = structure.tokens[number]
        word = structure.word(number)
        in_query = structure.innermost(number)[0] is not select
        if word in ("NATURAL", "PIVOT", "UNPIVOT", "COLUMNS") or token.token_type == TokenType.HASH:
            return None
        text = fold(token.text)
        is_name = token.token_type in (TokenType.VAR, TokenType.IDENTIFIER)
        if alias and text == alias and is_name:
            if not structure.is_type(number + 1, TokenType.DOT):
                return None
            continue
        if token.token_type == TokenType.STAR and not in_query:
            place = _star(edited, number, items, alias)
            if place is False:
                return None
            if isinstance(place, _Place):
                found.append(place)
                has_item = True
            continue
        if text != fold(name) or not is_name:
            continue
        if in_query or structure.is_type(number + 1, *_NO_COLUMN):
            return None
        if structure.is_type(number - 1, TokenType.ALIAS):
            return None
        if _in_using(edited, select, number):
            return None
        tokens = (number, number + 1)
        if structure.is_type(number - 1, TokenType.DOT):
            table = fold(structure.tokens[number - 2].text)
            if structure.is_type(number - 3, TokenType.DOT) or table not in others:
                return None
            if table != alias:
                continue
            tokens = (number - 2, number + 1)
        is_item = tokens in items
        # an alias without AS
        if not is_item and any(
            item[1] - 1 == number and number > item[0]
            and structure.is_type(number - 1, *_OPERANDS) for item in items
        ):  # fmt: skip
            return None
        has_item = has_item or is_item
        found.append(_Place(tokens, False, is_item))
    return _without_order(edited, found, select, ordered, has_item, bool(alias))


def _without_order(
    edited: Edited, found: list[_Place], select: Select, ordered: list[Range], has_item: bool,
    has_alias: bool,
) -> list[_Place] | None:  # fmt: skip
    """In ORDER BY a name that is an item's too means that item."""
    order = select.clauses.get("order")
    if order is None or not has_item:
        return found
    kept: list[_Place] = []
    for place in found:
        if not order[0] <= place.range[0] < order[1]:
            kept.append(place)
            continue
        rest = next(
            (
                edited.structure.tokens[place.range[1] : end]
                for begin, end in ordered
                if begin == place.range[0]
            ),
            None,
        )
        is_whole = rest is not None and all(token.text.upper() in _DIRECTIONS for token in rest)
        if is_whole and place.range[1] - place.range[0] == 1:
            continue
        if place.range[1] - place.range[0] == 1 and not has_alias:
            return None
        kept.append(place)
    return kept


def _star(edited: Edited, number: int, items: list[Range], alias: str) -> _Place | bool | None:
    """A star of the list; None if it is no star of columns, False if it cannot be told."""
    structure = edited.structure
    if structure.is_type(number - 1, TokenType.L_PAREN) and structure.word(number - 2) == "COUNT":
        return None
    if (number, number + 1) in items:
        return _Place((number, number + 1), True, True)
    if structure.is_type(number - 1, TokenType.DOT):
        if (number - 2, number + 1) not in items:
            return False
        is_own = fold(structure.tokens[number - 2].text) == alias
        return _Place((number - 2, number + 1), True, True) if is_own else None
    return None if structure.is_type(number - 1, *_OPERANDS) else False


def _in_using(edited: Edited, select: Select, number: int) -> bool:
    return any(
        source.using is not None and source.using[0] <= number < source.using[1]
        for source in sources(edited.structure, select)
    )


def _move(edited: Edited, use: _Use, call: Call, name: str, places: list[_Place]) -> None:
    structure = edited.structure
    edited.give_key(call, name)
    for place in places:
        _, clause = structure.innermost(place.range[0])
        column = quoted(name)
        if use.source.alias:
            column = f"{use.source.alias}.{column}"
        if place.is_star:
            edited.add_star(place.range, call, name, column, use.select)
            continue
        text = column if use.source.alias else structure.text_of(place.range)
        edited.add_reference(place.range, call, name, text, use.select, clause, place.is_item)
