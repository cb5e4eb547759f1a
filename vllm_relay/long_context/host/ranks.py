# SPDX-License-Identifier: Apache-2.0
"""What the tensor parallel ranks have to tell each other: each has a part of every context, and the
scheduler hears the first one only."""

from __future__ import annotations

import torch


def lost_in_any_rank(lost: dict[str, str]) -> dict[str, str]:
    """Requests whose context one of the ranks cannot read, with the ids of the contexts; all ranks
    call it in the same step."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return lost
    num_lost = torch.tensor([len(lost)])
    torch.distributed.all_reduce(num_lost, group=group.cpu_group)
    if not num_lost.item():
        return lost
    parts: list[dict[str, str]] = [{}] * group.world_size
    torch.distributed.all_gather_object(parts, lost, group=group.cpu_group)
    return {request_id: each for part in parts for request_id, each in part.items()}
