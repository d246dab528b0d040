"""Sums and differences of numbers below 1,000."""

LIMIT = 1000
SUM_QUESTIONS = (
    "What is {a} plus {b}?",
    "What is {a} plus {b}?",
    "What is {a} + {b}?",
    "How much is {a} plus {b}?",
    "How much is {a} + {b}?",
    "Add {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "Calculate {a} + {b}.",
    "{a} plus {b}",
    "{a} + {b}",
    "{a}+{b}",
)
DIFFERENCE_QUESTIONS = (
    "What is {a} minus {b}?",
    "What is {a} minus {b}?",
    "What is {a} - {b}?",
    "How much is {a} minus {b}?",
    "How much is {a} - {b}?",
    "Subtract {b} from {a}.",
    "What is the difference between {a} and {b}?",
    "Calculate {a} - {b}.",
    "{a} minus {b}",
    "{a} - {b}",
    "{a}-{b}",
)
GOODS = "apples books boxes buttons cakes candles coins eggs flowers keys letters nuts pencils shells stamps stones".split()
NAMES = "Ada Ben Clara David Emma Finn Grace Hugo Ivy Jack Lily Max Nora Oscar Ruby Tom".split()


def is_held_out(a: int, b: int) -> bool:
    """One pair in twenty, whatever the order: training sees neither its sum nor its difference."""
    low, high = sorted((a, b))
    return (low * 7919 + high * 104729) % 20 == 0


def operand(rng) -> int:
    """Numbers of one, two and three digits, the long ones more often."""
    kind = rng.random()
    return rng.randrange(10 if kind < 0.06 else 100 if kind < 0.25 else LIMIT)


def worded(rng, a: int, b: int, minus: bool) -> tuple[str, str]:
    """A small tale around the numbers."""
    name, goods = rng.choice(NAMES), rng.choice(GOODS)
    verb, result, sign = ("gives away", a - b, "minus") if minus else ("gets", a + b, "plus")
    more = "" if minus else " more"
    question = f"{name} has {a} {goods} and {verb} {b}{more}. How many {goods} does {name} have?"
    return question, f"{a} {sign} {b} is {result}, so {name} has {result} {goods}."


def sample(rng, held_out: bool = False) -> tuple[str, str, dict]:
    """A question, its answer, and the result as a number."""
    while True:
        a, b = operand(rng), operand(rng)
        if is_held_out(a, b) == held_out:
            break
    minus = rng.random() < 0.5
    if minus:
        a, b = max(a, b), min(a, b)
    result = a - b if minus else a + b
    facts = {"result": result}
    if rng.random() < 0.08:
        return *worded(rng, a, b, minus), facts
    question = rng.choice(DIFFERENCE_QUESTIONS if minus else SUM_QUESTIONS).format(a=a, b=b)
    return question, f"{a} {'minus' if minus else 'plus'} {b} is {result}.", facts
