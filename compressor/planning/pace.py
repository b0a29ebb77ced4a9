"""How fast a model decodes beside a draft."""

PASS = 1.1  # a pass of several tokens, as a part of a step of one


def times_as_fast(share: float, drafts: int, cost: float) -> float:
    """Tokens a second over those of the model alone: each draft is accepted with probability `share`
    (below 1), if those before it were. cost: of a draft, as a part of a step of the model."""
    return (1 - share ** (drafts + 1)) / (1 - share) / (PASS + cost * drafts) if drafts else 1.0
