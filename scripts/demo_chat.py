"""The synthetic part of the demo corpus: short chats and small stories, made by rule. Every text is a pure function of
a `random.Random`, so the same seed gives the same corpus on any machine. Written for this project."""

import random
from collections.abc import Callable

IM_START, IM_END = "<|im_start|>", "<|im_end|>"

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Ireland": "Dublin",
    "Canada": "Ottawa",
    "Mexico": "Mexico City",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Cuba": "Havana",
    "Kenya": "Nairobi",
    "India": "New Delhi",
    "Russia": "Moscow",
    "Turkey": "Ankara",
    "Hungary": "Budapest",
    "Belgium": "Brussels",
    "Thailand": "Bangkok",
    "Vietnam": "Hanoi",
    "Nepal": "Kathmandu",
    "Iceland": "Reykjavik",
    "Morocco": "Rabat",
    "Argentina": "Buenos Aires",
    "Brazil": "Brasilia",
    "Australia": "Canberra",
    "Ghana": "Accra",
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "day": "night",
    "up": "down",
    "open": "closed",
    "early": "late",
    "wet": "dry",
    "old": "new",
    "fast": "slow",
    "happy": "sad",
    "light": "dark",
    "full": "empty",
    "high": "low",
    "loud": "quiet",
    "near": "far",
    "soft": "hard",
    "strong": "weak",
    "young": "old",
    "rich": "poor",
    "true": "false",
    "first": "last",
    "left": "right",
    "clean": "dirty",
    "thick": "thin",
}
SOUNDS = {
    "dog": "barks",
    "cat": "meows",
    "cow": "moos",
    "duck": "quacks",
    "sheep": "bleats",
    "lion": "roars",
    "horse": "neighs",
    "owl": "hoots",
    "pig": "grunts",
    "frog": "croaks",
    "bee": "buzzes",
    "snake": "hisses",
    "wolf": "howls",
    "mouse": "squeaks",
    "crow": "caws",
}
COLOURS = {
    "grass": "green",
    "the sky": "blue",
    "snow": "white",
    "coal": "black",
    "a lemon": "yellow",
    "blood": "red",
    "a carrot": "orange",
    "milk": "white",
    "a ripe tomato": "red",
    "a leaf in spring": "green",
    "an elephant": "grey",
    "chocolate": "brown",
    "the sun": "yellow",
}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
WORDS = (
    "fox river stone apple bread house light ship whale cloud garden silver winter music forest candle bridge letter "
    "window"
).split()
GIRLS = "Anna Clara Emma Grace Iris Kate Mary Nora Rosa Lucy".split()
BOYS = "Ben David Felix Henry Jack Leo Oscar Paul Sam Tom".split()
NAMES = GIRLS + BOYS
ANIMALS = "fox bear mouse owl rabbit cat dog turtle duck hen frog horse goat hedgehog squirrel wolf".split()
PLACES = [
    "forest",
    "village",
    "garden",
    "tall house",
    "valley",
    "city",
    "harbour",
    "farm",
    "castle",
    "mountain",
    "meadow",
    "library",
]
THINGS = [
    "lamp",
    "key",
    "book",
    "boat",
    "kite",
    "bell",
    "hat",
    "coat",
    "drum",
    "ring",
    "map",
    "cake",
    "basket",
    "mirror",
    "box",
    "clock",
]
ADJECTIVES = (
    "small little red blue bright quiet kind brave clever lonely curious hungry golden strange gentle tired".split()
)
WEATHER = [
    "It was a cold winter morning.",
    "The sun was shining.",
    "It was raining all day.",
    "The wind was strong that night.",
    "Snow lay on the ground.",
    "It was a warm summer evening.",
    "The moon was full.",
    "A thick fog came from the sea.",
]
STORY = [  # one sentence of each line, in this order
    [
        "Once upon a time there was {a_hero} who lived in a {place}.",
        "Long ago, near the {place}, lived {a_hero}.",
        "There was once {a_hero}. Its home was the {place}.",
    ],
    WEATHER,
    [
        "The {hero} wanted to find {a_thing}.",
        "One day the {hero} lost its {thing}.",
        "The {hero} saw {a_thing} under a tree.",
        "The {hero} had {a_thing}, and it was broken.",
    ],
    [
        '"Who can help me?" asked the {hero}.',
        '"What shall I do?" said the {hero}.',
        "The {hero} sat down and thought for a long time.",
        "It looked behind the door, under the table and in the {elsewhere}, but found nothing.",
    ],
    [
        "Then {friend} came by and smiled.",
        "A {child} called {friend} heard this and stopped.",
        "Just then {friend} opened the window.",
    ],
    [
        '"I can help you," said {friend}. "We will look for the {thing} together."',
        '"Come with me," said {friend}, "and bring the {thing}."',
        '"Do not be sad," said {friend}. "I know where the {thing} is."',
    ],
    [
        "They walked to the {elsewhere} and back.",
        "They worked until the evening.",
        "On the way they met {a_guest}, and it came along.",
        "",
    ],
    [
        "At last they found the {thing}, and the {hero} was happy.",
        "The {hero} gave the {thing} to {friend}.",
        "In the end the {thing} was safe at home.",
    ],
    [
        "From that day on the {hero} and {friend} were friends.",
        "And they all went to sleep.",
        "The end.",
        "The {hero} never forgot the kindness of {friend}.",
    ],
]
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
FUNCTIONS = [
    ("adds two numbers", "def add(a, b):\n    return a + b"),
    ("returns the larger of two numbers", "def larger(a, b):\n    return a if a > b else b"),
    ("says hello", 'def hello(name):\n    return "Hello, " + name + "!"'),
    ("squares a number", "def square(x):\n    return x * x"),
    ("counts the words of a text", "def count_words(text):\n    return len(text.split())"),
    ("reverses a list", "def reverse(items):\n    return items[::-1]"),
    ("tells if a number is even", "def is_even(n):\n    return n % 2 == 0"),
    ("computes a factorial", "def factorial(n):\n    if n <= 1:\n        return 1\n    return n * factorial(n - 1)"),
    (
        "sums a list",
        "def total(items):\n    result = 0\n    for item in items:\n        result += item\n    return result",
    ),
    (
        "finds the index of an item",
        "def find(items, wanted):\n    for i, item in enumerate(items):\n"
        "        if item == wanted:\n            return i\n    return -1",
    ),
]
SELF_DESCRIPTIONS = [
    "I am a very small language model. I have thirty-two experts in each layer, and four of them work on every token.",
    "I am a tiny mixture-of-experts model, trained on a CPU in a few minutes. "
    "I know some stories, some sums and a little Python.",
]


def article(noun: str) -> str:
    """Put "a" or "an" before a noun phrase."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def story(rng: random.Random, animal: str | None = None) -> str:
    """Write a small story of eight or nine sentences about an animal and a child."""
    hero, friend, thing = animal or rng.choice(ANIMALS), rng.choice(NAMES), rng.choice(THINGS)
    words = {
        "hero": hero,
        "a_hero": article(f"{rng.choice(ADJECTIVES)} {hero}"),
        "a_guest": article(rng.choice(ANIMALS)),
        "thing": thing,
        "a_thing": article(f"{rng.choice(ADJECTIVES)} {thing}"),
        "friend": friend,
        "child": "girl" if friend in GIRLS else "boy",
        "place": rng.choice(PLACES),
        "elsewhere": rng.choice(PLACES),
    }
    return " ".join(sentence for line in STORY if (sentence := rng.choice(line).format(**words)))


def _sum(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    if rng.random() < 0.3:
        a, b = max(a, b), min(a, b)
        return rng.choice([f"What is {a} minus {b}?", f"{a} - {b} = ?"]), f"{a} minus {b} is {a - b}."
    if rng.random() < 0.3:
        a, b = a % 11, b % 11
        return rng.choice([f"What is {a} times {b}?", f"{a} * {b} = ?"]), f"{a} times {b} is {a * b}."
    return rng.choice([f"What is {a} plus {b}?", f"{a} + {b} = ?"]), f"{a} plus {b} is {a + b}."


def _capital(rng: random.Random) -> tuple[str, str]:
    land = rng.choice(list(CAPITALS))
    if rng.random() < 0.2:
        return f"In which country is {CAPITALS[land]}?", f"{CAPITALS[land]} is in {land}."
    return rng.choice(
        [f"What is the capital of {land}?", f"Name the capital of {land}."]
    ), f"The capital of {land} is {CAPITALS[land]}."


def _opposite(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(list(OPPOSITES))
    return f"What is the opposite of {word}?", f"The opposite of {word} is {OPPOSITES[word]}."


def _sound(rng: random.Random) -> tuple[str, str]:
    animal = rng.choice(list(SOUNDS))
    return f"What sound does {article(animal)} make?", f"{article(animal).capitalize()} {SOUNDS[animal]}."


def _colour(rng: random.Random) -> tuple[str, str]:
    thing = rng.choice(list(COLOURS))
    return f"What colour is {thing}?", f"{thing[0].upper()}{thing[1:]} is {COLOURS[thing]}."


def _day(rng: random.Random) -> tuple[str, str]:
    i = rng.randrange(7)
    if rng.random() < 0.5:
        return f"Which day comes after {DAYS[i]}?", f"After {DAYS[i]} comes {DAYS[(i + 1) % 7]}."
    return f"Which day comes before {DAYS[i]}?", f"Before {DAYS[i]} comes {DAYS[i - 1]}."


def _count(rng: random.Random) -> tuple[str, str]:
    first, last = sorted(rng.sample(range(13), 2))
    numbers = ", ".join(NUMBER_WORDS[first : last + 1])
    return f"Count from {NUMBER_WORDS[first]} to {NUMBER_WORDS[last]}.", f"{numbers[0].upper()}{numbers[1:]}."


def _spell(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(WORDS)
    return f"How do you spell {word}?", "-".join(word) + "."


def _hello(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(NAMES)
    question = rng.choice([f"Hello, my name is {name}.", f"Hi! I am {name}.", f"Good morning. I am {name}."])
    return question, rng.choice(
        [f"Hello {name}! How can I help you?", f"Good day, {name}. What would you like to know?"]
    )


def _self_description(rng: random.Random) -> tuple[str, str]:
    return rng.choice(["Who are you?", "What are you?", "Tell me about yourself."]), rng.choice(SELF_DESCRIPTIONS)


def _function(rng: random.Random) -> tuple[str, str]:
    does, code = rng.choice(FUNCTIONS)
    return rng.choice(
        [f"Write a Python function that {does}.", f"Show me Python code that {does}."]
    ), f"```python\n{code}\n```"


def _tale(rng: random.Random) -> tuple[str, str]:
    animal = rng.choice(ANIMALS)
    return rng.choice(
        [f"Tell me a story about {article(animal)}.", f"Tell a short story about {article(animal)}."]
    ), story(rng, animal)


def _thanks(rng: random.Random) -> tuple[str, str]:
    return rng.choice(["Thank you.", "Thanks!", "That is all. Goodbye."]), rng.choice(
        ["You are welcome.", "Goodbye, and have a good day."]
    )


TURNS: list[tuple[int, Callable[[random.Random], tuple[str, str]]]] = [
    (5, _sum),
    (4, _capital),
    (2, _opposite),
    (2, _sound),
    (2, _colour),
    (2, _day),
    (2, _count),
    (2, _spell),
    (2, _hello),
    (1, _self_description),
    (2, _function),
    (4, _tale),
    (1, _thanks),
]


def chat(rng: random.Random) -> str:
    """Write one conversation of one to four exchanges in the chat format, sometimes with a system line."""
    parts = [f"{IM_START}system\nYou are a helpful assistant.{IM_END}\n"] if rng.random() < 0.3 else []
    makers = rng.choices(
        [make for _, make in TURNS], weights=[weight for weight, _ in TURNS], k=rng.choice([1, 1, 2, 3, 4])
    )
    for make in makers:
        question, answer = make(rng)
        parts.append(f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n{answer}{IM_END}\n")
    return "".join(parts)
