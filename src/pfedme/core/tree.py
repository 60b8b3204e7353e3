"""Points of ℝᵈ stored as layers, and dataclasses whose floats can change without recompilation."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from pfedme.core.spec import Part, field_types

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[T]) -> type[T]:
    """A frozen dataclass that JAX can trace: its floats and nested records are data, the rest is static.

    Two records that differ only in floats share one compiled program.

    >>> @record
    ... class Step:
    ...     eta: float = 0.1
    ...     R: int = 20
    >>> jax.tree.leaves(Step())
    [0.1]
    """
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    data = [name for name, kind in field_types(cls).items() if _is_float(kind)]
    meta = [name for name in field_types(cls) if name not in data]
    keys = [jax.tree_util.GetAttrKey(name) for name in data]

    def flatten(it: T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(it, name) for name in data), tuple(getattr(it, name) for name in meta)

    def flatten_with_keys(it: T) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children, static = flatten(it)
        return list(zip(keys, children, strict=True)), static

    def unflatten(static: tuple[Any, ...], children: Iterable[Any]) -> T:
        return cls(**dict(zip(meta, static, strict=True)), **dict(zip(data, children, strict=True)))

    # Not `register_dataclass`: JAX (0.10) takes dataclasses of different types with as many fields for equal,
    # and would now and then run the compiled program of one algorithm for another.
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def _is_float(kind: Any) -> bool:
    """Whether a field's type is float, possibly annotated or optional (None is then static), or a `Part`,
    which may contain floats."""
    part = isinstance(kind, type) and issubclass(kind, Part)
    return kind is float or part or any(_is_float(k) for k in typing.get_args(kind))


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Params:
    """A point of ℝᵈ, stored as the model's layers, with the arithmetic of a vector.

    Algorithms write `w - eta * lam * (w - theta)` and never see a layer; models never see a flat vector.

    >>> w = Params([jnp.ones((2, 3)), jnp.zeros(3)])
    >>> float((2 * w - w) @ w)
    6.0
    """

    tree: Any

    __array_ufunc__ = None  # so that NumPy scalars leave `scalar * w` to us

    def map(self, f: Callable[..., jax.Array], *others: Params) -> Params:
        """f applied to each layer, together with the same layer of `others`."""
        return Params(jax.tree.map(f, self.tree, *(o.tree for o in others)))

    def __add__(self, other: Params) -> Params:
        return self.map(jnp.add, other)

    def __sub__(self, other: Params) -> Params:
        return self.map(jnp.subtract, other)

    def __mul__(self, scalar: jax.typing.ArrayLike) -> Params:
        return self.map(lambda leaf: scalar * leaf)

    __rmul__ = __mul__

    def __matmul__(self, other: Params) -> jax.Array:
        """The inner product ⟨self, other⟩."""
        return sum(jax.tree.leaves(self.map(lambda a, b: jnp.sum(a * b), other).tree), jnp.zeros(()))

    def __getitem__(self, index: Any) -> Params:
        """The point (or points) at `index` of a stack of points."""
        return self.map(lambda leaf: leaf[index])

    @property
    def layers(self) -> Layers:
        """Parts of the point: `w.layers[:-1]` is w without its last layer, `w.layers[-1:]` that layer alone.

        Layers that are left out take no part in arithmetic, and `|` joins two parts.

        >>> w = Params([jnp.ones(2), jnp.zeros(3)])
        >>> body, head = w.layers[:-1], w.layers[-1:]
        >>> (2 * body | head).tree
        [Array([2., 2.], dtype=float32), Array([0., 0., 0.], dtype=float32)]
        """
        return Layers(self)

    def __or__(self, other: Params) -> Params:
        """This point, with its missing layers taken from `other`."""

        return self._map_all(lambda a, b: b if a is None else a, other)

    def without(self, part: Params) -> Params:
        """This point without the arrays that `part` has, so that `w.without(part) | part` is w.

        >>> w = Params([(jnp.ones(2), jnp.zeros(3))])
        >>> w.without(Params([(None, jnp.zeros(3))])).tree
        [(Array([1., 1.], dtype=float32), None)]
        """
        return self._map_all(lambda a, b: a if b is None else None, part)

    def _map_all(self, f: Callable[[Any, Any], Any], other: Params) -> Params:
        """f applied to each array of this point, or None where one is missing, and to that of `other`."""
        return Params(jax.tree.map(f, self.tree, other.tree, is_leaf=lambda leaf: leaf is None))

    @property
    def dtype(self) -> Any:
        """The type of the coordinates."""
        return jax.tree.leaves(self.tree)[0].dtype

    def ravel(self, batch_dims: int = 0) -> jax.Array:
        """The coordinates as one vector; for a stack of points (`batch_dims` = 1), one row per point. If the
        layers are NumPy arrays, so is the result."""
        leaves = jax.tree.leaves(self.tree)
        kind: Any = np if all(isinstance(a, np.ndarray) for a in leaves) else jnp
        return kind.concatenate([kind.reshape(a, (*a.shape[:batch_dims], -1)) for a in leaves], axis=-1)

    def like(self, vector: jax.Array | np.ndarray) -> Params:
        """The inverse of `ravel`: `vector`, or each row of a matrix, in the layers of this point."""
        leaves, structure = jax.tree.flatten(self.tree)
        batch, out, at = vector.shape[:-1], [], 0
        for leaf in leaves:
            part = vector[..., at : at + leaf.size]
            out.append(jnp.reshape(part, batch + leaf.shape))
            at += leaf.size
        return Params(jax.tree.unflatten(structure, out))

    def all_finite(self) -> jax.Array:
        """Whether no coordinate is infinite or NaN."""
        return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(self.tree)]))

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        """The layers are the children; there is nothing else."""
        return (self.tree,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> Params:
        """The inverse of `tree_flatten`."""
        return cls(*children)


def leaves(name: str, tree: Any) -> dict[str, np.ndarray]:
    """The arrays of a tree, for a file or a message: `name.0`, `name.1`, ...

    >>> leaves("w", Params([jnp.ones(2)]))
    {'w.0': array([1., 1.], dtype=float32)}
    """
    return {f"{name}.{k}": np.asarray(leaf) for k, leaf in enumerate(jax.tree.leaves(tree))}


def tree_of(name: str, arrays: Mapping[str, np.ndarray], like: T) -> T:
    """The inverse of `leaves`: a tree with the structure of `like`; raises an error if the arrays do not
    fit."""
    known, structure = jax.tree.flatten(like)
    found = [arrays[f"{name}.{k}"] for k in range(len(known))]
    for k, (own, leaf) in enumerate(zip(found, known, strict=True)):
        if own.shape != leaf.shape or own.dtype != leaf.dtype:
            raise ValueError(
                f"{name}.{k} is {own.dtype} of shape {own.shape}, not {leaf.dtype} of {leaf.shape}"
            )
    return jax.tree.unflatten(structure, [jnp.asarray(own) for own in found])


def to_vectors(tree: Any) -> dict[str, np.ndarray]:
    """The numbers of a tree as one vector per dtype, for a message: `w` for float32, `w.int32`, ...

    >>> to_vectors((Params([jnp.ones(2), jnp.zeros(1)]), jnp.int32(7)))
    {'w': array([1., 1., 0.], dtype=float32), 'w.int32': array([7], dtype=int32)}
    """
    found: dict[str, list[np.ndarray]] = {}
    for leaf in map(np.asarray, jax.tree.leaves(tree)):
        found.setdefault(_vector_name(leaf.dtype), []).append(leaf.reshape(-1))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def vector_shapes(like: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of the vectors that `to_vectors` makes of a tree with the structure of `like`."""
    leaves = jax.tree.leaves(like)
    types = {_vector_name(leaf.dtype): leaf.dtype for leaf in leaves}
    return {
        name: jax.ShapeDtypeStruct((sum(leaf.size for leaf in leaves if leaf.dtype == dtype),), dtype)
        for name, dtype in types.items()
    }


def from_vectors(vectors: Mapping[str, np.ndarray], like: T) -> T:
    """The inverse of `to_vectors`, for a tree with the structure of `like`; the shapes must match."""
    leaves, structure = jax.tree.flatten(like)
    at, found = dict.fromkeys(vectors, 0), []
    for leaf in leaves:
        name = _vector_name(leaf.dtype)
        found.append(jnp.asarray(vectors[name][at[name] : at[name] + leaf.size].reshape(leaf.shape)))
        at[name] += leaf.size
    return jax.tree.unflatten(structure, found)


def _vector_name(dtype: Any) -> str:
    return "w" if dtype == np.float32 else f"w.{np.dtype(dtype).name}"


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of a point, which can be sliced: the entries of the model's list of parameters, or of its
    dictionary in key order."""

    point: Params

    def __len__(self) -> int:
        return len(self._parts()[0])

    def __getitem__(self, which: slice) -> Params:
        """The point with only these layers."""
        layers, structure = self._parts()
        kept = set(range(len(layers))[which])
        some = [a if k in kept else jax.tree.map(lambda _: None, a) for k, a in enumerate(layers)]
        return Params(jax.tree.unflatten(structure, some))

    def _parts(self) -> tuple[list[Any], Any]:
        whole = self.point.tree
        return jax.tree.flatten(whole, is_leaf=lambda part: part is not whole)
