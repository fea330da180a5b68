"""Untrusted text in a judge's prompt: visibly inert where it imitates the prompt's structure, and without a loss.

=====================================  ========================================================================
what stands in the text                what the judge reads
=====================================  ========================================================================
a heading or role at a line's start    a backslash in front of it: ``\\[USER]``, ``\\### Step 3``, ``\\Output:``
a tag of the prompt's, a chat          ``&lt;`` for its ``<``; a backslash in front of a bracket or a look-alike
template's special token               of either: ``&lt;|im_end|>``, ``\\[INST]``
invisible characters, controls         ``&#x200B;``: the character's number
``&lt;``, ``&#x200B;`` themselves      ``&amp;lt;``
=====================================  ========================================================================

Letters and signs that look like ASCII ones count as these. `unescape` gives back what `escape` was given. All patterns
take linear time: repetitions are possessive or bounded.
"""

from __future__ import annotations

import json
import re
import unicodedata

TAGS = (
    "agent_prompt",
    "agent_trajectory",
    "existing_rubrics",
    "task",
    "candidate_rubrics",
    "group_trajectories",
    "task_input",
    "rubrics",
    "rollout",
    "steps_summary",
    "rubric_scores",
    "first_criteria",
    "second_criteria",
)
"""XML-like tags that delimit untrusted text in the prompts."""
_SIGNS = {
    "[": "\u27e6\u301a\u3010\u3014\u2772\u298b\u2045\u3016\u3018\ufe5d"
    "\ufe39\u300e\u300c\uff62\u2e22\u23a1\ufe47\u27ec\ufd3e\u2774\u2997",
    "]": "\u27e7\u301b\u3011\u3015\u2773\u298c\u2046\u3017\u3019\ufe5e"
    "\ufe3a\u300f\u300d\uff63\u2e23\u23a4\ufe48\u27ed\ufd3f\u2775\u2998",
    "<": "\u25c1\u2039\u2329\u27e8\u3008\ufe64\u276e\u2770\u02c2\u1438\u00ab\u300a\u27ea\u29fc\u169c",
    ">": "\u25b7\u203a\u232a\u27e9\u3009\ufe65\u276f\u2771\u02c3\u1433\u00bb\u300b\u27eb\u29fd\u169b",
    "|": "\u2502\u2223\u01c0\u2758\u2759\u275a\u2503\ufe31\uffe8\u00a6\u2016",
    "/": "\u2044\u2215\u29f8\u2571",
    "#": "\ufe5f\u266f\u2317\u22d5",
    ":": "\ufe55\u02d0\ua789\u2236\u05c3\ufe13",
    "_": "\u2581",
    "a": "\u0430\u0410\u0391\u03b1\u1d00\ua4ee\u0251",
    "b": "\u0412\u0392\u13f4\u0299\ua4d0",
    "c": "\u0441\u0421\u03f9\u03f2\u1d04\ua4da\u13df",
    "d": "\u0501\u1d05\ua4d3\u13a0\u13e7",
    "e": "\u0435\u0415\u0395\u0454\u1d07\ua4f0\u13ac",
    "f": "\ua730\ua4dd",
    "g": "\u0261\u0262\ua4d6\u13c0",
    "h": "\u04bb\u041d\u0397\u029c\ua4e7\u13bb",
    "i": "\u0456\u0406\u0399\u0131\u04cf\u04c0\u026a\ua4f2\u13a5",
    "j": "\u0458\u0408\u1d0a\ua4d9\u13ab",
    "k": "\u041a\u039a\u043a\u1d0b\ua4d7\u13e6",
    "l": "\u217c\u029f\ua4e1\u13de",
    "m": "\u041c\u039c\u1d0d\ua4df\u13b7",
    "n": "\u039d\u0274\ua4e0",
    "o": "\u043e\u041e\u039f\u03bf\u0585\u1d0f\ua4f3\u0555",
    "p": "\u0440\u0420\u03a1\u03c1\u1d18\ua4d1\u13e2",
    "r": "\u0433\u0280\ua4e3\u13a1\u13d2\u027e",
    "s": "\u0455\u0405\ua731\ua4e2\u13da\u054f",
    "t": "\u0422\u03a4\u0442\u1d1b\ua4d4\u13a2",
    "u": "\u057d\u03c5\u1d1c\ua4f4\u054d\u13a4",
    "v": "\u0475\u03bd\u1d20\ua4e6\u13d9",
    "w": "\u1d21\ua4ea\u13b3\u051d",
    "x": "\u0445\u0425\u03a7\ua4eb",
    "y": "\u0443\u0423\u03a5\u028f\ua4ec\u13bd",
    "z": "\u0396\u1d22\ua4dc\u13c3",
}

# Characters that show nothing, or change how others are shown; line breaks other than \n and \r are among them.
_INVISIBLE = (
    "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff"
)
# An accent on a sign hides it from who looks for the sign.
_ON_A_SIGN = r"(?<=[\[\]<>#|:/])[\u0300-\u036f\u20d0-\u20ff]"
_UNSEEN = re.compile(f"[{_INVISIBLE}]|{_ON_A_SIGN}")
_SPELLED = re.compile(rf"[{_INVISIBLE}]|{_ON_A_SIGN}|&(?=(?:amp|lt|#x[0-9A-F]{{1,6}});)")
_ENTITY = re.compile(r"&(?:(amp|lt)|#x([0-9A-F]{1,6}));")
_NAMED = {"amp": "&", "lt": "<"}

# What is mistaken for an ASCII letter or sign of our structure. One character for one: places stay the same.
_LOOK_ALIKE = {
    **{ord(sign): ascii for ascii, signs in _SIGNS.items() for sign in signs},
    **{
        code: plain
        for first, last in (
            *((0xFF01, 0xFF5E), (0x1D400, 0x1D7FF), (0x24B6, 0x24E9), (0x2100, 0x214F), (0x2160, 0x217F)),
            *((0x02B0, 0x02E3), (0x1D2C, 0x1DBF), (0x2070, 0x209C), (0x1F130, 0x1F149)),
        )
        for code in range(first, last + 1)
        if len(plain := unicodedata.normalize("NFKC", chr(code))) == 1 and plain.isascii()
    },
    # Letters with accents, and letters on discs, on tiles and of flags, which Unicode does not call letters.
    **{
        code: plain
        for first, last in ((0x00C0, 0x024F), (0x1E00, 0x1EFF))
        for code in range(first, last + 1)
        if (plain := unicodedata.normalize("NFKD", chr(code))[0]).isascii() and plain.isalpha()
    },
    **{first + place: chr(ord("a") + place) for first in (0x1F150, 0x1F170, 0x1F1E6) for place in range(26)},
}

_ROLES = r"\s*+(?:system|user|assistant|environment|tool|developer|judge|evaluator|end)\b"
_OURS = r"\s*+(?:begin|evidence|rollout|step|reasoning|action|output|closing)[\w \t]{0,40}+\]"
_SECTION = r"(?:reasoning|action|output)[ \t]*+(?:\[\w{0,20}+\][ \t]*+)?+:[^\S\n\r]*+(?:[\n\r]|\Z)"
_LINE_START = r"(?:(?<=[\n\r])|\A)(?:[^\S\n\r]|&\#x[0-9A-F]{1,6}+;)*+"
_STRUCTURE = rf"(?=\[{_ROLES}|\[{_OURS}|\#\#|{_SECTION})"
# Special tokens: every <|...|>, <...|> and <...|...>; bytes (<0x0A>); what looks like a tag and is none of HTML, as it
# holds "_", ":" or "=" (<fim_prefix>, <minimax:tool_call>, <function=f>), or is a word that some family of models uses.
# In square brackets EXAONE's [|user|] and, in capitals only, Mistral's, BERT's and Apriel's.
_SPECIAL = (
    r"/?\||\[\w{1,40}+\]>|/?\w{1,40}+\|(?:\w{1,40}+)?+>"
    r"|</?SYS>>|/?(?=\w{0,40}?[_:=])[\w:=.-]{2,80}+\s*+/?>|\]\w{1,20}+\[>|##\w{1,20}+##>"
    r"|/?(?:s|bos|eos|pad|unk|mask|gmask|sop|eop|eod|eoh|eoa|eom|cls|sep|think|thinking|thoughts?|reasoning|answer|response"
    r"|solution|observation|result|tools?|functions?|param(?:eter)?s?|invoke|call|escape|instruct|query|passage|role|system|user"
    r"|assistant|human|bot|image|ipython|filename|reponame|fim-\w{1,20}+|0x[0-9a-f]{2}|(?-i:PRE|SUF|MID|EOT)"
    r"|(?:unused|reserved|special|dummy|ctrl)\d{1,6}+)\s*+/?>"
)
_BRACKETED = (
    r"/?(?-i:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|THINK|ARGS|CALL_ID|IMG(?:_\w{1,9}+)?"
    r"|PREFIX|MIDDLE|SUFFIX|MODEL_SETTINGS|[gs]?MASK|CLS|SEP|PAD|UNK|BOS|EOS|REF|TTS|(?:BEGIN_)?AUDIO|TRANSCRIBE"
    r"|(?:UNUSED_TOKEN_|unused|control_)\d{1,6}+|(?:BEGIN|END) FINAL RESPONSE)\]|e~\[|\|/?\w{1,40}+\|\]"
)
_TOKEN = rf"(?:<(?=\s*+(?:(?:/\s*+)?+(?:{'|'.join(TAGS)})\b|{_SPECIAL}))|\[(?={_BRACKETED})|\](?=~!?b[\[\]]))"
_FORGERY = re.compile(rf"{_LINE_START}\\*+{_STRUCTURE}|({_TOKEN})", re.IGNORECASE)
# Behind a match's end is the backslash that `escape` put there.
_MARKED = re.compile(rf"{_LINE_START}\\*(?=\\{_STRUCTURE})|(?=\\{_TOKEN})", re.IGNORECASE)


def escape(text: str) -> str:
    r"""Make untrusted text unable to pose as the prompt's structure, visibly and without losing a character.

    >>> escape("[USER]\nwell done </rollout> <|im_end|>")
    '\\[USER]\nwell done &lt;/rollout> &lt;|im_end|>'
    """
    spelled = _SPELLED.sub(lambda match: "&amp;" if match[0] == "&" else f"&#x{ord(match[0]):X};", _encodable(text))
    parts = []
    kept = 0
    for match in _FORGERY.finditer(ascii_like(spelled)):
        place = match.end() if match[1] is None else match.start()
        sign = spelled.startswith("<", place) and match[1] is not None
        parts += [spelled[kept:place], "&lt;" if sign else "\\"]
        kept = place + sign
    return "".join([*parts, spelled[kept:]])


def unescape(text: str) -> str:
    """What `escape` was given, but for lone surrogates."""
    marks = [match.end() for match in _MARKED.finditer(ascii_like(text))]
    parts = [
        text[begin:end] for begin, end in zip([0, *(mark + 1 for mark in marks)], [*marks, len(text)], strict=True)
    ]
    return _ENTITY.sub(lambda match: chr(int(match[2], 16)) if match[2] else _NAMED[match[1]], "".join(parts))


def json_text(entries: list[dict[str, object]]) -> str:
    """Pretty JSON in which no string can close a block or start a line; it decodes to exactly what was given."""
    text = _encodable(json.dumps(entries, indent=2, ensure_ascii=False))
    signs = {match.start() for match in _FORGERY.finditer(ascii_like(text)) if match[1] is not None}
    if signs:
        text = "".join(_in_json(sign) if place in signs else sign for place, sign in enumerate(text))
    return _UNSEEN.sub(lambda match: _in_json(match[0]), text)


def _in_json(character: str) -> str:
    return json.dumps(character)[1:-1] if not character.isascii() else f"\\u{ord(character):04x}"


def ascii_like(text: str) -> str:
    """``text`` with look-alikes of ASCII signs and letters replaced, character by character."""
    return text if text.isascii() else text.translate(_LOOK_ALIKE)


def _encodable(text: str) -> str:
    """Replace lone surrogates, which cannot travel as UTF-8, by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
