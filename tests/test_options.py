"""How options are split and checked, without a compilation (tests/test_bad_input.py has what callers see of it)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from fxwrap import hooks
from fxwrap.errors import OptionError
from fxwrap.options import ADDED, AddedOption, Options, parse_options

INDUCTOR = {"max_autotune": (False, bool), "cpp.threads": (-1, int)}


def parse(user: Any) -> tuple[Options, dict[str, Any]]:
    return parse_options(user, INDUCTOR, ["aten::nonzero", "aten::sort"])


def test_nothing_asked_for_is_the_defaults() -> None:
    assert parse(None) == parse({}) == (Options(), {})


def test_names_that_are_not_fxwraps_go_to_inductor() -> None:
    options, patches = parse({"strict": True, "max-autotune": True, "cpp.threads": 2})
    assert options == Options(strict=True) and patches == {"max_autotune": True, "cpp.threads": 2}


def test_one_operator_is_a_list_of_one() -> None:
    assert parse({"eager_ops": "aten::sort"})[0].eager_ops == ("aten::sort",)


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ({"warmupp": 1}, "did you mean 'warmup'"),
        ({"warmup": True}, "int of at least 0"),
        ({"capture": "sometimes"}, "one of 'auto', 'always', 'never'"),
        ({"eager_ops": "aten::nonzer0"}, "did you mean 'aten::nonzero'?"),
        ({"max_autotune": 1}, "Inductor's option 'max_autotune'"),
        ("strict", "a dictionary of names and values"),
    ],
)
def test_a_wrong_name_or_value_says_what_is_right(user: Any, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse(user)
    assert said in str(caught.value)


def test_what_a_saved_program_keeps() -> None:
    kept = Options(strict=True, capture="never").at_run()
    assert kept["strict"] and "capture" not in kept
    assert kept.keys() < {field.name for field in fields(Options)}


def test_two_features_with_a_class_of_their_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two classes of programs, or of arenas, only one could be made."""
    for name in ("first", "second", "third"):
        monkeypatch.setitem(ADDED, name, AddedOption(name, "a truth", lambda value: value, False))
    monkeypatch.setitem(hooks.PROGRAMS, "first", "features:First")
    monkeypatch.setitem(hooks.PROGRAMS, "second", "features:Second")
    monkeypatch.setitem(hooks.PROGRAMS, "third", "features:First")
    monkeypatch.setitem(hooks.ARENAS, "second", "features:Arena")
    monkeypatch.setitem(hooks.ARENAS, "third", "features:Other")
    for allowed in (
        {"first": True},
        {"second": True},
        {"first": True, "third": True},
        {"first": True, "second": False},
    ):
        parse(allowed)
    with pytest.raises(OptionError, match="'first' and 'second' cannot be set together") as caught:
        parse({"first": True, "second": True})
    assert "whose programs are of a class of their own" in str(caught.value)
    monkeypatch.delitem(hooks.PROGRAMS, "second")
    with pytest.raises(OptionError, match="whose arenas are of a class of their own"):
        parse({"second": True, "third": True})
