"""From counts at a few batch sizes and lengths to a closed form, checked where it has not been.

The points that determine a form are never those that it is checked with, and nothing but an exact
fit is accepted: all counts are whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction

from coati_perf.flops.counter import OperatorCounter
from coati_perf.flops.visibility import Visibility
from coati_perf.flops.work import Chunked, Work

Point = tuple[int, int]
"""Batch size and length."""
Measure = Callable[[int, int], OperatorCounter]
Term = Callable[[int, int], int]

# A straight line goes through the first two. The third has another batch size, and a length that
# is no multiple of any chunk and above most, so that nearly all that is no line shows.
_POINTS: tuple[Point, ...] = ((1, 128), (1, 384), (2, 613))
# Come in where the line does not hold.
_MORE_POINTS: tuple[Point, ...] = ((1, 1100), (2, 200), (1, 700), (1, 901), (1, 256))
_CHUNK_SIZES = (64, 128, 256, 512, 32, 16)


class UnfittedError(Exception):
    """The FLOP of an operator follow no form that is known here; ``args[0]`` is its name."""


def fit_pass(measure: Measure, chunk_sizes: Iterable[int] = ()) -> Work:
    """Return the closed form of passes over sequences, exact at every point traced.

    ``measure`` counts a pass over a batch of a size and length. ``chunk_sizes`` are further sizes
    to which the model may round a length up.

    Raises:
        UnfittedError: no form holds at the unseen points.
    """
    return _fit_all(measure, _MORE_POINTS, _forms((*chunk_sizes, *_CHUNK_SIZES)))


def fit_step(measure: Measure) -> Work:
    """Return the closed form of a decode step over the length of the cache, which is a line.

    Raises:
        UnfittedError: it is none at the unseen point.
    """
    return _fit_all(measure, _MORE_POINTS[1:2], [_LINE | _PER_CALL])


def _fit_all(measure: Measure, more_points: Iterable[Point], forms: Iterable[Form]) -> Work:
    """Fit a line to each operator, or one of ``forms`` with the counts at ``more_points``.

    torch multiplies the same matrices by another operator at another batch size: the last token's
    logits by ``bmm`` for one sequence, by ``mm`` for more. So where an operator fits nothing, the
    sum of all that are no line is tried.
    """
    counts = {point: measure(*point) for point in _POINTS}
    lines = {name: _fit(_LINE, _series(counts, name)) for name in _operators(counts)}
    curved = [name for name, line in lines.items() if line is None]
    curves: list[Work | None] = []
    if curved:
        counts |= {point: measure(*point) for point in more_points}
        forms = [_LINE, *forms]
        curves = [_first_fit(forms, _series(counts, name)) for name in curved]
    if None in curves:
        unfitted = [name for name, work in zip(curved, curves, strict=True) if work is None]
        curves = [_first_fit(forms, _series(counts, *curved))]
        if None in curves:
            raise UnfittedError(", ".join(unfitted))
    works = [work for work in (*lines.values(), *curves) if work is not None]
    return _sum([*works, Work(pairs=_attention(counts))])


Form = dict[str, Term]
"""The terms of a closed form, by what they are called in ``_work``."""


def _one(batch: int, length: int) -> int:
    return 1


def _sequences(batch: int, length: int) -> int:
    return batch


def _tokens(batch: int, length: int) -> int:
    return batch * length


def _squares(batch: int, length: int) -> int:
    return batch * length**2


def _length(batch: int, length: int) -> int:
    return length


_PER_CALL: Form = {"per_call": _one}
_PER_CALL_AND_LENGTH: Form = {**_PER_CALL, "per_call_token": _length}
_LINE: Form = {"constant": _sequences, "per_token": _tokens}


def _forms(chunk_sizes: Iterable[int]) -> Iterator[Form]:
    """Yield the forms to try, the simplest first.

    A square is attention that is not known as such, and causal. Work per call does not grow with
    the batch: merging adapters into weights, or the angles of a rotary embedding.
    """
    once: tuple[Form, ...] = ({}, _PER_CALL, _PER_CALL_AND_LENGTH)
    yield from (_LINE | more for more in once[1:])
    curves: list[Form] = [
        {"per_pair": _squares},
        *(_chunk(size) for size in dict.fromkeys(chunk_sizes)),
    ]
    yield from (_LINE | curve | more for more in once for curve in curves)


def _chunk(size: int) -> Form:
    def padded(batch: int, length: int) -> int:
        return batch * -(-length // size) * size

    def padded_square(batch: int, length: int) -> int:
        return batch * (-(-length // size) * size) ** 2

    return {f"chunk {size}": padded, f"chunk² {size}": padded_square}


def _operators(counts: Mapping[Point, OperatorCounter]) -> list[str]:
    return list(dict.fromkeys(name for count in counts.values() for name in count.by_operator))


def _series(counts: Mapping[Point, OperatorCounter], *names: str) -> dict[Point, int]:
    return {
        point: sum(count.by_operator.get(name, 0) for name in names)
        for point, count in counts.items()
    }


def _first_fit(forms: Iterable[Form], series: Mapping[Point, int]) -> Work | None:
    fits = (_fit(form, series) for form in forms)
    return next((work for work in fits if work is not None), None)


def _fit(form: Form, series: Mapping[Point, int]) -> Work | None:
    solution = solve(list(form.values()), series)
    if solution is None:
        return None
    found = {name: float(value) for name, value in zip(form, solution, strict=True)}
    per_call, per_call_token = found.get("per_call", 0.0), found.get("per_call_token", 0.0)
    if min(per_call, per_call_token) < 0:
        return None  # no work is negative: what grows faster than the batch looks like this
    sizes = [int(name.removeprefix("chunk ")) for name in found if name.startswith("chunk ")]
    per_pair = found.get("per_pair")
    return Work(
        constant=found["constant"],
        per_token=found["per_token"],
        per_call=per_call,
        per_call_token=per_call_token,
        chunks=tuple(
            Chunked(size, found[f"chunk {size}"], found[f"chunk² {size}"]) for size in sizes
        ),
        pairs=() if per_pair is None else ((Visibility(), per_pair),),
    )


def solve(terms: Sequence[Term], series: Mapping[Point, int]) -> list[Fraction] | None:
    """Return the coefficients of ``terms`` whose sum is ``series`` exactly, or None.

    As many points as there are terms determine them, and each further one, at least one, must be
    met.
    """
    unknowns = len(terms)
    rows = [
        [Fraction(term(*point)) for term in terms] + [Fraction(count)]
        for point, count in series.items()
    ]
    assert len(rows) > unknowns, "a point must be left to check with"
    for column in range(unknowns):
        pivot = next((row for row in range(column, len(rows)) if rows[row][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(len(rows)):
            if row != column and rows[row][column]:
                factor = rows[row][column] / rows[column][column]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[column], strict=True)]
    if any(row[-1] for row in rows[unknowns:]):
        return None
    return [rows[i][-1] / rows[i][i] for i in range(unknowns)]


def _attention(counts: Mapping[Point, OperatorCounter]) -> tuple[tuple[Visibility, float], ...]:
    """Return the FLOP per pair of query and key of one sequence, the same at every point."""
    per_pair = [
        {visibility: flop / batch for visibility, flop in count.attention.items()}
        for (batch, _), count in counts.items()
    ]
    if any(other != per_pair[0] for other in per_pair):
        message = "attention"
        raise UnfittedError(message)
    return tuple(per_pair[0].items())


def _sum(works: Iterable[Work]) -> Work:
    """Add up closed forms, term by term."""
    constant = per_token = per_call = per_call_token = 0.0
    chunks: dict[int, Chunked] = {}
    pairs: dict[Visibility, float] = {}
    for work in works:
        constant += work.constant
        per_token += work.per_token
        per_call += work.per_call
        per_call_token += work.per_call_token
        for chunk in work.chunks:
            known = chunks.get(chunk.size, Chunked(chunk.size, 0.0))
            chunks[chunk.size] = Chunked(
                chunk.size,
                known.per_token + chunk.per_token,
                known.per_square + chunk.per_square,
            )
        for visibility, per_pair in work.pairs:
            pairs[visibility] = pairs.get(visibility, 0.0) + per_pair
    return Work(
        constant=constant,
        per_token=per_token,
        per_call=per_call,
        per_call_token=per_call_token,
        chunks=tuple(chunks.values()),
        pairs=tuple(pairs.items()),
    )
