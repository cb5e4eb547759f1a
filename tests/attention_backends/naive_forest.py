# SPDX-License-Identifier: Apache-2.0
"""Who shares what, by looking at everything that could be."""

from vllm_relay.attention_backends.forest import NULL_BLOCK


def naive_groups(block_table, shareable_tokens, block_size):
    """{(members, begin_tokens, end_tokens)}, from the sets of rows that have each prefix."""
    rows, heads = {}, {}
    for request, (row, tokens) in enumerate(zip(block_table, shareable_tokens, strict=True)):
        row = [int(block) for block in row[: max(0, tokens // block_size)]]
        head = 0
        while head < len(row) and row[head] == NULL_BLOCK:
            head += 1
        if NULL_BLOCK in row[head:]:
            row = row[: row.index(NULL_BLOCK, head)]
        rows[request] = row if head < len(row) else []
        heads[request] = head
    for request in sorted(rows, key=lambda request: heads[request]):
        head, row = heads[request], rows[request]
        if not row or not head:
            continue
        donors = [
            other
            for other in rows
            if heads[other] <= head < len(rows[other]) and rows[other][head] == row[head]
        ]
        donor = min(donors, key=lambda other: (heads[other], other))
        filled = [("nobody", request)] * head if donor == request else rows[donor][:head]
        rows[request] = filled + row[head:]

    members_of_prefix = {}
    for request, row in rows.items():
        for length in range(1, len(row) + 1):
            members_of_prefix.setdefault(tuple(row[:length]), set()).add(request)
    end_of_group = {}
    for prefix, members in members_of_prefix.items():
        if len(members) > 1:
            group = frozenset(members)
            end_of_group[group] = max(end_of_group.get(group, 0), len(prefix))
    return {
        (
            group,
            block_size * max((e for g, e in end_of_group.items() if g > group), default=0),
            block_size * end,
        )
        for group, end in end_of_group.items()
    }


def groups_of(forest):
    return {
        (frozenset(forest.order[first:last].tolist()), begin, end)
        for first, last, begin, end, _ in forest.nodes.tolist()
    }
