"""Brute-force searches for drafts that are copied from text: lists of ids, no index."""


def common_suffix(one, other):
    """How many last tokens of two lists are equal."""
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return length


def longest_match(text, places, window):
    """The longest context (at most `window` tokens) that the end of `text` shares with a place, and what is behind the
    places that have it. `places`: (tokens up to the place, tokens behind it), the oldest first."""
    lengths = [min(common_suffix(text, before), window) for before, _ in places]
    best = max(lengths, default=0)
    return best, [behind for length, (_, behind) in zip(lengths, places, strict=True) if length == best and best > 0]


def own_places(text, ahead=40):
    """Each earlier place of a sequence, with `ahead` tokens: behind the end of the text, what follows the place is
    repeated."""
    places = []
    for end in range(1, len(text)):
        behind = text[end:]
        while len(behind) < ahead:
            behind = behind + behind
        places.append((text[:end], behind[:ahead]))
    return places


def places_of(texts, window):
    """Each place of several texts, (context, text), that a token of the text follows."""
    places = []
    for context, text in texts:
        context = context[-window:]
        for end in range(0 if context else 1, len(text)):
            places.append((context + text[:end], text[end:]))
    return places


def most_frequent(behind, most, least):
    """Follow the most frequent token, the latest of equals, among the latest 16 places. Returns tokens and
    probabilities."""
    active, tokens, probabilities, probability = behind[-16:], [], [], 1.0
    while len(tokens) < most:
        active = [rest for rest in active if len(rest) > len(tokens)]
        if not active:
            break
        following = [rest[len(tokens)] for rest in active]
        highest = max(map(following.count, following))
        token = [token for token in following if following.count(token) == highest][-1]
        probability *= highest / len(following)
        if probability < least:
            break
        tokens.append(token)
        probabilities.append(probability)
        active = [rest for rest in active if rest[len(tokens) - 1] == token]
    return tokens, probabilities
