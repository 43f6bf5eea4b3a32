"""Methods that look for peers in a first stage and settle in a second."""


def cut_short(first: int, rounds: int) -> list[str]:
    """What to say of a run that ends before the second stage begins."""
    if first < rounds:
        return []
    return [
        f"method.discover_rounds = {first}, but the run has {rounds} rounds: stage two never begins; "
        f"try {max(1, rounds // 3)}"
    ]
