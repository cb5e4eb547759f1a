# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from vllm_relay.modules.markup.pml import (
    parse_prompt,
    parse_schema,
    read_schema,
)
from vllm_relay.modules.markup.schema import (
    Module,
    Parameter,
    Schema,
    SchemaError,
    Text,
    Turn,
    Union,
)
from vllm_relay.modules.markup.xml_tree import PmlError

SCHEMA = """<schema name="trip">
  <system>You plan trips.</system>
  <user>
    Plan a trip.
    <module name="plan">
      It takes <param name="duration" len="5"/>.
      <union scaffold="sea">
        <module name="sea">
          By the sea.
        </module>
        <module name="city" cache="false">In <parameter
          name="where" length="3" scaffold="town"/></module>
      </union>
    </module>
    <scaffold modules="plan hotel"/>
    <module name="hotel">A hotel.</module>
  </user>
</schema>
"""


def test_a_schema_is_the_same_from_pml_and_from_python() -> None:
    assert parse_schema(SCHEMA) == Schema(
        "trip",
        Turn("system", "You plan trips."),
        Turn(
            "user",
            "Plan a trip.\n",
            Module(
                "plan",
                "It takes ",
                Parameter("duration", 5),
                ".\n",
                Union(
                    Module("sea", "By the sea.\n"),
                    Module("city", "In ", Parameter("where", 3, "town"), cached=False),
                ),
            ),
            Module("hotel", "A hotel."),
        ),
        scaffolds=(("plan", "hotel"),),
    )


def test_code_keeps_its_lines() -> None:
    schema = parse_schema(
        """<schema name="code"><module name="unit.py">

    class Unit:
        def live(self):
            return self.health > 0 and self.age < 90 && x

  </module></schema>"""
    )
    [module] = schema.content
    assert isinstance(module, Module)
    assert module.content == (
        Text(
            "class Unit:\n"
            "    def live(self):\n"
            "        return self.health > 0 and self.age < 90 && x\n"
        ),
    )


@pytest.mark.parametrize(
    ("markup", "texts"),
    [
        ("a <b/> c", ["a ", " c"]),
        ("\n  a\n  <b/>\n  c\n", ["a\n", "c\n"]),
        ("\n\n  a\n\n    d\n  e\n\n", ["a\n\n  d\ne\n"]),
        ("<b/>\n\n<b/>", []),
        ("<b/> <b/>", [" "]),
        ("\ta\n\t\tb\n", ["\ta\nb\n"]),
        ("a <!-- note --> b", ["a  b"]),
        ("a<![CDATA[ <x> & ]]>b", ["a <x> & b"]),
    ],
)
def test_white_space_that_lays_out_is_no_text(markup: str, texts: list[str]) -> None:
    markup = markup.replace("<b/>", "<module name='{}'/>")
    markup = markup.format(*"bcdefgh")
    schema = parse_schema(f'<schema name="s">{markup}</schema>')
    assert [each.text for each in schema.content if isinstance(each, Text)] == texts


def test_all_white_space_is_text_where_it_is_preserved() -> None:
    schema = parse_schema(
        '<schema name="s" xml:space="preserve">\n  a\n<module name="b">\n</module> '
        '<module name="c" xml:space="default">\n  d\n</module></schema>'
    )
    assert schema.content == (
        Text("\n  a\n"),
        Module("b", "\n"),
        Text(" "),
        Module("c", "d\n"),
    )
    with pytest.raises(PmlError, match="expected preserve or default"):
        parse_schema('<schema name="s" xml:space="keep"/>')


def test_a_prompt_keeps_its_texts_in_place() -> None:
    prompt = parse_prompt(
        '<prompt schema="trip">Hi <plan duration="3 days"><sea/></plan> and <hotel/> go!'
        "<user>Where?</user></prompt>"
    )
    assert prompt.schema == "trip"
    plan, hotel = prompt.root.imports
    [turn] = prompt.turns
    assert (prompt.root.opening, plan.behind, hotel.behind) == ("Hi ", " and ", "")
    assert (plan.name, plan.arguments) == ("plan", {"duration": "3 days"})
    assert [(each.name, each.behind) for each in plan.imports] == [("sea", "")]
    assert (hotel.name, hotel.imports, hotel.opening) == ("hotel", [], "")
    assert (prompt.text, turn.role, turn.text) == (" go!", "user", "Where?")


@pytest.mark.parametrize(
    ("markup", "line", "column", "message"),
    [
        ("<schema>", 1, 9, "no element found"),
        ("<schema/>", 1, 1, "expected the attribute 'name'"),
        ("<shema/>", 1, 1, "found <shema>, expected <schema>; did you mean schema"),
        ('<schema name=" "/>', 1, 1, "expected a name of at most"),
        ('<schema name="s">\n <modul name="a"/>\n</schema>', 2, 2, "did you mean module"),
        ('<schema name="s"><module nme="a"/></schema>', 1, 18, "did you mean name"),
        (
            '<schema name="s"><module name=a/></schema>',
            1,
            31,
            'attributes are written name="value"',
        ),
        ('<schema name="s"><module name="a"></schema>', 1, 37, "<module> of line 1 is not closed"),
        ('<schema name="s">é & ü &amp; &\n\n é & & < <b/></schema>', 3, 10, "found <b>"),
        ('<schema name="s">a\ud800</schema>', 1, 19, "not well-formed"),
        ('<schema name="s">x & y < z\n &amp; <b</schema>', 2, 10, "&lt;"),
        ('<schema name="s"><module name="user"/></schema>', 1, 18, "has a meaning of its own"),
        ('<schema name="s"><module name="a b"/></schema>', 1, 18, "expected a letter"),
        (
            '<schema name="s"><module name="a"/><module name="a"/></schema>',
            1,
            1,
            "2 modules are called",
        ),
        ('<schema name="s"><union>text</union></schema>', 1, 25, "found text 'text'"),
        ('<schema name="s"><union/></schema>', 1, 18, "at least one"),
        ('<schema name="s"><union><param/></union></schema>', 1, 25, "expected <module>"),
        ('<schema name="s"><param name="p"/></schema>', 1, 18, "expected len"),
        ('<schema name="s"><param name="p" len="0"/></schema>', 1, 18, "from 1"),
        ('<schema name="s"><param name="p" len="2">x</param></schema>', 1, 18, "expected it empty"),
        ('<schema name="s"><module name="a" src="x"/></schema>', 1, 18, "not read from a file"),
        ('<schema name="s"><module name="a" cache="no"/></schema>', 1, 18, "true or false"),
        ('<schema name="s"><user><user>x</user></user></schema>', 1, 24, "found <user> inside"),
        ('<schema name="s"><scaffold modules="a"/></schema>', 1, 18, "two modules or more"),
        ('<schema name="s"><scaffold modules="a b"/></schema>', 1, 18, "beside each other"),
        ('<schema name="s"><param name="p" len="99999999999"/></schema>', 1, 18, "from 1"),
        (
            '<schema name="s">' + "".join(f'<module name="a{i}">' for i in range(99)),
            1,
            939,
            "fewer",
        ),
        ("<!DOCTYPE schema [<!ENTITY a 'b'>]><schema name='s'/>", 1, 18, "no entities"),
    ],
)
def test_errors_of_schemas_say_where(markup: str, line: int, column: int, message: str) -> None:
    with pytest.raises(PmlError) as caught:
        parse_schema(markup)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"schema:{line}:{column}: "), str(caught.value)


@pytest.mark.parametrize(
    ("markup", "message"),
    [
        ("<prompt/>", "expected the attribute 'schema'"),
        ('<prompt schema="s" x="y"/>', "allowed are schema"),
        ('<prompt schema="s"><a/><user>x<b/></user></prompt>', "text only"),
        ('<prompt schema="s"><a><user>x</user></a></prompt>', "expected turns in <prompt> only"),
        ('<prompt schema="s"><a/><b></prompt> oops <c', "is not closed"),
        ('<prompt schema="s"><user>x</user><a/></prompt>', "stands before a module"),
        (
            '<prompt schema="s"><a/>ONE<assistant>TWO</assistant><user>x</user> FOUR</prompt>',
            "found the text 'FOUR' behind <user>, expected it in a turn",
        ),
        (
            '<prompt schema="s"><assistant>TWO</assistant>THREE<user>x</user></prompt>',
            "found the text 'THREE' behind <assistant>",
        ),
    ],
)
def test_errors_of_prompts_say_what_is_allowed(markup: str, message: str) -> None:
    with pytest.raises(PmlError, match="prompt:1:") as caught:
        parse_prompt(markup)
    assert message in str(caught.value)


def test_white_space_behind_turns_is_no_text() -> None:
    prompt = parse_prompt(
        '<prompt schema="s" xml:space="preserve"><a/> <assistant>x</assistant>\n<user> y </user>\n'
        "</prompt>"
    )
    assert prompt.text == " "
    assert [turn.text for turn in prompt.turns] == ["x", " y "]


def test_a_prompt_may_be_only_what_stands_in_its_element() -> None:
    prompt = parse_prompt('<plan duration="a &lt; b"/> & go!', schema='x" & <y>')
    assert prompt.schema == 'x" & <y>'
    [plan] = prompt.root.imports
    assert plan.arguments == {"duration": "a < b"}
    assert (str(plan.place), str(prompt.root.place)) == ("prompt:1:1", "prompt:1:1")
    assert prompt.text == " & go!"


@pytest.mark.parametrize(
    ("body", "place", "message"),
    [
        ("<a>", "1:4", "mismatched tag: <a> of line 1 is not closed"),
        ("x\n & </a>", "2:6", "mismatched tag"),
        ("</prompt><a/>", "1:10", "junk"),
        ("<user>x</user>\n y", "1:15", "found the text 'y'"),
    ],
)
def test_errors_of_such_prompts_say_where(body: str, place: str, message: str) -> None:
    with pytest.raises(PmlError) as caught:
        parse_prompt(body, schema="s")
    assert str(caught.value).startswith(f"prompt:{place}: ")
    assert message in str(caught.value) and "<prompt> of line" not in str(caught.value)


def test_many_tags_and_entities_take_no_long_time() -> None:
    """Half an hour, if the place of each were counted from its line's beginning."""
    number = 60_000
    prompt = parse_prompt("<a/>& " * number, schema="s")
    assert [each.behind for each in prompt.root.imports] == ["& "] * (number - 1) + [""]
    assert str(prompt.root.imports[-1].place) == f"prompt:1:{6 * number - 5}"


def test_characters_of_private_use_are_text_like_any() -> None:
    """And none of them is taken for what stands for < and & meanwhile."""
    text = "".join(map(chr, range(0xF0000, 0xF0010)))
    prompt = parse_prompt(
        f'<a p="{text} < & "/>{text} < & ?<!-- < & --><![CDATA[ <& ]]>', schema="s"
    )
    [found] = prompt.root.imports
    assert found.arguments == {"p": f"{text} < & "}
    assert prompt.text == f"{text} < & ? <& "


def test_a_reference_to_a_character_of_private_use_is_no_markup() -> None:
    prompt = parse_prompt("<a/>a < b &#xF0000; & &#xF0001;", schema="s")
    assert prompt.text == "a < b \U000f0000 & \U000f0001"


def test_many_scaffolds_take_no_long_time() -> None:
    names = [f"m{number}" for number in range(5000)]
    modules = "".join(f'<module name="{name}"/>' for name in names)
    pairs = zip(names, names[1:], strict=False)
    scaffolds = "".join(f'<scaffold modules="{a} {b}"/>' for a, b in pairs)
    schema = parse_schema(f'<schema name="s">{modules}{scaffolds}</schema>')
    assert len(schema.scaffolds) == 4999


def test_scaffolds_of_many_modules_are_refused() -> None:
    names = [f"m{number}" for number in range(101)]
    modules = "".join(f'<module name="{name}"/>' for name in names)
    for count, refused in ((100, False), (101, True)):
        scaffold = f'<scaffold modules="{" ".join(names[:count])}"/>'
        text = f'<schema name="s">{modules}{scaffold}</schema>'
        with (
            pytest.raises(PmlError, match="given 101 modules, expected 100 at most")
            if refused
            else nullcontext()
        ):
            parse_schema(text)


def test_indentation_in_common_may_be_of_blanks_and_tabs() -> None:
    schema = parse_schema('<schema name="s">\n  \ta\n  \t b\n    c\n</schema>')
    assert schema.content == (Text("\ta\n\t b\n  c\n"),)


def test_scaffolds_concern_the_modules_beside_each_other_only() -> None:
    """Not others of these names elsewhere."""
    uncached = Module("c", Module("a", cached=False))
    in_union = Module("d", Union(Module("a"), Module("e"), Module("b")))
    schema = Schema("s", Module("a"), Module("b"), uncached, scaffolds=(("a", "b"),))
    assert schema.scaffolds == (("a", "b"),)
    with pytest.raises(SchemaError, match="two of these are in one union"):
        Schema("s", Module("a"), Module("b"), in_union, scaffolds=(("a", "b"),))
    with pytest.raises(SchemaError, match="a is not cached"):
        Schema("s", Module("a", cached=False), Module("b"), scaffolds=(("a", "b"),))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "schema.xml"
    path.write_bytes(b"<schema name='\xff'/>")
    with pytest.raises(SchemaError, match=r"schema\.xml: expected text in UTF-8"):
        read_schema(path)


def test_long_texts_take_no_long_time() -> None:
    """Hours, if anything were not linear."""
    prompt = "x" + "\n" * 200_000 + "y" + "<!--x-->" * 50_000 + "< & " * 50_000
    parsed = parse_prompt(f'<prompt schema="s">{prompt}</prompt>')
    assert parsed.text == "x" + "\n" * 200_000 + "y" + "< & " * 50_000
    with pytest.raises(PmlError):
        parse_prompt(f'<prompt schema="s">{"<!--" * 100_000}</prompt>')


def test_texts_of_modules_may_lie_in_files(tmp_path: Path) -> None:
    folder = tmp_path / "schemas"
    folder.mkdir()
    (folder / "paper.txt").write_text("  As < it & is.\n")
    path = folder / "schema.xml"
    path.write_text('<schema name="s"><module name="a" src="paper.txt"/></schema>')
    assert read_schema(path).content == (Module("a", "  As < it & is.\n"),)
    path.write_text('<schema name="s"><module name="a" src="gone.txt"/></schema>')
    with pytest.raises(PmlError, match=r"schema\.xml:1:18: .*cannot read"):
        read_schema(path)
    path.write_text('<schema name="s"><module name="a" src="../x.txt"/></schema>')
    with pytest.raises(PmlError, match="a file below"):
        read_schema(path)
    path.write_text('<schema name="s"><module name="a" src="paper.txt">x</module></schema>')
    with pytest.raises(PmlError, match="src and text"):
        read_schema(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Module("1a"), "expected a letter"),
        (lambda: Parameter("p", 0), "expected 1 to"),
        (lambda: Parameter("p", 10**6), "expected 1 to"),
        (lambda: Turn("robot", "x"), "expected one of system"),
        (lambda: Turn("user", Turn("user", "x")), "turns follow each other"),
        (lambda: Module("a", Module("b"), cached=False), "cannot contain modules"),
        (lambda: Schema("s", Union(Module("a"), Module("b")), scaffolds=(("a", "b"),)), "union"),
        (lambda: Module("a", Parameter("p", 1), Parameter("p", 2)), "2 parameters"),
        (lambda: Schema("a/b"), "a segment of a URL's path"),
        (lambda: Schema(".."), "a segment of a URL's path"),
        (lambda: Schema("a\nb"), "a segment of a URL's path"),
    ],
)
def test_what_cannot_be_a_schema(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        make()
