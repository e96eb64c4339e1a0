"""A classifier of one's own: which share of a text's characters are letters and blanks."""


def score(text: str) -> float:
    """Between 0 and 1; documents below the recipe's ``least`` are dropped."""
    return sum(letter.isalpha() or letter.isspace() for letter in text) / len(text)
