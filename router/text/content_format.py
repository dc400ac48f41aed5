"""The form in which a chat template needs the content of messages: one text, or a list of parts.

Engines inspect the template: if it loops over a message's content, it gets lists, even if the client sent a text. This
module inspects the same places, because with another result the router would count other tokens.

Source: vLLM documentation, "OpenAI-Compatible Server", `--chat-template-content-format auto`; vLLM 0.32 for what that
page leaves open.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

_CONTENT = "content"


def wants_parts(template: nodes.Template) -> bool:
    """Whether the parsed `template` loops over the parts of a message's content."""
    try:
        messages = _message_names(template)
        in_macros = _loops_over_content_in_macros(template, messages)
        loops = list(template.find_all(nodes.For))
        of_macros = {id(loop) for macro in template.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    except _UnusualError:
        return False
    contents = {(name, _CONTENT) for name in messages}
    over_content = (
        loop
        for loop in loops
        if _member_of(loop.iter) in contents
        or id(loop) in in_macros
        or (id(loop) not in of_macros and isinstance(loop.iter, nodes.Name) and loop.iter.name == _CONTENT)
    )
    first = next(over_content, None)
    return first is not None and isinstance(first.target, nodes.Name)


class _UnusualError(Exception):
    """The template unpacks its loop variable; engines stop the inspection there and pass texts."""


def _message_names(template: nodes.Template) -> set[str]:
    """Names of one message: targets of loops over `messages`, or over a value derived from it."""
    lists = _names_made_of("messages", template)
    found = set()
    for loop in template.find_all(nodes.For):
        if _name_of(loop.iter) in lists:
            found.add(_plain(loop.target))
    return found


def _names_made_of(name: str, template: nodes.Template) -> set[str]:
    """`name`, and every name that it, or a slice of it, is assigned to, directly or through others."""
    found, new = {name}, [name]
    assignments = list(template.find_all(nodes.Assign))
    while new:
        source = new.pop()
        for assignment in assignments:
            if _name_of(assignment.node) == source and (target := _plain(assignment.target)) not in found:
                found.add(target)
                new.append(target)
    return found


def _loops_over_content_in_macros(template: nodes.Template, messages: set[str]) -> set[int]:
    """Loops in macros over a parameter that a call passes a message's content to."""
    found = set()
    for macro in template.find_all(nodes.Macro):
        given = set(_parameters_given_content(macro, template, messages))
        for loop in macro.find_all(nodes.For):
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in given:
                found.add(id(loop))
    return found


def _parameters_given_content(macro: nodes.Macro, template: nodes.Template, messages: set[str]) -> Iterator[str]:
    names = [parameter.name for parameter in macro.args]
    contents = {(name, _CONTENT) for name in messages}
    for call in template.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        yield from (name for name, given in zip(names, call.args, strict=False) if _member_of(given) in contents)
        yield from (given.key for given in call.kwargs if given.key in names and _member_of(given.value) in contents)


def _whole(node: nodes.Node | None) -> nodes.Node | None:
    """The expression that `node` filters, tests or slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node


def _name_of(node: nodes.Node | None) -> str | None:
    """The name that `node` reads, filtered or sliced; None if it reads something else."""
    whole = _whole(node)
    return whole.name if isinstance(whole, nodes.Name) and whole.ctx == "load" else None


def _member_of(node: nodes.Node | None) -> tuple[str, str] | None:
    """(name, member) that `node` reads, filtered or sliced; None if it reads something else."""
    whole = _whole(node)
    if isinstance(whole, nodes.Getattr):
        owner, member = whole.node, whole.attr
    elif isinstance(whole, nodes.Getitem) and isinstance(whole.arg, nodes.Const):
        owner, member = whole.node, whole.arg.value
    else:
        return None
    return (owner.name, member) if isinstance(owner, nodes.Name) and isinstance(member, str) else None


def _plain(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _UnusualError
    return target.name
