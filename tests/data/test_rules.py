import pytest

from toolkit.data.rules import RULES, check_rules, instruction, keeps, sentences_of, share_kept, words_of
from toolkit.errors import DataError
from toolkit.time_limit import time_limit

# rule, number, words, responses that keep it, responses that do not
CASES = [
    ("lower_case", None, None, ["all small, 3 words", "größe"], ["One capital", "ÄRGER", "42", "我喜欢"]),
    ("upper_case", None, None, ["ALL LARGE, 3 WORDS", "GRÖSSE"], ["One small", "SMALLl", "42", "我喜欢"]),
    ("no_comma", None, None, ["one. two", "a; b"], ["one, two", "1,000", "面包，盐", "أ، ب"]),
    ("at_most_words", 3, None, ["one two three", "one - two - three", "a"], ["one two three four"]),
    ("at_least_words", 3, None, ["one two three", "a b c d"], ["one two", "one - two", "- - -"]),
    (
        "sentences",
        2,
        None,
        [
            "One. Two!",
            "It is 3.5 m. So what?",
            "One. Two",
            "Really?! Yes...",
            "**Bold.** Next one.",
            "_So._ Yes",
            "(One.) Two.",
            "یہ ایک ہے۔ یہ دو ہے۔",
            "ما هذا؟ هذا كتاب.",
        ],
        ["One.", "A. B. C.", "यह एक है। यह दो है। यह तीन है।"],
    ),
    (
        "begins_with",
        None,
        ["In short"],
        ["In short, no.", "in short yes", "**In short**", "_In short_, no"],
        ["Well, in short", "In", "In shorts"],
    ),
    ("begins_with", None, ["Straße"], ["STRASSE 7", "straße"], ["Straßen"]),
    ("begins_with", None, [" #1 "], ["#1: no", "#1"], ["#12", "1"]),
    (
        "ends_with",
        None,
        ["Thank you"],
        ["So. Thank you", "Thank you.", 'No. THANK YOU!"', "_Thank you._", "He: “Thank you.”"],
        ["Thank you all", "thanks"],
    ),
    ("ends_with", None, ["you "], ["It is you.", "YOU"], ["a bayou"]),
    ("ends_with", None, ["Merci"], ["Voilà. Merci !", "Merci\u00a0!"], ["Merci bien"]),
    ("ends_with", None, ["Merci !"], ["Merci!", "Merci\u202f!", "merci"], ["Merci bien"]),
    ("ends_with", None, ["!"], ["Yes!"], ["Yes", "Yes."]),
    ("ends_with", None, ["Viele Grüße"], ["ALLES GUT. VIELE GRÜSSE", "Viele Grüsse!"], ["Viele Grüße an alle"]),
    ("ends_with", None, ['"Amen"'], ['So. "Amen"', '"amen."'], ["Amen", "so amen"]),
    ("contains", 2, ["salt"], ["Salt is salt.", "salt, SALT, salt"], ["salt", "salty salts", "salt_a __salt"]),
    ("contains", 2, ["salt"], ["_Salt_ is __salt__.", "salt-free *salt*"], ["_salt_", "salt_1 salt"]),
    ("contains", 1, ["a b", "c"], ["a b or c", "c, a b", "c a  b"], ["a b", "c ab"]),
    ("contains", 1, ["#salt"], ["a #salt", "#Salt."], ["salt", "#salty"]),
    (
        "mentions",
        None,
        ["shoes", "shoe"],
        ["Shoes!", "a shoe"],
        ["should", "snowshoes", "sho es", "dead_shoe", "shoe_box"],
    ),
    ("mentions", None, ["कम"], ["यह कम है।", "कम"], ["यह कमी है।", "हकम"]),
    (
        "avoids",
        None,
        ["the"],
        ["then theory", "no"],
        ["The end", "in the end", "the", "t\u200bhe", "_the_ end", "__The__"],
    ),
    (
        "avoids",
        None,
        ["don't"],
        ["do"],
        ["I don't", *(f"I don{sign}t" for sign in "\u2019\u00b4\u2032\uff07\u201b\u201a")],
    ),
    ("avoids", None, ["Straße"], ["die Straßen"], ["DIE STRASSE", "Straße"]),
    ("mentions", None, ["⚠\ufe0f"], ["⚠\ufe0fHot", "⚠ Hot"], ["Hot"]),
    (
        "mentions",
        None,
        ["salt"],
        ["<think>Pepper?</think>Salt.", "Pepper?</think> salt"],
        ["<think>salt", "Salt?</think>No."],
    ),
    ("avoids", None, ["caf\u00e9"], ["cafe"], ["a caf\u00e9", "a cafe\u0301", "a cafe\u200b\u0301"]),
    (
        "bullets",
        2,
        None,
        ["* a\n* b", "Two:\n - a\n\n • b"],
        ["* a", "* a * b", "* a\n* b\n* c", "*a\n*b", "* a\n*\n\nb"],
    ),
    (
        "quoted",
        None,
        None,
        ['"Yes."', ' "a b" ', "“Yes.”", "„Ja.“", "« Oui. »", "\uff02Yes\uff02", "‟Yes”"],
        ['"Yes', 'Yes "quoted"', '"', "'Yes'"],
    ),
    (
        "answer_line",
        None,
        None,
        ["Answer: 7", " Answer: it is so. Yes."],
        ["answer: 7", "Answer:", "Answer: a\nb", "7"],
    ),
    (
        "json_keys",
        None,
        ["a", "b"],
        [
            '{"b": 1, "a": [2]}',
            '{"a": "“x”", "b": "„ja“"}',
            '```json\n{"a": 1, "b": {}}\n```',
            '```JSON\n{"a": 1, "b": 2}\n```',
            'So.\n</think>\n\n{"a": 1, "b": 2}',
        ],
        [
            '{"a": 1}',
            '{"a": 1, "b": 2, "c": 3}',
            '["a", "b"]',
            '{"a": 1, "b": 2} so',
            "{a: 1, b: 2}",
            "[" * 9999,
            '{"a": 1, "b": NaN}',
            '{"a": 1, "a": 1, "b": 2}',
            '{"a": 1, "a ": 1, "b": 2}',
            '<think>{"a": 1, "b": 2}',
            '```json\n{"a": 1, "b": 2}',
            '{"a": 1, "b": 2}\n```',
        ],
    ),
]


@pytest.mark.parametrize(("rule", "number", "words", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_what_keeps_a_rule_and_what_does_not(rule, number, words, good, bad):
    asked = {"rule": rule, "number": number, "words": words}
    check_rules([asked], "here")
    assert {text: keeps(asked, text) for text in good + bad} == dict.fromkeys(good, True) | dict.fromkeys(bad, False)


def test_every_rule_has_a_case_and_nothing_said_keeps_none():
    assert {case[0] for case in CASES} == set(RULES)
    for rule, number, words, _, _ in CASES:
        for text in ("", "  ", "...", "-"):
            assert not keeps({"rule": rule, "number": number, "words": words}, text)


@pytest.mark.parametrize("rule", RULES)
def test_no_response_holds_a_rule_up(rule):
    asked = {"rule": rule, "number": 2, "words": ["a"]}
    with time_limit():
        for text in ("```" + " " * 20_000 + "x", "* " * 10_000, '"' + "." * 20_000, "_" * 20_000 + "b"):
            keeps(asked, text)


def test_words_and_sentences_of_a_text():
    assert words_of("Well - it's 3.5 m, isn't it ?") == ["Well", "it's", "3.5", "m,", "isn't", "it"]
    assert len(sentences_of('"One." Two... Three?! And 4.5')) == 4
    assert sentences_of("1. Bread is warm.\n2) Yeast makes it rise. It costs 3.\n  3. 4 bake it.") == [
        *("Bread is warm.", "Yeast makes it rise.", "It costs 3.", "4 bake it.")
    ]


@pytest.mark.parametrize("space", ["\n", "  ", "\u00a0", " \n\t"])
def test_texts_of_several_words_are_found_whatever_is_between_them(space):
    assert not keeps({"rule": "avoids", "words": ["as an AI"]}, f"I, as{space}an AI, think")
    assert keeps({"rule": "mentions", "words": ["New York"]}, f"In New{space}York")
    assert keeps({"rule": "begins_with", "words": ["My answer"]}, f"my{space}answer is so")
    assert keeps({"rule": "ends_with", "words": ["Good luck"]}, f"So good{space}luck.")
    assert keeps({"rule": "avoids", "words": ["as an AI"]}, "as anAI")
    assert not keeps({"rule": "avoids", "words": ["e-mail"]}, "an e\u2011mail")


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"rule": "sentences", "number": 1}, "Write exactly 1 sentence."),
        ({"rule": "sentences", "number": 3, "words": None}, "Write exactly 3 sentences."),
        (
            {"rule": "json_keys", "words": ["a", "b"]},
            'Respond with a JSON object with the keys "a" and "b" and nothing else.',
        ),
        ({"rule": "no_comma"}, "Do not use any commas."),
        ({"rule": "mentions", "words": ["shoes", "shoe"]}, 'Mention "shoes" or "shoe".'),
    ],
)
def test_how_a_rule_is_asked_for(asked, text):
    assert instruction(asked) == text


def test_what_is_required_is_a_condition_and_no_part_of_the_share():
    words, comma, small = (
        {"rule": "at_least_words", "number": 2, "required": True},
        {"rule": "no_comma"},
        {"rule": "lower_case"},
    )
    check_rules([words, comma | {"required": None}], "here")
    texts = ("one two", "One two", "One, two", "one")
    assert [share_kept([words, comma, small], text) for text in texts] == [1.0, 0.5, 0.0, 0.0]
    assert [share_kept([comma, small], text) for text in texts] == [1.0, 0.5, 0.0, 1.0]
    assert [share_kept([words], text) for text in texts] == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("no_comma", "here: a list of rules is needed"),
        ([{"rule": "no_commas"}], "names no rule. The rules are lower_case"),
        (["no_comma"], "names no rule"),
        ([{"rule": ["no_comma"]}], "names no rule"),
        ([{"rule": "at_most_words"}], "the rule at_most_words takes number, got"),
        ([{"rule": "no_comma", "number": 2}], "the rule no_comma takes nothing else"),
        ([{"rule": "at_most_words", "number": 0}], "a whole number from 1, got 0"),
        ([{"rule": "at_most_words", "number": True}], "a whole number from 1, got True"),
        ([{"rule": "avoids", "words": "the"}], "needs a list of words, got 'the'"),
        ([{"rule": "avoids", "words": []}], "needs a list of words"),
        ([{"rule": "avoids", "words": [" "]}], "needs a list of words"),
        ([{"rule": "avoids", "words": ["\u200b"]}], "needs a list of words"),
        ([{"rule": "no_comma", "required": 1}], "required is true or false, got 1"),
        ([{"rule": "avoids", "words": ["the"], "n": 1}], "the rule avoids takes words, got"),
        ([{"rule": "ends_with", "words": ["a", "b"]}], "the rule ends_with takes one text, got ['a', 'b']"),
    ],
)
def test_what_is_no_rule_is_said(rules, said):
    with pytest.raises(DataError) as caught:
        check_rules(rules, "here")
    assert said in str(caught.value)
