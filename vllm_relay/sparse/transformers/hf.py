# SPDX-License-Identifier: Apache-2.0
"""The attention implementation `relay_sparse` for transformers models.

Attention has to know the session and its layer. Both travel with the data: `Session.update` returns
`SessionStates` as keys and values, and the lengths that masks are made for are `SessionLength`.
Nothing is global, so models, sessions and threads do not meet.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vllm_relay.sparse.transformers.session_states import SessionStates

NAME = "relay_sparse"
# arguments of attention functions that change the scores
_UNSERVED = ("position_bias", "softcap", "s_aux", "sinks", "head_mask")


class SessionLength(int):
    """The number of tokens of a session, as `Session.get_mask_sizes` tells it."""


def register() -> None:
    """Makes `attn_implementation="relay_sparse"` known to transformers; may run many times."""
    AttentionInterface.register(NAME, relay_sparse_attention)
    AttentionMaskInterface.register(NAME, relay_sparse_mask)


def relay_sparse_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`Session.attention` where the cache is a `Session`, otherwise transformers' sdpa. Raises
    ValueError: what a session cannot compute exactly; names it."""
    if not isinstance(key, SessionStates):
        given = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    layer = key.layer
    sliding_window = kwargs.get("sliding_window")
    if not isinstance(value, SessionStates) or value.layer is not layer:
        raise ValueError("key and value are not of the same update of a session")
    if key.shape[2] != layer.get_seq_length():
        raise ValueError(
            f"keys of {key.shape[2]} tokens in a session of {layer.get_seq_length()}: attention "
            "must follow its own update()"
        )
    if is_causal is False or not getattr(module, "is_causal", True):
        raise ValueError("a session serves causal attention only")
    if dropout:
        raise ValueError(f"dropout is {dropout}: a session serves inference; call model.eval()")
    unserved = [name for name in _UNSERVED if kwargs.get(name) is not None]
    if unserved:
        raise ValueError(
            f"relay_sparse with a session does not compute {', '.join(unserved)}: use "
            'attn_implementation="sdpa" or "eager"'
        )
    if attention_mask is not None and (sliding_window is None or attention_mask.numel() > 1):
        raise ValueError(
            f"attention_mask of shape {list(attention_mask.shape)}: a session knows causal and "
            'sliding-window attention only; use attn_implementation="sdpa" for masks of your own'
        )
    if layer.layer_idx == 0:
        _check_positions(kwargs.get("position_ids"), query.shape[2], layer.get_seq_length())
        layer.model.check(getattr(module, "config", None))
    output = layer.attention(query, scale=scaling, sliding_window=sliding_window)
    return output.transpose(1, 2).contiguous(), None


def relay_sparse_mask(
    batch_size: int, q_length: int, kv_length: int, **kwargs: Any
) -> torch.Tensor | None:
    """transformers' mask for sdpa; none where a `Session` needs none. Raises ValueError: padding,
    or a mask that is not causal, with a session."""
    if not isinstance(kv_length, SessionLength):
        return sdpa_mask(batch_size, q_length, kv_length, **kwargs)
    if not kwargs.get("allow_is_causal_skip", True):
        raise ValueError(
            "a session serves causal and sliding-window attention only; use "
            'attn_implementation="sdpa" for this model'
        )
    _check_padding(kwargs.get("attention_mask"), kv_length)
    local_size = kwargs.get("local_size")
    if local_size is None or kv_length < local_size:
        return None
    # one element says that the layer has a window; attention makes the mask, or refuses
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=kwargs.get("device", "cpu"))


def _check_padding(attention_mask: torch.Tensor | None, num_tokens: int) -> None:
    if attention_mask is None:
        return
    if attention_mask.shape[-1] < num_tokens:
        raise ValueError(
            f"attention_mask covers {attention_mask.shape[-1]} tokens, the sequence has "
            f"{num_tokens} with those that the session holds: leave the mask out, or use "
            "generate(**session.inputs(remaining))"
        )
    if not attention_mask[..., :num_tokens].all():
        raise ValueError(
            "attention_mask hides tokens: a session holds one sequence without padding; leave the "
            "padding out"
        )


def _check_positions(position_ids: torch.Tensor | None, num_queries: int, num_tokens: int) -> None:
    if position_ids is None or position_ids.dim() != 2:
        return
    expected = torch.arange(num_tokens - num_queries, num_tokens, device=position_ids.device)
    if not torch.equal(position_ids[0], expected):
        raise ValueError(
            f"position_ids begin at {int(position_ids[0, 0])}, expected the positions "
            f"{num_tokens - num_queries} to {num_tokens - 1}, which follow the session's tokens: "
            "pass generate() the whole prompt, or generate(**session.inputs(remaining))"
        )
