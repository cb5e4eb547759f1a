# SPDX-License-Identifier: Apache-2.0
"""Plans as they travel: as long as what they say, and refused where they contradict themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from tests.modules.chat_templates import character_tokenizer
from vllm_relay.modules.markup.schema import Module, Schema
from vllm_relay.modules.prompt.plan import ModulePlan, Segment, TailRun
from vllm_relay.modules.prompt.schema_store import SchemaStore

SEGMENT = Segment("a", 20, ((0, 0), (10, 40)), ((2, 4),), (7, 7), ((8, 9),))
PLAN = ModulePlan(
    32, (SEGMENT, Segment("b", 5, ((0, 60),), context=((0, 20),))), (TailRun(3, 70, ((0, 20),)),)
)


def plan_of_many(num_modules: int) -> ModulePlan:
    """With text between all modules."""
    store = SchemaStore(character_tokenizer(), block_size=32)
    store.add(Schema("s", *(Module(f"m{n}", f"module {n}") for n in range(num_modules))))
    imports = "".join(f"<m{n}/> and " for n in range(num_modules))
    plan = store.render(f'<prompt schema="s">{imports}?</prompt>').plan
    assert plan is not None
    return plan


def least_s(work: Callable[[], Any]) -> float:
    taken_s = []
    for _ in range(5):
        began_s = time.process_time()
        work()
        taken_s.append(time.process_time() - began_s)
    return min(taken_s)


def test_a_plan_grows_with_its_modules() -> None:
    plans = {count: plan_of_many(count) for count in (500, 2000)}
    texts = {count: plan.to_argument() for count, plan in plans.items()}
    assert len(texts[2000]) < 5 * len(texts[500]) < 200_000

    def travel(text: str) -> None:
        plan = ModulePlan.of_argument(text)
        plan.check()
        assert plan.num_hidden_slots and plan.num_prompt_slots and plan.to_argument()

    taken_s = {count: least_s(lambda text=text: travel(text)) for count, text in texts.items()}
    assert taken_s[2000] < 0.1 and taken_s[2000] < 12 * taken_s[500], taken_s


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, segments=(), tail=()), "a segment or a tail"),
        (replace(PLAN, segments=(SEGMENT, SEGMENT)), "two segments have the same positions"),
        (replace(PLAN, tail=(TailRun(3, 70, ((2, 1),)),)), "tokens that are not there"),
        (replace(PLAN, tail=(TailRun(3, 70, ((0, 21),)),)), "tokens that are not there"),
        *(
            (replace(PLAN, segments=(replace(SEGMENT, **changed),)), message)
            for changed, message in (
                ({"position_runs": ()}, "do not begin at 0"),
                ({"position_runs": ((0, 0), (5, 9), (5, 20))}, "do not begin at 0 and ascend"),
                ({"position_runs": ((0, 0), (20, 30))}, "begins behind its tokens"),
                ({"placeholders": ((4, 2),)}, "not ascending"),
                ({"replaced": ((4, 21),)}, "end behind its tokens"),
                ({"placeholder_tokens": (7,)}, "1 placeholder_tokens for 2 placeholders"),
                ({"context": ((0, 1),)}, "its context is not before it"),
            )
        ),
    ],
)
def test_plans_that_contradict_themselves_are_refused(plan: ModulePlan, message: str) -> None:
    PLAN.check()
    read = ModulePlan.of_argument(plan.to_argument())
    assert read == plan
    with pytest.raises(ValueError, match=message):
        read.check()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"block_size": 32}, "given a dict, expected the text of a plan"),
        ("", "expected a plan: "),
        ("[0,[],[]]", "expected a plan: .*>= 1"),
        ("[32,[],[[1,-1]]]", "expected a plan: .*>= 0"),
        ('[32,[["a",1.5]],[]]', "expected a plan: .*int"),
        ("[32,[],[],1]", "expected a plan: .*length"),
    ],
)
def test_what_is_no_plan_is_refused(argument: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModulePlan.of_argument(argument)
