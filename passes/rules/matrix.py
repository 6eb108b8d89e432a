"""Matrix products: the spec follows from an einsum string.

``mk,kn->mn``: ``m`` and ``n`` are local, and ``k``, which the output lacks, is added over. Where
the op also adds a bias or base (``addmm``), a sum over chunks of ``k`` would add it once per
chunk, so ``k`` is ``whole`` unless the base is known to be zero.
"""

from __future__ import annotations

import torch

from .arguments import overloads
from .letters import Letters, align_right, letters_in, shape_of
from .registry import register_rule
from .sizes import same_size
from .spec import Call, Dims, Letter, Size, Spec

aten = torch.ops.aten

_PRODUCTS = {
    "mm": "mk,kn->mn",
    "bmm": "bmk,bkn->bmn",
    "mv": "mk,k->m",
    "dot": "k,k->",
    "vdot": "k,k->",
    "outer": "m,n->mn",
    "ger": "m,n->mn",
}
# The first argument is added to the product of the other two, and broadcasts to it.
_PRODUCTS_ONTO_BASE = {
    "addmm": "mk,kn->mn",
    "baddbmm": "bmk,bkn->bmn",
    "addmv": "mk,k->m",
    "addr": "m,n->mn",
    "addbmm": "bmk,bkn->mn",
}

# Left out: matmul, einsum, linear, tensordot (decomposed before rules are asked); _int_mm,
# _scaled_mm (their scales have layouts of their own); grouped_mm (its offsets count rows of the
# whole, so a chunk of rows needs other offsets); linalg_* (they mix both matrix dims);
# convolution (it mixes neighbours along the sequence, which needs a halo, not a chunk).


def einsum_spec(equation: str, call: Call) -> Spec | None:
    """The spec of ``einsum(equation, *call.tensors)``.

    Returns ``None`` where two dims that share a letter are not provably of one size.
    """
    return _spec(equation, call, call.tensors)


def _spec(
    equation: str, call: Call, operands: tuple[torch.Tensor, ...], base: torch.Tensor | None = None
) -> Spec | None:
    left, right = equation.split("->")
    terms = left.split(",")
    sizes: dict[str, Size] = {}
    for term, tensor in zip(terms, operands, strict=True):
        for letter, size in zip(term, tensor.shape, strict=True):
            if letter in sizes and not same_size(sizes[letter], size):
                return None
            sizes[letter] = size
    letters = Letters()
    named: dict[str, tuple[Letter, ...]] = {
        letter: letters.one(letter, size) for letter, size in sizes.items()
    }
    inputs: list[Dims] = [tuple(named[letter] for letter in term) for term in terms]
    output: Dims = tuple(named[letter] for letter in right)
    contracted = letters_in(*inputs) - letters_in(output)
    is_sum = True
    if base is not None:
        aligned = align_right(shape_of(base), tuple(sizes[letter] for letter in right), output)
        if aligned is None:
            return None
        inputs.insert(0, aligned)
        is_sum = call.constant.get(0) == 0
    return Spec(
        inputs=tuple(inputs),
        outputs=(output,),
        sizes=letters.sizes,
        whole=frozenset() if is_sum else contracted,
        sums=contracted if is_sum else frozenset(),
    )


def _register(name: str, equation: str, *, onto_base: bool) -> None:
    def rule(call: Call) -> Spec | None:
        if onto_base:
            return _spec(equation, call, call.tensors[1:], base=call.tensors[0])
        return _spec(equation, call, call.tensors)

    register_rule(*overloads(aten, name))(rule)


for _name, _equation in _PRODUCTS.items():
    _register(_name, _equation, onto_base=False)
for _name, _equation in _PRODUCTS_ONTO_BASE.items():
    _register(_name, _equation, onto_base=True)
