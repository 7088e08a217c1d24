"""Small bugs that people typically make. Each has a correct module, an edit that breaks the module, and tests that detect
the edit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """One task.

    Attributes:
        name: name of the module and of the task.
        difficulty: ``easy``, ``medium`` or ``hard``.
        report: bug report of a user.
        right: source of the correct module.
        edit: text in the correct source, and the faulty code that replaces this text.
        tests: bodies of test methods of a ``unittest.TestCase``, by name; the test file imports the module's names.
    """

    name: str
    difficulty: str
    report: str
    right: str
    edit: tuple[str, str]
    tests: dict[str, str]

    @property
    def wrong(self) -> str:
        """Return the source of the module with its bug."""
        assert self.right.count(self.edit[0]) == 1, self.name
        return self.right.replace(*self.edit)


BUGS = [
    Bug(
        name="average",
        difficulty="easy",
        report="mean() raises ZeroDivisionError for an empty list; it should give 0.0.",
        right="def mean(values):\n    if not values:\n        return 0.0\n    return sum(values) / len(values)\n",
        edit=("    if not values:\n        return 0.0\n", ""),
        tests={"numbers": "self.assertEqual(mean([1, 2, 6]), 3.0)", "empty": "self.assertEqual(mean([]), 0.0)"},
    ),
    Bug(
        name="primes",
        difficulty="easy",
        report="is_prime() says that 25 and 49 are primes.",
        right=(
            "def is_prime(n):\n    if n < 2:\n        return False\n    d = 2\n    while d * d <= n:\n"
            "        if n % d == 0:\n            return False\n        d += 1\n    return True\n"
        ),
        edit=("d * d <= n", "d * d < n"),
        tests={
            "squares": "self.assertFalse(any(map(is_prime, (4, 9, 25, 49))))",
            "primes": "self.assertTrue(all(map(is_prime, (2, 3, 5, 7, 97))))",
            "below_two": "self.assertFalse(is_prime(1) or is_prime(0) or is_prime(-7))",
        },
    ),
    Bug(
        name="history",
        difficulty="easy",
        report="Entries of one call of record() show up in the next one, though no list was passed.",
        right=(
            "def record(entry, log=None):\n    log = [] if log is None else log\n    log.append(entry)\n    return log\n"
        ),
        edit=("log=None):\n    log = [] if log is None else log\n", "log=[]):\n"),
        tests={
            "fresh": "record('a'); self.assertEqual(record('b'), ['b'])",
            "given": "log = ['a']; self.assertIs(record('b', log), log); self.assertEqual(log, ['a', 'b'])",
        },
    ),
    Bug(
        name="leap",
        difficulty="easy",
        report="is_leap(2000) is False, and it was a leap year.",
        right="def is_leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n",
        edit=("(year % 100 != 0 or year % 400 == 0)", "year % 100 != 0"),
        tests={
            "fourth": "self.assertTrue(is_leap(2024) and not is_leap(2023))",
            "century": "self.assertFalse(is_leap(1900) or is_leap(2100))",
            "fourth_century": "self.assertTrue(is_leap(2000) and is_leap(2400))",
        },
    ),
    Bug(
        name="search",
        difficulty="medium",
        report="find() never sees the last element of a sorted list.",
        right=(
            "def find(items, wanted):\n    low, high = 0, len(items)\n    while low < high:\n"
            "        middle = (low + high) // 2\n        if items[middle] == wanted:\n            return middle\n"
            "        if items[middle] < wanted:\n            low = middle + 1\n        else:\n"
            "            high = middle\n    return -1\n"
        ),
        edit=("low, high = 0, len(items)", "low, high = 0, len(items) - 1"),
        tests={
            "last": "self.assertEqual(find([1, 3, 5, 7], 7), 3)",
            "only": "self.assertEqual(find([4], 4), 0)",
            "others": "self.assertEqual([find([1, 3, 5, 7], n) for n in (1, 3, 5)], [0, 1, 2])",
            "absent": "self.assertEqual((find([1, 3], 2), find([], 1)), (-1, -1))",
        },
    ),
    Bug(
        name="chunks",
        difficulty="easy",
        report="chunks() loses the last, shorter piece.",
        right="def chunks(items, size):\n    return [items[i : i + size] for i in range(0, len(items), size)]\n",
        edit=("range(0, len(items), size)", "range(0, len(items) - size + 1, size)"),
        tests={
            "even": "self.assertEqual(chunks([1, 2, 3, 4], 2), [[1, 2], [3, 4]])",
            "rest": "self.assertEqual(chunks('abcde', 2), ['ab', 'cd', 'e'])",
            "short": "self.assertEqual(chunks([1], 3), [[1]])",
        },
    ),
    Bug(
        name="flatten",
        difficulty="medium",
        report="flatten() takes texts apart into characters, or never ends on them.",
        right=(
            "def flatten(items):\n    flat = []\n    for item in items:\n        if isinstance(item, (list, tuple)):\n"
            "            flat.extend(flatten(item))\n        else:\n            flat.append(item)\n    return flat\n"
        ),
        edit=("isinstance(item, (list, tuple))", "hasattr(item, '__iter__')"),
        tests={
            "deep": "self.assertEqual(flatten([1, [2, (3, [4])], []]), [1, 2, 3, 4])",
            "texts": "self.assertEqual(flatten(['ab', ['c']]), ['ab', 'c'])",
        },
    ),
    Bug(
        name="shop",
        difficulty="medium",
        report="Half off 0.05 is shown as 0.02; half a cent should be rounded up, to 0.03.",
        right=(
            "from decimal import ROUND_HALF_UP, Decimal\n\n\ndef total(prices, percent):\n"
            "    amount = sum((Decimal(price) for price in prices), Decimal(0))\n"
            "    amount = amount * (100 - percent) / 100\n"
            "    return str(amount.quantize(Decimal('0.01'), ROUND_HALF_UP))\n"
        ),
        edit=(
            "    amount = sum((Decimal(price) for price in prices), Decimal(0))\n"
            "    amount = amount * (100 - percent) / 100\n",
            "    amount = sum(int(float(price) * (100 - percent)) for price in prices)\n"
            "    amount = Decimal(amount) / 100\n",
        ),
        tests={
            "discount": "self.assertEqual(total(['19.99', '19.99'], 10), '35.98')",
            "half": "self.assertEqual(total(['0.05'], 50), '0.03')",
            "none": "self.assertEqual(total([], 10), '0.00')",
        },
    ),
    Bug(
        name="words",
        difficulty="easy",
        report="count_words() counts 'The' and 'the' as two words, and 'end.' with its full stop.",
        right=(
            'import re\n\n\ndef count_words(text):\n    counts = {}\n    for word in re.findall(r"[a-z\']+", text.lower()):\n'
            "        counts[word] = counts.get(word, 0) + 1\n    return counts\n"
        ),
        edit=('re.findall(r"[a-z\']+", text.lower())', "text.split()"),
        tests={
            "case": "self.assertEqual(count_words('The cat and the hat')['the'], 2)",
            "stops": "self.assertEqual(count_words('the end. The end'), {'the': 2, 'end': 2})",
            "empty": "self.assertEqual(count_words(''), {})",
        },
    ),
    Bug(
        name="brackets",
        difficulty="medium",
        report="balanced('(]') and balanced('((') are True.",
        right=(
            "PAIRS = {')': '(', ']': '[', '}': '{'}\n\n\ndef balanced(text):\n    waiting = []\n    for char in text:\n"
            "        if char in PAIRS.values():\n            waiting.append(char)\n        elif char in PAIRS:\n"
            "            if not waiting or waiting.pop() != PAIRS[char]:\n                return False\n"
            "    return not waiting\n"
        ),
        edit=(
            "            if not waiting or waiting.pop() != PAIRS[char]:\n                return False\n"
            "    return not waiting\n",
            "            if not waiting:\n                return False\n            waiting.pop()\n    return True\n",
        ),
        tests={
            "good": "self.assertTrue(all(map(balanced, ('', '()', '[(x)]{}'))))",
            "kinds": "self.assertFalse(balanced('(]'))",
            "open": "self.assertFalse(balanced('(('))",
            "closed": "self.assertFalse(balanced(')('))",
        },
    ),
    Bug(
        name="matrix",
        difficulty="medium",
        report="Setting one cell of zeros(2, 2) sets the whole column.",
        right="def zeros(rows, columns):\n    return [[0] * columns for _ in range(rows)]\n",
        edit=("[[0] * columns for _ in range(rows)]", "[[0] * columns] * rows"),
        tests={
            "shape": "self.assertEqual(zeros(2, 3), [[0, 0, 0], [0, 0, 0]])",
            "apart": "m = zeros(2, 2); m[0][0] = 1; self.assertEqual(m, [[1, 0], [0, 0]])",
        },
    ),
    Bug(
        name="cache",
        difficulty="hard",
        report="The cache throws out what was just read: get() should count as a use.",
        right=(
            "class Cache:\n    def __init__(self, size):\n        self.size = size\n        self.items = {}\n\n"
            "    def get(self, key):\n        if key not in self.items:\n            return None\n"
            "        self.items[key] = self.items.pop(key)\n        return self.items[key]\n\n"
            "    def put(self, key, value):\n        self.items.pop(key, None)\n        self.items[key] = value\n"
            "        if len(self.items) > self.size:\n            del self.items[next(iter(self.items))]\n"
        ),
        edit=("        self.items[key] = self.items.pop(key)\n        return", "        return"),
        tests={
            "keeps": "c = Cache(2); c.put(1, 'a'); c.put(2, 'b'); self.assertEqual((c.get(1), c.get(2)), ('a', 'b'))",
            "oldest": "c = Cache(1); c.put(1, 'a'); c.put(2, 'b'); self.assertIsNone(c.get(1))",
            "used": "c = Cache(2); c.put(1, 'a'); c.put(2, 'b'); c.get(1); c.put(3, 'c'); "
            "self.assertEqual((c.get(1), c.get(2)), ('a', None))",
        },
    ),
    Bug(
        name="intervals",
        difficulty="hard",
        report="merge() cuts a long interval short when a small one lies inside it: [[1, 9], [2, 3]] gives [[1, 3]].",
        right=(
            "def merge(intervals):\n    merged = []\n    for start, end in sorted(intervals):\n"
            "        if merged and start <= merged[-1][1]:\n            merged[-1][1] = max(merged[-1][1], end)\n"
            "        else:\n            merged.append([start, end])\n    return merged\n"
        ),
        edit=("max(merged[-1][1], end)", "end"),
        tests={
            "inside": "self.assertEqual(merge([[1, 9], [2, 3]]), [[1, 9]])",
            "overlap": "self.assertEqual(merge([[2, 4], [1, 3], [6, 7]]), [[1, 4], [6, 7]])",
            "empty": "self.assertEqual(merge([]), [])",
        },
    ),
    Bug(
        name="roman",
        difficulty="hard",
        report="to_roman(4) is IIII, and 9, 40, 90, 400 and 900 are as long.",
        right=(
            "NUMERALS = [\n    (1000, 'M'), (900, 'CM'), (500, 'D'), (400, 'CD'), (100, 'C'), (90, 'XC'),\n"
            "    (50, 'L'), (40, 'XL'), (10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV'), (1, 'I'),\n]\n\n\n"
            "def to_roman(n):\n    text = ''\n    for value, numeral in NUMERALS:\n        text += n // value * numeral\n"
            "        n %= value\n    return text\n"
        ),
        edit=(
            "    (1000, 'M'), (900, 'CM'), (500, 'D'), (400, 'CD'), (100, 'C'), (90, 'XC'),\n"
            "    (50, 'L'), (40, 'XL'), (10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV'), (1, 'I'),\n",
            "    (1000, 'M'), (500, 'D'), (100, 'C'), (50, 'L'), (10, 'X'), (5, 'V'), (1, 'I'),\n",
        ),
        tests={
            "sums": "self.assertEqual([to_roman(n) for n in (3, 8, 2026)], ['III', 'VIII', 'MMXXVI'])",
            "fours": "self.assertEqual([to_roman(n) for n in (4, 40, 444)], ['IV', 'XL', 'CDXLIV'])",
            "nines": "self.assertEqual([to_roman(n) for n in (9, 1999)], ['IX', 'MCMXCIX'])",
        },
    ),
    Bug(
        name="version",
        difficulty="medium",
        report="newest() prefers 1.9 to 1.10.",
        right=(
            "def newest(versions):\n    return max(versions, key=lambda text: [int(part) for part in text.split('.')])\n"
        ),
        edit=("key=lambda text: [int(part) for part in text.split('.')]", "key=str"),
        tests={
            "tens": "self.assertEqual(newest(['1.9', '1.10', '1.2']), '1.10')",
            "longer": "self.assertEqual(newest(['2.0', '2.0.1', '1.9']), '2.0.1')",
        },
    ),
    Bug(
        name="stack",
        difficulty="easy",
        report="undo() gives back the oldest change and not the latest.",
        right=(
            "class Editor:\n    def __init__(self):\n        self.changes = []\n\n    def do(self, change):\n"
            "        self.changes.append(change)\n\n    def undo(self):\n"
            "        return self.changes.pop() if self.changes else None\n"
        ),
        edit=("self.changes.pop()", "self.changes.pop(0)"),
        tests={
            "latest": "e = Editor(); e.do('a'); e.do('b'); self.assertEqual((e.undo(), e.undo()), ('b', 'a'))",
            "nothing": "self.assertIsNone(Editor().undo())",
        },
    ),
]
