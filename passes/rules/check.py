"""The consistency of a `Spec` with its `Call`: what every rule must hold to."""

from __future__ import annotations

from .letters import letters_in, shape_of
from .sizes import product, same_size
from .spec import Call, Dims, Size, Spec


def check_spec(call: Call, spec: Spec) -> None:
    """Check that ``spec`` describes ``call``.

    Raises:
        ValueError: the message names the op and what is inconsistent: another number of tensors
            or dims, letters whose sizes do not multiply to a dim's size, a letter without a size
            or twice in one tensor, a local letter that an output lacks, a letter of the inputs
            alone that is neither whole nor summed, or one that is both.
    """

    def fail(what: str) -> None:
        raise ValueError(f"the rule of {call.target} is inconsistent: {what}")

    if len(spec.inputs) != len(call.tensors):
        fail(f"{len(spec.inputs)} inputs for {len(call.tensors)} tensors")
    if len(spec.outputs) != len(call.outputs):
        fail(f"{len(spec.outputs)} outputs for {len(call.outputs)}")
    for index, (dims, tensor) in enumerate(zip(spec.inputs, call.tensors, strict=True)):
        _check_dims(call, spec, f"input {index}", dims, shape_of(tensor))
    for index, (dims_or_none, output) in enumerate(zip(spec.outputs, call.outputs, strict=True)):
        if (dims_or_none is None) != (output is None):
            fail(f"output {index} is a tensor in one of call and spec alone")
        if dims_or_none is not None and output is not None:
            _check_dims(call, spec, f"output {index}", dims_or_none, shape_of(output))

    inputs, outputs = letters_in(*spec.inputs), letters_in(*spec.outputs)
    unknown = (spec.whole | spec.sums) - inputs - outputs
    if unknown:
        fail(f"letters {sorted(unknown)} are in no tensor")
    if spec.whole & spec.sums:
        fail(f"letters {sorted(spec.whole & spec.sums)} are both whole and summed")
    if spec.sums & outputs:
        fail(f"letters {sorted(spec.sums & outputs)} are summed but in an output")
    undeclared = inputs - outputs - spec.whole - spec.sums
    if undeclared:
        fail(f"letters {sorted(undeclared)} are in inputs alone, and neither whole nor summed")
    for letter in spec.local_letters():
        if any(dims is not None and letter not in letters_in(dims) for dims in spec.outputs):
            fail(f"letter {letter!r} is local, but one of the outputs lacks it")


def _check_dims(call: Call, spec: Spec, name: str, dims: Dims, shape: tuple[Size, ...]) -> None:
    where = f"the rule of {call.target} is inconsistent: {name} of shape {shape}"
    if len(dims) != len(shape):
        raise ValueError(f"{where} has {len(dims)} dims in the spec")
    flat = [letter for letters in dims for letter in letters]
    missing = [letter for letter in flat if letter not in spec.sizes]
    if missing:
        raise ValueError(f"{where} has letters without a size: {missing}")
    if len(set(flat)) != len(flat):
        raise ValueError(f"{where} has a letter twice: {dims}")
    for dim, (letters, size) in enumerate(zip(dims, shape, strict=True)):
        if not same_size(product(spec.sizes[letter] for letter in letters), size):
            sizes = {letter: spec.sizes[letter] for letter in letters}
            raise ValueError(f"{where} has letters {sizes} in dim {dim}")
