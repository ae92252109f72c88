"""Reads quantities: a number, in digits, LaTeX or words, with a unit of a closed list or a counted noun. Text only."""

import re
from fractions import Fraction

from quartet_reward.math.numerals import NUMBER_WORDS, leading_number
from quartet_reward.math.words import CJK, bare_words

# Units, separated by commas: the canonical name, then others. Names of letters only may have a plural s.
_NAMES_OF_UNITS = """
    m meter metre, km kilometer kilometre, dm decimeter decimetre, cm centimeter centimetre, mm millimeter millimetre,
    µm micrometer micrometre micron, nm nanometer nanometre, in inch inche inches, ft foot feet, yd yard, mi mile,
    s sec second, ms millisecond, min minute, h hr hour, day d, week wk, month, year yr, decade, century,
    g gm gram gramme, kg kilogram kilo, mg milligram, tonne, ton, lb lbs pound, oz ounce,
    l L liter litre, ml mL milliliter millilitre, cl cL centiliter centilitre, cup, gal gallon, qt quart, pt pint,
    acre, ha hectare, degree deg, rad radian, mph, km/h kph kmh kmph, rpm, N newton, kN kilonewton,
    J joule, kJ kilojoule, cal calorie, kcal kilocalorie, eV electronvolt, keV, MeV, GeV,
    W watt, kW kilowatt, MW megawatt, kWh kilowatt-hour, V volt, mV millivolt, kV kilovolt, A amp ampere,
    mA milliampere, C coulomb, F farad, µF microfarad, Ω ohm, kΩ kiloohm kilohm, H henry, T tesla,
    Hz hertz, kHz kilohertz, MHz megahertz, Pa pascal, kPa kilopascal, MPa megapascal, atm atmosphere, bar,
    K kelvin, mol mole, bit, byte, KB kilobyte, MB megabyte, GB gigabyte, percent % pct percentage,
    dollar USD buck, cent ¢, € euro EUR, £ GBP, ¥ yen yuan JPY CNY RMB, ₹ rupee INR,
    am a.m. a.m, pm p.m. p.m, person people, child children, man men, woman women
"""
_UNITS = {name: unit.split()[0] for unit in _NAMES_OF_UNITS.split(",") for name in unit.split()}
# Units and counters that may follow a number without a space.
_CJK_UNITS = {
    "平方厘米": "cm2", "平方米": "m2", "立方米": "m3", "厘米": "cm", "毫米": "mm", "千米": "km",
    "公里": "km", "米": "m", "千克": "kg", "公斤": "kg", "克": "g", "小时": "h", "時間": "h", "分钟": "min",
    "秒": "s", "天": "day", "日": "day", "年": "year", "岁": "year", "元": "¥", "円": "¥", "度": "degree",
    **dict.fromkeys("个個只人名次种条本张つ枚通", ""),
}  # fmt: skip
# Names of units after a number in prose, except "in", which is rarely an inch.
UNIT_WORDS = frozenset(f"{name}{end}" for name in _UNITS if name not in ("%", "in") for end in ("", "s")) | NUMBER_WORDS

# Words that change a number's value, or say where, when or compared with what: none is part of a counted noun.
_NO_NOUN = (
    frozenset(
        re.findall(
            r"\w+",
            """
        is are not but to for if and or where when with than then as at by from in on off of out over under up down per
        plus minus times divided multiplied squared cubed factorial root roots power powers mod modulo remainder
        remainders sum product difference ratio less more fewer greater least most about around approximately almost
        nearly below above before after ago later early late short long lost left right away gone back forward
        north south east west yes no none all each every both half sin cos tan log ln pi sqrt x squares cubes
        each total altogether tens
        sixes sevens eights nines fives fours threes twos ones zeros radicals exponents digits
        """,
        )
    )
    | NUMBER_WORDS
)
# Words after a unit that do not change it: 6 miles away, 7 years old, 12 apples in total.
_QUALIFIED = re.compile(r"(?P<unit>.+) (?:old|away|apart|long|tall|wide|high|deep|thick|altogether|in total)")
_OF = re.compile(r"(?P<unit>[a-z ]+) of (?P<stuff>[a-z]+(?: [a-z]+)?)", re.IGNORECASE)
_LATEX_UNITS = (
    (re.compile(r"\\frac\s*\{\s*\\text\s*\{(\w+)\}\s*\}\s*\{\s*\\text\s*\{(\w+)\}(\^\d)?\s*\}"), r" \1/\2\3"),
    (re.compile(r"\\(?:text|mathrm)\s*\{([^{}]*)\}(?=\s*\^)"), r" \1"),
    (re.compile(r"\\(?:text|mathrm)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\(?:Omega|ohm)(?![a-zA-Z])|Ω|Ω"), " Ω "),
    (re.compile(r"\\mu(?![a-zA-Z])\s*|μ"), "µ"),
    (re.compile(r"\\%"), " percent "),
    (re.compile(r"\^\\circ\s*([CF])(?![a-zA-Z])"), r" degree\1 "),
    (re.compile(r"\^\\circ"), " degree "),
    (re.compile(r"\^\s*\{\s*([23])\s*\}"), r"^\1"),
    (re.compile(r"\s+"), " "),
)
_CURRENCY = re.compile(r"(?P<sign>-?)\s*(?:\\?(?P<dollar>\$)|(?P<other>[€£¥₹₽₩₿]))\s*(?P<sign2>-?)(?P<rest>\s*[\d.].*)")
_RATE = re.compile(r"\s*(?P<number>[\d.,]+)\s*(?:/|\\text\s*\{\s*(?:/|per\b))(?P<unit>.*)")
# The number is anything that ends in a digit, a closing bracket or a constant; a unit follows.
_NUMBER_AND_WORDS = re.compile(
    r"(?P<number>[-+]?\s*(?:[\d.][-+*/\d.,\s^:{}()\\]*|.*[\d})\]]|.*\\pi|[a-zA-Z](?= percent)))?"
    # A single letter is a unit only after a space: 5m may be a product.
    rf"(?:(?<=[\d}})\]])(?=[A-Za-zµ]{{2}}|[%¢€£¥₹Ω{CJK}])|\s|^)\s*(?P<words>[A-Za-zµΩ¢€£¥₹%{CJK}][\w.µΩ'’/^\s-]*)"
)
# Of \sin 30^\circ, the degrees are the argument's.
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_PER = re.compile(r"\s*/\s*|\s+per\s+|\s+an?\s+(?=hour|day|week|month|year|minute|second)")
_EXPONENT = re.compile(r"\^?([23²³])$")
_RESIDUE = re.compile(r"(?P<number>.+?)\s*\(?\\(?:pmod|mod|bmod)\s*\{?\s*(?P<modulus>\w+)\s*\}?\)?", re.DOTALL)
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_BASED = re.compile(
    r"(?P<number>\d[\dA-F]{0,400})\s*(?:_\s*(?:\{\s*(?:\\text\s*\{)?\s*(?:base\s*)?(?P<base>\w+)\s*\}?\s*(?P<late>\d*)\s*\}"
    r"|(?P<digit>\d{1,2}))|\s(?:\\text\s*\{\s*)?\(?base\s+(?P<word>\w+)\)?\s*\}?)",
    re.ASCII,
)


def quantity(text: str) -> tuple[str, str] | None:
    """Return the number and the canonical unit of `5 km`, `\\$5`, `90^\\circ`, `3 dozen eggs`, `52_8`; else None.

    The unit is empty for a number in words alone. Units that are products keep their parts: `m/s`, `dollar/h`, `cm2`.
    """
    if match := _BASED.fullmatch(text):
        base = match["base"] or match["digit"] or match["word"] or ""
        base = match["late"] if base == "base" and match["late"] else base
        return match["number"].lstrip("0") or "0", f"base {_BASES.get(base, base)}"
    if match := _RESIDUE.fullmatch(text):
        return match["number"].strip(), f"mod {match['modulus']}"
    if match := _CURRENCY.fullmatch(text):
        sign = "-" if "-" in (match["sign"], match["sign2"]) else ""
        if (rate := _RATE.fullmatch(match["rest"])) and (unit := unit_of(bare_words(rate["unit"]))):
            return sign + rate["number"], f"{'dollar' if match['dollar'] else match['other']}/{unit}"
        number, unit = _amount(sign + match["rest"].strip()) or (sign + match["rest"].strip(), "")
        currency = "dollar" if match["dollar"] else match["other"]
        return None if "$" in number or unit.partition("/")[0] not in ("", currency) else (
            number, currency + unit.removeprefix(currency)
        )  # fmt: skip
    return _amount(text)


def _amount(text: str) -> tuple[str, str] | None:
    """Return the number and unit of `5 km`, `5\\text{ million dollars}`, `three dozen`, `33\\frac13\\%`; else None."""
    for pattern, spelling in _LATEX_UNITS:
        text = pattern.sub(spelling, text)
    match = _NUMBER_AND_WORDS.fullmatch(text.strip())
    if match is None:
        return None
    number, words = (match["number"] or "").strip(), match["words"].strip()
    digits = number.lstrip("-").replace(",", "") + " " if re.fullmatch(r"-?[\d,]*\.?\d+", number) else ""
    if (digits or not number) and (valued := leading_number(digits + words.lower())):
        value, length = valued[0], valued[1] - len(digits)
        words = words[max(length, 0) :].strip()
        number = _written(-value if number.startswith("-") else value) if length > 0 else number
        if not words:
            return number, ""
    if not number:
        return None
    if number[-1:] not in "0123456789})]." and not number.endswith("\\pi") and words != "percent":
        return None
    unit = unit_of(words, one=number == "1")
    if unit is None or (unit == "degree" and _FUNCTION.search(number)):
        return None
    return number, unit


def _written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def same_unit(answer: str, reference: str) -> bool:
    """Return whether two canonical units are the same.

    The answer may leave out adjectives of a counted noun, and either side what it is of: "cups", "cups of flour".
    """
    (answer, *stuff), (reference, *of) = answer.split(" of "), reference.split(" of ")
    if stuff and of and stuff != of:
        return False
    if answer == reference:
        return True
    noun = answer.startswith("~") and reference.startswith("~")
    return noun and reference.removeprefix("~").split()[-len(answer.split()) :] == answer.removeprefix("~").split()


def unit_of(words: str, one: bool = False) -> str | None:
    """Return the canonical unit of `words`: `m2` for "square meters", "~red apple" for a counted noun; else None.

    A counted noun is a plural, or any noun with `one`; units are those of a closed list.
    """
    words = words.strip().rstrip(".,")
    if words in _CJK_UNITS:
        return _CJK_UNITS[words]
    if qualified := _QUALIFIED.fullmatch(words):
        words = qualified["unit"]
    if (stuff := _OF.fullmatch(words)) and not _NO_NOUN.intersection(stuff["stuff"].lower().split()):
        unit = unit_of(stuff["unit"], one)
        return unit and f"{unit} of {_singular(stuff['stuff'].lower())}"
    parts = [_factor(part) for part in _PER.split(words)]
    if all(parts):
        return "/".join(map(str, parts)).replace("mi/h", "mph")
    named = [word.strip(".,'’").lower() for word in words.split()]
    if not named or len(named) > 4 or not all(word.isalpha() for word in named) or _NO_NOUN.intersection(named):
        return None
    if not one and not _is_plural(named[-1]):
        return None
    return "~" + " ".join([*named[:-1], _singular(named[-1])])


def _factor(text: str) -> str | None:
    """Return the canonical name of one unit, with its exponent: `square meters`, `cm^2`, `degrees Celsius`."""
    words = text.replace("-", " ").split() if "-" in text and text not in _UNITS else text.split()
    exponent, names = "", list[str | None]()
    for word in words:
        lowered = word.rstrip(".").lower()
        if lowered in ("square", "sq", "squared"):
            exponent = "2"
        elif lowered in ("cubic", "cu", "cubed"):
            exponent = "3"
        elif lowered in ("celsius", "fahrenheit", "c", "f") and names == ["degree"]:
            names = [f"degree{lowered[0].upper()}"]
        elif match := _EXPONENT.search(word):
            exponent = {"²": "2", "³": "3"}.get(match[1], match[1])
            names.append(_name(word[: match.start()]))
        else:
            names.append(_name(word))
    return f"{names[0]}{exponent}" if len(names) == 1 and names[0] else None


def _name(word: str) -> str | None:
    if word in ("degreeC", "degreeF"):
        return word
    for form in (word, word.rstrip("."), word.lower().rstrip("."), word.lower().rstrip(".").removesuffix("s")):
        if form in _UNITS and (len(form) > 2 or form in (word, word.rstrip("."))):
            return _UNITS[form]
    return None


def _is_plural(word: str) -> bool:
    return len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is"))


def _singular(word: str) -> str:
    return word.removesuffix("s") if _is_plural(word) else word
