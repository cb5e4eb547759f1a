# SPDX-License-Identifier: Apache-2.0
"""What a prompt imports: whether it is there, and the texts beside it."""

from __future__ import annotations

from vllm_relay.modules.markup.pml import Import, did_you_mean, listed
from vllm_relay.modules.markup.xml_tree import PmlError
from vllm_relay.modules.prompt.layout import ModuleTokens


def check_import(root: ModuleTokens, module: ModuleTokens, found: Import) -> None:
    """Check the arguments of an import and which modules are imported right in it.

    Args:
        root: what every prompt has.

    Raises:
        PmlError: the module has no such parameters or modules, or not for one prompt.
    """
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
