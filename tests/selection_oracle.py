"""Selection policies as sentences: one position at a time, with Python lists."""

from __future__ import annotations

from foretell.sparse.policies import protection


def by_score(scores, taken: set[int], count: int) -> list[int]:
    free = [n for n in range(len(scores)) if n not in taken]
    return sorted(free, key=lambda n: -scores[n])[:count]


def protected(length: int, budget: int) -> set[int]:
    sinks, window = protection(budget)
    return {*range(sinks), *range(length - window, length)}


def streaming(length, budget):
    sinks, _ = protection(budget)
    return {*range(sinks), *range(length - (budget - sinks), length)}


def h2o(length, budget, received):
    kept = protected(length, budget)
    kept |= set(range(length - max(budget // 2, protection(budget)[1]), length))
    return kept | set(by_score(received, kept, budget - len(kept)))


def snapkv(length, budget, prompt, mass):
    kept = protected(length, budget)
    room = budget - len(kept)
    free = [n for n in range(prompt) if n not in kept]
    generated = [n for n in range(prompt, length) if n not in kept][::-1]
    first = generated[: max(room // 2, room - len(free))]
    padded = [0.0, 0.0, *mass, 0.0, 0.0]
    pooled = [sum(padded[n : n + 5]) / 5 for n in range(prompt)]
    kept |= set(first)
    rest = sorted((n for n in free), key=lambda n: -pooled[n])[: budget - len(kept)]
    return kept | set(rest), pooled


def quest(length, budget, pages):
    kept = protected(length, budget)
    for page in sorted(range(len(pages)), key=lambda p: -pages[p]):
        for n in range(16 * page, min(16 * page + 16, length)):
            if len(kept) < budget:
                kept.add(n)
    return kept


def dustin(length, budget, lookahead, history, share):
    kept = protected(length, budget)
    room = budget - len(kept)
    first = by_score(lookahead, kept, round(share * room)) if lookahead is not None else []
    second = by_score(history, kept | set(first), room - len(first))
    return kept, first, second
