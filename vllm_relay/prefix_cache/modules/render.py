# SPDX-License-Identifier: Apache-2.0
"""A prompt held against its schema, and what the engine gets: tokens and a plan.

Source: Prompt Cache (Gim et al., 2024), section 3.4; repair: EPIC (Hu et al., 2025), which computes
the first tokens of a chunk anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from vllm_relay.prefix_cache.modules.layout import (
    ModuleTokens,
    OwnText,
    ParameterTokens,
    SchemaTokens,
    UnionTokens,
)
from vllm_relay.prefix_cache.modules.plan import ModulePlan, Segment, TailRun
from vllm_relay.prefix_cache.modules.pml import (
    Import,
    PromptMarkup,
    PromptText,
    PromptTurn,
    did_you_mean,
)
from vllm_relay.prefix_cache.modules.text_tokens import TextTokens
from vllm_relay.prefix_cache.modules.xml_tree import PmlError

Mode = Literal["modular", "repair", "exact"]
MODES: tuple[str, ...] = get_args(Mode)
REPAIR_TOKENS = 16


@dataclass(frozen=True)
class RenderedPrompt:
    """What the engine computes.

    Attributes:
        token_ids: of all slots, padding included; without a plan simply the prompt.
        plan: None in mode "exact".
        end_position: of the prompt: generated tokens begin there.
        module_tokens: of each imported module, how many stored tokens are seen; "" is what every
            prompt has.
    """

    token_ids: list[int]
    plan: ModulePlan | None
    end_position: int
    module_tokens: dict[str, int]

    @property
    def last_position(self) -> int:
        """Of all tokens, placeholders included."""
        return (self.plan.end_position if self.plan else self.end_position) - 1

    @property
    def num_taken(self) -> int:
        """How many tokens a model must take for it: slots, or positions."""
        return max(len(self.token_ids), self.last_position + 1)


@dataclass
class _Visit:
    """A module on the way through a prompt, and what of it has been passed."""

    module: ModuleTokens
    found: Import
    num_passed: int = 0


@dataclass
class _New:
    """Tokens that no module holds, and what has been passed before."""

    tokens: list[int]
    position: int
    passed: dict[int, int] = field(default_factory=dict)


def render(
    schema: SchemaTokens,
    prompt: PromptMarkup,
    text_tokens: TextTokens,
    *,
    block_size: int,
    mode: Mode = "modular",
    repair_tokens: int = REPAIR_TOKENS,
) -> RenderedPrompt:
    """The tokens and the plan of a prompt.

    Args:
        block_size: tokens of a KV block of the engine.
        mode: "modular" uses stored tokens as they are, "repair" computes the first `repair_tokens`
            of each module in the context of the prompt, "exact" stores nothing apart.

    Raises:
        PmlError: the prompt does not fit its schema.
        SchemaError: the chat template cannot render its turns.
    """
    if mode not in MODES:
        raise ValueError(f"mode: given {mode!r}, expected one of {', '.join(MODES)}")
    if prompt.schema != schema.schema.name:
        raise PmlError(
            prompt.place, f"a prompt of the schema {prompt.schema!r}, given {schema.schema.name!r}"
        )
    walk = _Walk(schema, text_tokens, repair_tokens if mode == "repair" else 0)
    walk.prompt(prompt)
    if mode == "exact":
        return walk.written_out()
    return walk.planned(block_size)


class _Walk:
    """Through a prompt, in the order of its text."""

    def __init__(self, schema: SchemaTokens, text_tokens: TextTokens, repair_tokens: int) -> None:
        self._schema = schema
        self._text_tokens = text_tokens
        self._repair_tokens = repair_tokens
        self._visits: list[_Visit] = []
        self._new: list[_New] = []
        self._texts: list[str] = []
        self._repaired: dict[int, tuple[int, int]] = {}
        self._passed_modules: list[ModuleTokens] = []
        self._end_position = 0

    def prompt(self, prompt: PromptMarkup) -> None:
        imports, behind = _split(prompt)
        root = Import("", {}, imports, prompt.place)
        self._module(self._schema.root, root)
        self._behind(prompt, behind)

    # -- the order of the text

    def _module(self, module: ModuleTokens, found: Import) -> None:
        self._check(module, found)
        visit = _Visit(module, found)
        if module.is_cached and module.tokens:
            self._visits.append(visit)
        texts = _texts_beside(found)
        imports = {each.name: each for each in found.content if isinstance(each, Import)}
        for part in module.parts:
            if isinstance(part, OwnText):
                self._own_text(visit, part)
            elif isinstance(part, ParameterTokens):
                self._parameter(visit, part)
            else:
                members = part.members if isinstance(part, UnionTokens) else (part,)
                for member in members:
                    name = member.path[-1]
                    if name not in imports:
                        continue
                    if before := texts.pop(("before", name), ""):
                        self._texts_at(before, self._end_position)
                    self._module(member, imports[name])
                    self._texts_at(texts.pop(("behind", name), ""), self._end_position)
        self._texts_at(texts.pop(None, ""), self._end_position)

    def _own_text(self, visit: _Visit, part: OwnText) -> None:
        module = visit.module
        self._texts.append(part.text)
        position = module.positions[part.begin] if part.begin < part.end else self._end_position
        tokens = module.tokens[part.begin : part.end]
        if not module.is_cached:
            self._add_new(tokens, position)
        elif tokens:
            if module.path and self._repair_tokens and id(module) not in self._repaired:
                repaired = tokens[: self._repair_tokens]
                self._add_new(repaired, position)
                self._repaired[id(module)] = (part.begin, part.begin + len(repaired))
            visit.num_passed = part.end
        self._end_position = max(self._end_position, position + len(tokens))

    def _parameter(self, visit: _Visit, part: ParameterTokens) -> None:
        name = part.parameter.name
        argument = visit.found.arguments.get(name, "")
        tokens = self._text_tokens(argument)
        if len(tokens) > part.parameter.length_tokens:
            raise PmlError(
                visit.found.place,
                f"<{visit.found.name}>: {name}={argument!r} has {len(tokens)} tokens, the schema "
                f"allows {part.parameter.length_tokens}",
            )
        self._texts.append(argument)
        self._add_new(tokens, part.position)
        if visit.module.is_cached:
            visit.num_passed = part.end
        if tokens:
            self._end_position = max(self._end_position, part.position + len(tokens))

    def _texts_at(self, text: str, position: int) -> None:
        if text:
            self._texts.append(text)
            tokens = self._text_tokens(text)
            self._add_new(tokens, position)
            self._end_position = max(self._end_position, position + len(tokens))

    def _add_new(self, tokens: list[int], position: int) -> None:
        if tokens:
            passed = {id(visit.module): visit.num_passed for visit in self._visits}
            self._new.append(_New(tokens, position, passed))

    def _behind(self, prompt: PromptMarkup, behind: list[PromptText | PromptTurn]) -> None:
        """What stands behind the schema's text: the rest of its last turn, and further turns."""
        schema = self._schema
        text = "".join(each.text for each in behind if isinstance(each, PromptText))
        turns = [each for each in behind if isinstance(each, PromptTurn)]
        if not schema.roles:
            if turns:
                raise PmlError(
                    turns[0].place, f"found <{turns[0].role}>, but the schema has no turns: write "
                    "the text without it"
                )  # fmt: skip
            if not text:
                raise PmlError(prompt.place, "expected text behind the last module, to answer to")
            self._texts_at(text, self._end_position)
            return
        imported = {module.path for module in self._passed_modules}
        roles = [role for role, path in schema.roles if path in imported]
        around = [each for each, (_, path) in zip(schema.around, schema.roles, strict=True)
                  if path in imported]  # fmt: skip
        contents = [text] if schema.turn_is_open else []
        if text and not schema.turn_is_open:
            turns.insert(0, PromptTurn("user", text.strip(), prompt.place))
        if not turns and not schema.turn_is_open:
            raise PmlError(prompt.place, "expected text behind the last module, to answer to")
        all_roles = [*roles, *(turn.role for turn in turns)]
        if all_roles[-1] != "user":
            raise PmlError(prompt.place, "expected the last turn to be the user's, to answer to")
        pieces = self._text_tokens.turns.around(all_roles, asks=True)
        closing = ""
        for number, (opening, its_closing) in enumerate(around):
            if pieces[number] != closing + opening:
                raise PmlError(
                    prompt.place, "the chat template writes the turns of this prompt in another "
                    f"way than those of its schema: expected {closing + opening!r} before turn "
                    f"{number + 1}, found {pieces[number]!r}"
                )  # fmt: skip
            closing = its_closing
        rest = pieces[len(around) :]
        if not schema.turn_is_open:
            if not rest[0].startswith(closing):
                raise PmlError(prompt.place, f"the chat template does not write {closing!r} behind "
                               "the last turn of the schema")  # fmt: skip
            rest[0] = rest[0].removeprefix(closing)
        contents += [turn.text for turn in turns]
        if schema.turn_is_open:
            whole = "".join(a + b for a, b in zip(contents, rest, strict=True))
        else:
            whole = rest[0] + "".join(a + b for a, b in zip(contents, rest[1:], strict=True))
        self._texts_at(whole, self._end_position)

    # -- checks

    def _check(self, module: ModuleTokens, found: Import) -> None:
        self._passed_modules.append(module)
        where = f"<{found.name}>" if found.name else "the prompt"
        children = _children(module)
        seen: dict[str, Import] = {}
        for each in found.content:
            if not isinstance(each, Import):
                continue
            if each.name not in children:
                raise PmlError(each.place, self._unknown(each.name, where, list(children)))
            if each.name in seen:
                raise PmlError(each.place, f"<{each.name}> is imported twice")
            union = children[each.name]
            for other in seen:
                if union is not None and children[other] is union:
                    raise PmlError(
                        each.place,
                        f"<{each.name}> and <{other}> are members of one union: import one of them",
                    )
            seen[each.name] = each
        known = [p.parameter.name for p in module.parts if isinstance(p, ParameterTokens)]
        for name in found.arguments:
            if name not in known:
                allowed = f"its parameters are {', '.join(known)}" if known else "it has none"
                raise PmlError(
                    found.place,
                    f"{where}: unknown parameter {name!r}; {allowed}{did_you_mean(name, known)}",
                )

    def _unknown(self, name: str, where: str, allowed: list[str]) -> str:
        elsewhere = [path for path in _paths(self._schema.root) if path and path[-1] == name]
        if elsewhere:
            opened = "".join(f"<{each}>" for each in elsewhere[0][:-1])
            closed = "".join(f"</{each}>" for each in reversed(elsewhere[0][:-1]))
            return f"<{name}> cannot stand in {where}: write {opened}<{name}/>{closed}"
        known = f"known there: {', '.join(allowed)}" if allowed else "there are none"
        return f"{where}: unknown module <{name}>; {known}{did_you_mean(name, allowed)}"

    # -- results

    def written_out(self) -> RenderedPrompt:
        """As plain text."""
        text = "".join(self._texts)
        token_ids = self._text_tokens.of_prompt(text, has_turns=bool(self._schema.roles))
        return RenderedPrompt(token_ids, None, len(token_ids), {})

    def planned(self, block_size: int) -> RenderedPrompt:
        places = {id(visit.module): place for place, visit in enumerate(self._visits)}
        segments = tuple(self._segment(visit, places) for visit in self._visits)
        tail: list[TailRun] = []
        tail_tokens: list[int] = []
        end = 0
        for new in self._new:
            visible = tuple(new.passed.get(id(visit.module), 0) for visit in self._visits)
            tail_tokens += new.tokens
            end = new.position + len(new.tokens)
            last = tail[-1] if tail else None
            if last and last.visible == visible and last.position + last.num_tokens == new.position:
                tail[-1] = last.model_copy(update={"num_tokens": last.num_tokens + len(new.tokens)})
            else:
                tail.append(
                    TailRun(num_tokens=len(new.tokens), position=new.position, visible=visible)
                )
        plan = ModulePlan(block_size=block_size, segments=segments, tail=tuple(tail))
        token_ids: list[int] = []
        for visit, segment in zip(self._visits, segments, strict=True):
            tokens = visit.module.tokens
            # padding repeats a token that is there, so that penalties see nothing new
            token_ids += tokens + tokens[-1:] * (plan.num_slots(segment) - len(tokens))
        module_tokens = {segment.name: segment.num_seen_tokens for segment in segments}
        return RenderedPrompt(token_ids + tail_tokens, plan, end, module_tokens)

    def _segment(self, visit: _Visit, places: dict[int, int]) -> Segment:
        module = visit.module
        context = [*module.context, *self._scaffold(module)]
        seen = tuple((places[id(each)], visible) for each, visible in context if id(each) in places)
        segment = module.segment(seen)
        if id(module) in self._repaired:
            segment = segment.model_copy(update={"replaced": (self._repaired[id(module)],)})
        return segment

    def _scaffold(self, module: ModuleTokens) -> list[tuple[ModuleTokens, int]]:
        """The modules beside this one that it sees in this prompt."""
        beside: list[tuple[ModuleTokens, int]] = []
        imported = {each.path for each in self._passed_modules}
        for around in self._passed_modules:
            for scaffold in around.scaffolds:
                paths = [(*around.path, name) for name in scaffold]
                if module.path in paths and all(path in imported for path in paths):
                    order = [each.module for each in self._visits if each.module.path in paths]
                    before = order[: order.index(module)]
                    beside += [
                        (e, len(e.tokens)) for e in before if (e, len(e.tokens)) not in beside
                    ]
        return beside


def _split(
    prompt: PromptMarkup,
) -> tuple[tuple[PromptText | Import, ...], list[PromptText | PromptTurn]]:
    """What stands up to the last module, and what stands behind it."""
    last = max((i for i, e in enumerate(prompt.content) if isinstance(e, Import)), default=-1)
    imports: list[PromptText | Import] = []
    for each in prompt.content[: last + 1]:
        if isinstance(each, PromptTurn):
            raise PmlError(
                each.place, f"<{each.role}> stands before a module, expected turns behind the last"
            )
        imports.append(each)
    behind = [each for each in prompt.content[last + 1 :] if not isinstance(each, Import)]
    return tuple(imports), behind


def _texts_beside(found: Import) -> dict[tuple[str, str] | None, str]:
    """Texts by the module they stand before or behind; None: there is no module."""
    texts: dict[tuple[str, str] | None, str] = {}
    last: str | None = None
    names = [each.name for each in found.content if isinstance(each, Import)]
    for each in found.content:
        if isinstance(each, Import):
            last = each.name
            continue
        key = ("behind", last) if last else ("before", names[0]) if names else None
        texts[key] = texts.get(key, "") + each.text
    return texts


def _children(module: ModuleTokens) -> dict[str, UnionTokens | None]:
    """The modules in a module by name, with their unions."""
    found: dict[str, UnionTokens | None] = {}
    for part in module.parts:
        if isinstance(part, ModuleTokens):
            found[part.path[-1]] = None
        elif isinstance(part, UnionTokens):
            found.update((member.path[-1], part) for member in part.members)
    return found


def _paths(module: ModuleTokens) -> Iterator[tuple[str, ...]]:
    yield module.path
    for part in module.parts:
        members = part.members if isinstance(part, UnionTokens) else (part,)
        for member in members:
            if isinstance(member, ModuleTokens):
                yield from _paths(member)
