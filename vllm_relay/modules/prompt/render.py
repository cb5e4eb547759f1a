# SPDX-License-Identifier: Apache-2.0
"""A prompt held against its schema, and what the engine gets: tokens and a plan.

Source: Prompt Cache (Gim et al., 2024), section 3.4; repair: EPIC (Hu et al., 2025), which computes
the first tokens of a chunk anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from msgspec.structs import replace

from vllm_relay.arguments import is_integer
from vllm_relay.modules.markup.pml import Import, PromptMarkup, did_you_mean, listed, shortened
from vllm_relay.modules.markup.schema import SchemaError
from vllm_relay.modules.markup.xml_tree import PmlError
from vllm_relay.modules.prompt.layout import ModuleTokens, OwnText, ParameterTokens, SchemaTokens
from vllm_relay.modules.prompt.plan import ModulePlan, TailRun
from vllm_relay.modules.prompt.text_tokens import TextTokens

Mode = Literal["modular", "repair", "exact"]
MODES: tuple[str, ...] = get_args(Mode)
REPAIR_TOKENS = 16


@dataclass(frozen=True)
class RenderedPrompt:
    """What the engine computes."""

    token_ids: list[int]  # of all slots, padding included; without a plan simply the prompt
    plan: ModulePlan | None = None  # None in mode "exact"

    @classmethod
    def of_plan(
        cls, plan: ModulePlan, contents: Iterable[list[int]], new: list[int]
    ) -> RenderedPrompt:
        """From the tokens of each segment, and those of the tail."""
        token_ids: list[int] = []
        # in slots that are not seen a token that is there, so that penalties see nothing new
        unseen = new[:1]
        for segment, content in zip(plan.segments, contents, strict=True):
            tokens = content + unseen * (plan.num_slots(segment) - segment.num_tokens)
            for begin, end in segment.placeholders:
                tokens[begin:end] = unseen * (end - begin)
            token_ids += tokens
        return cls(token_ids + new, plan)

    @cached_property
    def module_tokens(self) -> dict[str, int]:
        """Of each imported module, how many stored tokens are seen; "" is what every prompt has."""
        segments = self.plan.segments if self.plan else ()
        return {segment.name: segment.num_seen_tokens for segment in segments}

    @property
    def end_position(self) -> int:
        """Of the prompt: generated tokens begin there."""
        return self.plan.answer_position if self.plan else len(self.token_ids)

    @property
    def last_position(self) -> int:
        """Of all tokens, placeholders included."""
        return (self.plan.end_position if self.plan else self.end_position) - 1

    @property
    def min_model_len(self) -> int:
        """How many tokens a model must take for it: slots, or positions."""
        return max(len(self.token_ids), self.last_position + 1)

    def limit_output(self, max_tokens: int | None, max_model_len: int | None) -> int | None:
        """How many of `max_tokens` may be generated: no more than there are positions behind the
        prompt. None stands for any number."""
        if max_model_len is None:
            return max_tokens
        most = max_model_len - self.min_model_len
        return most if max_tokens is None else min(max_tokens, most)


def num_repaired_tokens(mode: str, repair_tokens: int | None) -> int:
    """How many tokens of each module are computed in the context of the prompt.

    Args:
        repair_tokens: what was asked for; None: `REPAIR_TOKENS`, in the mode that has them.

    Raises:
        ValueError: there is no such mode or number of tokens, or the mode has none.
    """
    if mode not in MODES:
        raise ValueError(f"mode: given {mode!r}, expected one of {', '.join(MODES)}")
    if repair_tokens is None:
        return REPAIR_TOKENS if mode == "repair" else 0
    if not is_integer(repair_tokens) or repair_tokens < 0:
        raise ValueError(f"repair_tokens: given {repair_tokens!r}, expected a number from 0")
    if mode != "repair":
        raise ValueError(
            f"repair_tokens: given {repair_tokens} with mode {mode!r}, expected mode 'repair': "
            "leave it out, or set that mode"
        )
    return repair_tokens


class TailRuns(list[TailRun]):
    """The tail of a plan, as it is put together."""

    def __init__(self) -> None:
        super().__init__()
        self._visible: dict[int, int] = {}

    def add(self, num_tokens: int, position: int, sees: Mapping[int, int]) -> None:
        changed = {
            index: visible
            for index, visible in sees.items()
            if self._visible.get(index, 0) != visible
        }
        self._visible.update(changed)
        last = self[-1] if self else None
        if last and not changed and last.position + last.num_tokens == position:
            self[-1] = replace(last, num_tokens=last.num_tokens + num_tokens)
        else:
            self.append(TailRun(num_tokens, position, tuple(changed.items())))


@dataclass
class _Visit:
    """A module on the way through a prompt, and what of it has been passed."""

    place: int  # among the segments of the plan, if it has tokens to store
    module: ModuleTokens
    found: Import
    beside: list[ModuleTokens]  # the modules beside it that it sees in this prompt
    num_to_repair: int  # how many of the tokens to come are computed anew
    repaired: list[tuple[int, int]] = field(default_factory=list)  # ranges of its tokens that were


class Rendering:
    """A prompt on the way to tokens, in the order of its text.

    Args:
        prompt: of this schema.
        repair_tokens: of each module that are computed in the context of the prompt.
        to_pin: modules alone are a prompt too; a token of theirs stands behind them.

    Raises:
        PmlError: the prompt does not fit its schema, or the chat template cannot render its turns.
    """

    def __init__(
        self,
        schema: SchemaTokens,
        prompt: PromptMarkup,
        text_tokens: TextTokens,
        *,
        repair_tokens: int = 0,
        to_pin: bool = False,
    ) -> None:
        self._schema = schema
        self._text_tokens = text_tokens
        self._repair_tokens = repair_tokens
        self._imported: set[tuple[str, ...]] = set()
        self._visits: list[_Visit] = []
        self._new: list[int] = []  # tokens that no module holds
        self._tail = TailRuns()
        self._passed: dict[int, int] = {}  # see `TailRun.sees`, since the last new tokens
        self._texts: list[str] = []
        self._end_position = 0
        self._module(schema.root, prompt.root, [])
        if to_pin and self._visits and not (prompt.turns or prompt.text.strip()):
            self._add_new(self._visits[-1].module.tokens[:1], self._end_position)
        else:
            self._question(prompt)

    # -- the order of the text

    def _module(self, module: ModuleTokens, found: Import, beside: list[ModuleTokens]) -> None:
        _check_import(self._schema.root, module, found)
        self._imported.add(module.path)
        num_to_repair = self._repair_tokens if module.path else 0
        visit = _Visit(len(self._visits), module, found, beside, num_to_repair)
        if module.is_cached and module.tokens:
            self._visits.append(visit)
        imports = {each.name: each for each in found.imports}
        scaffolds = [each for each in map(set, module.scaffolds) if imports.keys() >= each]
        visited: list[ModuleTokens] = []
        for part in module.parts:
            if isinstance(part, OwnText):
                self._own_text(visit, part)
            elif isinstance(part, ParameterTokens):
                self._parameter(visit, part)
            elif (imported := imports.get(part.path[-1])) is not None:
                seen = set().union(*(each for each in scaffolds if imported.name in each))
                beside = [each for each in visited if each.path[-1] in seen] if seen else []
                if imported is found.imports[0]:
                    self._text(found.opening)
                self._module(part, imported, beside)
                self._text(imported.behind)
                if part.tokens:
                    visited.append(part)
        if not imports:
            self._text(found.opening)

    def _own_text(self, visit: _Visit, part: OwnText) -> None:
        module = visit.module
        self._texts.append(part.text)
        tokens = module.tokens[part.begin : part.end]
        if not tokens:
            return
        if not module.is_cached:
            self._add_new(tokens, part.position)
        else:
            if repaired := tokens[: visit.num_to_repair]:
                self._add_new(repaired, part.position)
                visit.repaired.append((part.begin, part.begin + len(repaired)))
                visit.num_to_repair -= len(repaired)
            self._passed[visit.place] = part.end
        self._end_position = max(self._end_position, part.position + len(tokens))

    def _parameter(self, visit: _Visit, part: ParameterTokens) -> None:
        name = part.parameter.name
        argument = visit.found.arguments.get(name, "")
        tokens = self._text_tokens(argument)
        if len(tokens) > part.parameter.length_tokens:
            raise PmlError(
                visit.found.place,
                f"<{visit.found.name}>: {name}={shortened(argument)} has {len(tokens)} tokens, the "
                f"schema allows {part.parameter.length_tokens}",
            )
        self._texts.append(argument)
        self._add_new(tokens, part.position)
        if visit.module.is_cached:
            self._passed[visit.place] = part.end
        if tokens:
            self._end_position = max(self._end_position, part.position + len(tokens))

    def _text(self, text: str) -> None:
        """Of the prompt, behind what has been passed."""
        if text:
            self._texts.append(text)
            tokens = self._text_tokens(text)
            self._add_new(tokens, self._end_position)
            self._end_position += len(tokens)

    def _add_new(self, tokens: list[int], position: int) -> None:
        if tokens:
            self._new += tokens
            self._tail.add(len(tokens), position, self._passed)
            self._passed.clear()

    def _question(self, prompt: PromptMarkup) -> None:
        """What stands behind the schema's text: the rest of its last turn, and further turns."""
        schema, text = self._schema, prompt.text
        turns = [(turn.role, turn.text) for turn in prompt.turns]
        if turns and not schema.turns:
            raise PmlError(
                prompt.turns[0].place, f"found <{turns[0][0]}>, but the schema has no turns: write "
                "the text without it"
            )  # fmt: skip
        if schema.turns and not schema.turn_is_open and text.strip():
            turns.insert(0, ("user", text.strip()))
            text = ""
        place = prompt.root.place
        nothing = PmlError(place, "expected text behind the last module, to answer to")
        if not (turns or text or schema.turn_is_open):
            raise nothing
        if turns and turns[-1][0] != "user":
            raise PmlError(place, "expected the last turn to be the user's, to answer to")
        if schema.turns:
            written = [
                (turn.role, turn.opening, turn.closing)
                for turn in schema.turns
                if turn.path in self._imported
            ]
            try:
                text = self._text_tokens.turns.continuation(
                    written, text, turns, is_open=schema.turn_is_open
                )
            except SchemaError as error:
                raise PmlError(place, str(error)) from None
        num_new = len(self._new)
        self._text(text)
        if len(self._new) == num_new:  # as of white space, for some tokenizers
            raise nothing

    # -- results

    def written_out(self) -> RenderedPrompt:
        """As plain text."""
        text = "".join(self._texts)
        token_ids = self._text_tokens.of_prompt(text, has_turns=bool(self._schema.turns))
        return RenderedPrompt(token_ids)

    def planned(self, block_size: int) -> RenderedPrompt:
        """With modules in slots of their own."""
        places = {visit.module: visit.place for visit in self._visits}
        segments = []
        for visit in self._visits:
            context = [*visit.module.context, *((each, len(each.tokens)) for each in visit.beside)]
            seen = tuple((places[each], num_tokens) for each, num_tokens in context)
            repaired = tuple(visit.repaired)
            segments.append(replace(visit.module.segment, context=seen, replaced=repaired))
        plan = ModulePlan(block_size=block_size, segments=tuple(segments), tail=tuple(self._tail))
        contents = (visit.module.tokens for visit in self._visits)
        return RenderedPrompt.of_plan(plan, contents, self._new)


def _check_import(root: ModuleTokens, module: ModuleTokens, found: Import) -> None:
    """Check the arguments of an import and which modules are imported right in it; `root` is what
    every prompt has."""
    where = f"<{found.name}>" if found.name else "the prompt"
    _check_arguments(module, found, where)
    unions = {child.path[-1]: child.union for child in module.children()}
    taken: dict[int, str] = {}
    for each in found.imports:
        if each.name not in unions:
            raise PmlError(each.place, _unknown(root, each.name, where, list(unions)))
        union = unions[each.name]
        other = taken.get(union)
        if other is not None:
            raise PmlError(
                each.place,
                f"<{each.name}> is imported twice"
                if other == each.name
                else f"<{each.name}> and <{other}> are members of one union: import one of them",
            )
        taken[union] = each.name


def _check_arguments(module: ModuleTokens, found: Import, where: str) -> None:
    known = [parameter.name for parameter in module.parameters()]
    for name in found.arguments:
        if name not in known:
            allowed = f"its parameters are {listed(known)}" if known else "it has none"
            raise PmlError(
                found.place,
                f"{where}: unknown parameter {name!r}; {allowed}{did_you_mean(name, known)}",
            )


def _unknown(root: ModuleTokens, name: str, where: str, allowed: list[str]) -> str:
    for module in root.walk():
        if module.path and module.path[-1] == name:
            parents = module.path[:-1]
            opened = "".join(f"<{each}>" for each in parents)
            closed = "".join(f"</{each}>" for each in reversed(parents))
            return f"<{name}> cannot stand in {where}: write {opened}<{name}/>{closed}"
    known = f"known there: {listed(allowed)}" if allowed else "there are none"
    return f"{where}: unknown module <{name}>; {known}{did_you_mean(name, allowed)}"
