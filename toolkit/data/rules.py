"""Rules that a program can check: how each is asked for, and whether a response keeps it.

The kinds are those of IFEval (Zhou et al. 2023, arXiv 2311.07911) that need no language model to check. One that a
data set or a recipe asks for is a mapping: `{"rule": "contains", "words": ["salt"], "number": 2}`. With
`required: true` it is a condition: rules are soon kept by saying next to nothing.
"""

import json
import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from toolkit.data.files import object_without_repetition
from toolkit.errors import DataError

_ENDS = ".!?।۔؟"
_AFTER_A_SENTENCE = re.compile(rf"""(?:(?<=[{_ENDS}])|(?<=[{_ENDS}]["'”’)\]*_])|(?<=[{_ENDS}](?:\*\*|__)))\s+""")
_COMMAS = ",，、،"
_QUOTES = dict.fromkeys(map(ord, "‘’‚‛ʼ´′＇"), "'") | dict.fromkeys(map(ord, "“”„‟«»＂"), '"')
_HYPHENS = dict.fromkeys(map(ord, "‐‑"), "-")
_LIST_NUMBER = re.compile(r"^[^\S\n]*\d{1,2}[.)][^\S\n]+", re.MULTILINE)
_BULLET = re.compile(r"^[^\S\n]*[-*•][^\S\n]+\S", re.MULTILINE)
_EMPHASIS = "_*"
# What may follow an ending, and what it may be asked for with; in French a space stands before a mark.
_AROUND_AN_END = f'."!{_EMPHASIS}{string.whitespace}\u00a0\u202f'
_ANSWER = re.compile(r"Answer: \S[^\n]*")
_BLOCK = re.compile(r"```(?:json)?(.*)```", re.IGNORECASE | re.DOTALL)  # the common way to give code
_LETTER = r"[\p{L}\p{N}\p{M}]"  # or a digit, or a sign upon one, as are vowels of Indic scripts
_ANY_CASE = regex.IGNORECASE | regex.FULLCASE  # which finds ß in SS, as "Grüße" in capital letters has it
_APART = (f"(?<!{_LETTER}_*)", f"(?!_*{_LETTER})")  # _so_ is in italics, and so_on one name


def words_of(text: str) -> list[str]:
    """The words of a text: what stands between spaces and has a letter or a digit."""
    return [word for word in text.split() if any(map(str.isalnum, word))]


def sentences_of(text: str) -> list[str]:
    """The sentences of a text: each ends with . ! ? or that of Hindi, Urdu or Arabic before a space, the last one
    possibly with nothing. The number of a list's entry is none."""
    return [sentence for sentence in _AFTER_A_SENTENCE.split(_LIST_NUMBER.sub("", text)) if words_of(sentence)]


def _whole(word: str) -> str:
    """A pattern of a word that is no part of a longer one; also of one that begins or ends with a sign, as #python, and
    of several, with any white space between them."""
    ends = zip(_APART, (word[0], word[-1]), strict=True)
    before, after = (edge if regex.match(_LETTER, end) else "" for edge, end in ends)
    inside = r"\s+".join(regex.escape(part, special_only=True) for part in word.split())
    return f"{before}{inside}{after}"


def _occurrences(text: str, word: str) -> int:
    return len(regex.findall(_whole(word), text, _ANY_CASE))


def _begins(text: str, word: str) -> bool:
    return regex.match(rf"[{_EMPHASIS}]*{_whole(word)}", text, _ANY_CASE) is not None


def _ends(text: str, word: str) -> bool:
    """Whether a text ends with a word. What may follow an ending does not matter, unless that is what is asked for."""
    bare = word.rstrip(_AROUND_AN_END)
    if not bare:
        return text.endswith(word)
    return regex.search(rf"{_whole(bare)}\Z", text.rstrip(_AROUND_AN_END), _ANY_CASE) is not None


def _json_object(text: str) -> Any:
    block = _BLOCK.fullmatch(text)
    inside = block[1].strip() if block else text
    try:
        value = json.loads(inside, parse_constant=_refused, object_pairs_hook=object_without_repetition)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


@dataclass(frozen=True)
class Rule:
    """One kind of rule.

    Args:
        ask: how a prompt asks for it, `{number}` and `{words}` (quoted, with `between` between them) filled in.
        keeps: whether a response, without space around it, keeps it; given the text, the number and the words.
        takes: which of "number" and "words" it needs.
        about: what it is about: two rules about the same may contradict each other.
        one_text: whether its words are one text alone.
        between: its words, where they are asked for.
        reads_quotes: whether quotation marks are given to it as they stand, not as straight ones.
    """

    ask: str
    keeps: Callable[[str, int, Sequence[str]], bool]
    takes: tuple[str, ...] = ()
    about: str = ""
    one_text: bool = False
    between: str = " and "
    reads_quotes: bool = False


RULES: dict[str, Rule] = {
    # As IFEval has it, by str.islower: a text without a letter that has a case keeps neither.
    "lower_case": Rule("Use no capital letters.", lambda text, n, w: text.islower(), about="case"),
    "upper_case": Rule("Use capital letters only.", lambda text, n, w: text.isupper(), about="case"),
    "no_comma": Rule("Do not use any commas.", lambda text, n, w: not set(text) & set(_COMMAS), about="commas"),
    "at_most_words": Rule(
        "Use at most {number} words.", lambda text, n, w: len(words_of(text)) <= n, ("number",), "length"
    ),
    "at_least_words": Rule(
        "Use at least {number} words.", lambda text, n, w: len(words_of(text)) >= n, ("number",), "length"
    ),
    "sentences": Rule(
        "Write exactly {number} sentence(s).", lambda text, n, w: len(sentences_of(text)) == n, ("number",), "sentences"
    ),
    "begins_with": Rule(
        "Begin your response with {words}.",
        lambda text, n, w: _begins(text, w[0]),
        ("words",),
        "begin",
        one_text=True,
    ),
    "ends_with": Rule(
        "End your response with {words}.",
        lambda text, n, w: _ends(text, w[0]),
        ("words",),
        "end",
        one_text=True,
    ),
    "contains": Rule(
        "Use the word {words} at least {number} time(s).",
        lambda text, n, w: all(_occurrences(text, word) >= n for word in w),
        ("number", "words"),
        "words",
    ),
    "mentions": Rule(
        "Mention {words}.",
        lambda text, n, w: any(_occurrences(text, word) for word in w),
        ("words",),
        "topic",
        between=" or ",
    ),
    "avoids": Rule(
        "Do not use the word {words}.",
        lambda text, n, w: not any(_occurrences(text, word) for word in w),
        ("words",),
        "avoided",
    ),
    "bullets": Rule(
        "Write exactly {number} bullet points that begin with *.",
        lambda text, n, w: len(_BULLET.findall(text)) == n,
        ("number",),
        "form",
    ),
    "quoted": Rule(
        "Put your whole response in double quotation marks.",
        lambda text, n, w: len(text) > 2 and text[0] == text[-1] == '"',
        about="form",
    ),
    "answer_line": Rule(
        'Respond in one line of the form "Answer: ...".',
        lambda text, n, w: _ANSWER.fullmatch(text) is not None,
        about="form",
    ),
    "json_keys": Rule(
        "Respond with a JSON object with the keys {words} and nothing else.",
        lambda text, n, w: sorted(map(_plain, _json_object(text) or ())) == sorted(set(w)),
        ("words",),
        "form",
        reads_quotes=True,  # of which JSON has one kind, and others stand within its texts
    ),
}


def instruction(asked: Mapping[str, Any]) -> str:
    """The sentence that asks for a rule.

    >>> instruction({"rule": "contains", "words": ["salt"], "number": 2})
    'Use the word "salt" at least 2 times.'
    """
    number, rule = asked.get("number"), RULES[asked["rule"]]
    text = rule.ask.replace("(s)", "" if number == 1 else "s")
    return text.format(number=number, words=rule.between.join(f'"{word}"' for word in asked.get("words") or ()))


def keeps(asked: Mapping[str, Any], response: str) -> bool:
    """Whether a response keeps a rule that `check_rules` has passed; one without a word keeps none.

    A thought is no part of the response: what stands before its end, and after a beginning that has none.
    """
    rule, words = RULES[asked["rule"]], [_plain(word) for word in asked.get("words") or ()]
    said = response.rpartition("</think>")[2].partition("<think>")[0]
    text = _seen(said) if rule.reads_quotes else _plain(said)
    return bool(words_of(text)) and rule.keeps(text, asked.get("number") or 0, words)


def _plain(text: str) -> str:
    """A text in one of the forms in which it looks the same: composed letters, straight apostrophes and quotation
    marks, one hyphen, no signs that nobody sees, such as what chooses the form of an emoji."""
    return _seen(text).translate(_QUOTES | _HYPHENS)


def _seen(text: str) -> str:
    seen = (sign for sign in text if unicodedata.category(sign) != "Cf" and not "\ufe00" <= sign <= "\ufe0f")
    return unicodedata.normalize("NFC", "".join(seen)).strip()


def share_kept(rules: Sequence[Mapping[str, Any]], response: str) -> float:
    """The share of the rules that a response keeps; 0 where it does not keep one that is `required`.

    Those that are required are no part of the share, unless there are no others.
    """
    if not all(keeps(asked, response) for asked in rules if asked.get("required")):
        return 0.0
    counted = [keeps(asked, response) for asked in rules if not asked.get("required")]
    return sum(counted) / len(counted) if counted else 1.0


def check_rules(value: Any, where: str) -> None:
    """Raises: DataError, which begins with `where`: it is no list of rules, or one lacks what its kind needs."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"{where}: a list of rules is needed, got {value!r}.", remedy=_EXAMPLE)
    for asked in value:
        name = asked.get("rule") if isinstance(asked, Mapping) else None
        if not isinstance(name, str) or name not in RULES:
            raise DataError(f"{where}: {asked!r} names no rule.", remedy=f"The rules are {', '.join(RULES)}.")
        given = {key for key, item in asked.items() if item is not None} - {"rule", "required"}
        if given != set(RULES[name].takes):
            takes = " and ".join(RULES[name].takes) or "nothing else"
            raise DataError(f"{where}: the rule {name} takes {takes}, got {asked!r}.", remedy=_EXAMPLE)
        if not isinstance(asked.get("required") or False, bool):
            raise DataError(f"{where}: required is true or false, got {asked['required']!r}.")
        number, words = asked.get("number", 1), asked.get("words", ["-"])
        if "number" in given and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise DataError(f"{where}: the rule {name} needs a whole number from 1, got {number!r}.")
        texts = isinstance(words, Sequence) and not isinstance(words, str) and len(words) > 0
        if "words" in given and not (texts and all(isinstance(word, str) and _plain(word) for word in words)):
            raise DataError(f"{where}: the rule {name} needs a list of words, got {words!r}.", remedy=_EXAMPLE)
        if "words" in given and RULES[name].one_text and len(words) > 1:
            raise DataError(f"{where}: the rule {name} takes one text, got {words!r}.", remedy="Join them to one text.")


_EXAMPLE = 'Write them as [{"rule": "contains", "words": ["salt"], "number": 2}, {"rule": "no_comma"}].'
