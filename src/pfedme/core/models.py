"""Models, and how texts and records describe them."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Self

import jax
import jax.numpy as jnp

from pfedme.core.convolution import stage
from pfedme.core.ensemble import Ensemble
from pfedme.core.model import Layer, Model, dense, uniform_layers
from pfedme.core.normalised import NormalisedNetwork
from pfedme.core.plugins import Known
from pfedme.core.spec import Bound, Count, Index, NonNegative, build, check, parse
from pfedme.core.tree import Params, record
from pfedme.errors import InputError


@record
class Network(Model):
    """Linear layers with ReLU between them; with no hidden layer it is softmax or ridge regression.

    Weights and biases start uniform in ±1/√fan_in.

    >>> dnn = Network(features=784, classes=10, hidden=(100,))
    >>> dnn.init(jax.random.key(0)).ravel().size
    79510
    """

    features: Count
    classes: Index = 0
    hidden: tuple[int, ...] = ()

    @property
    def outputs(self) -> int:
        """Number of scores for a row: one for each class, or one for a regression."""
        return self.classes or 1

    def init(self, key: jax.Array) -> Params:
        """Layers (W, b) with W of shape fan_out × fan_in, uniform in ±1/√fan_in."""
        sizes = (self.features, *self.hidden, self.outputs)
        return Params(uniform_layers(key, [(b, a) for a, b in itertools.pairwise(sizes)]))

    def apply(self, theta: Params, x: jax.Array) -> jax.Array:
        """The scores of rows x, a row each."""
        return self.scores(theta, x).T

    def scores(self, theta: Params, x: jax.Array) -> jax.Array:
        """The scores with a column for each row of x."""
        (W, b), *rest = theta.tree
        return self.head(rest, W @ x.T + b[:, None])

    def head(self, rest: Sequence[Layer], z: jax.Array) -> jax.Array:
        """The scores from the first layer's outputs z and the later layers, a column for each row of x."""
        return dense(rest, z)

    def head_grad(
        self,
        rest: Sequence[tuple[jax.Array, jax.Array]],
        z: jax.Array,
        loss: Callable[[jax.Array], jax.Array],
    ) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
        """The gradient of loss(head(rest, z)) in z and in the layers of `rest`.

        It equals jax.grad except for how Wᵀ G is computed: XLA's product with a small transposed matrix is
        slower on CPUs than the explicit sum.
        """
        zs = [z]
        for W, b in rest:
            zs.append(W @ jax.nn.relu(zs[-1]) + b[:, None])
        G = jax.grad(loss)(zs.pop())
        grads = []
        for (W, _), z in zip(reversed(rest), reversed(zs), strict=True):
            grads.append((G @ jax.nn.relu(z).T, jnp.sum(G, axis=1)))
            G = jnp.where(z > 0, jnp.sum(W[:, :, None] * G[:, None, :], axis=0), 0)
        return G, grads[::-1]

    def to_json(self) -> dict[str, Any]:
        """Its sizes."""
        return {"features": self.features, "classes": self.classes, "hidden": list(self.hidden)}


@record
class Convolutional(Model):
    """Stages of convolution, 2×2 pooling and ReLU, and then linear layers with ReLU between them.

    Weights and biases start uniform in ±1/√fan_in.

    >>> cnn = Convolutional(shape=(28, 28), classes=10, channels=(8, 16), hidden=(64,))
    >>> cnn.init(jax.random.key(0)).ravel().size
    52138
    """

    shape: tuple[int, ...]
    """Height and width of an image, and its channels if there are several."""
    classes: Index = 0
    channels: tuple[int, ...] = (8, 16)
    """Output channels of each stage; at least one stage."""
    hidden: tuple[int, ...] = ()
    kernel: Count = 3
    """Height and width of the convolutions."""

    def init(self, key: jax.Array) -> Params:
        """Layers (W, b); in the stages, W has shape channels × kernel × kernel × input channels."""
        height, width, *colours = self.shape
        before = colours[0] if colours else 1
        shapes = []
        for after in self.channels:
            shapes.append((after, self.kernel, self.kernel, before))
            height, width, before = height // 2, width // 2, after
        sizes = (height * width * before, *self.hidden, self.classes or 1)
        return Params(uniform_layers(key, [*shapes, *((b, a) for a, b in itertools.pairwise(sizes))]))

    def apply(self, theta: Params, x: jax.Array) -> jax.Array:
        """The scores of rows x, a row each."""
        return self.scores(theta, x).T

    def scores(self, theta: Params, x: jax.Array) -> jax.Array:
        """The scores with a column for each row of x."""
        stages, rest = theta.tree[: len(self.channels)], theta.tree[len(self.channels) :]
        height, width, *colours = self.shape
        z = x.reshape(len(x), height, width, *(colours or [1])).transpose(3, 1, 2, 0)
        for W, b in stages:
            z = stage(W, b, z)
        # The output of a stage is nonnegative, so the ReLU before the first layer changes nothing.
        return dense(rest, z.reshape(-1, len(x)))

    def to_json(self) -> dict[str, Any]:
        """Its shape and sizes."""
        sizes = {name: list(getattr(self, name)) for name in ("shape", "channels", "hidden")}
        kind = {"kind": "cnn", "features": math.prod(self.shape), "classes": self.classes}
        return kind | sizes | {"kernel": self.kernel}


def model_from_json(document: dict[str, Any]) -> Model:
    """The model that `Model.to_json` describes, without l2.

    >>> model_from_json({"features": 60, "classes": 10, "hidden": [20]})
    Network(..., features=60, hidden=(20,))
    """
    if not isinstance(document, dict):
        raise InputError(f"The description of a model must be a JSON object, not {document!r}.")
    fields = dict(document)
    kind = fields.pop("kind", "network")
    if kind not in ("network", "cnn", "dnn-bn", "ensemble"):
        raise InputError(f"Unknown kind of model '{kind}'; a later version of pfedme may have written it.")
    lacking = {"features", "classes"} - set(fields)
    if lacking:
        raise InputError(f"The description of a model lacks {' and '.join(sorted(lacking))}.")
    if kind == "network":
        return build(Network, fields, "the model")
    if kind == "ensemble":
        one = model_from_json(fields.get("one", {}))
        return check(Ensemble(one=one, members=fields.get("members", 0), classes=one.classes), "the model")
    sizes = build(Network, {name: fields.pop(name) for name in ("features", "classes")}, "the model")
    return build(MODELS.own[kind], fields, "the model").build(sizes.features, sizes.classes)


class Description:
    """The model as a run receives it and a record stores it; its fields are the model's options.

    Other packages register `@record` dataclasses that derive from this class and define `build`.
    """

    def with_defaults(self, features: int, shape: tuple[int, ...] = ()) -> Self:
        """This description with all defaults filled in, for rows with this many features and this shape."""
        return self

    def build(self, features: int, classes: int, shape: tuple[int, ...] = ()) -> Model:
        """The model for rows with this many features and classes; `classes` is 0 for a regression."""
        raise NotImplementedError


@record
class MLR(Description):
    """Softmax regression; linear regression if the labels are numbers."""

    l2: NonNegative = 0.0
    """Strength of the l2 term in every client's loss, over weights and biases; 0.001 in the paper's table."""

    def build(self, features: int, classes: int, shape: tuple[int, ...] = ()) -> Network:
        """The model for rows with this many features and classes."""
        return Network(features=features, classes=classes, l2=self.l2)


@record
class DNN(Description):
    """A network of linear layers with ReLU between them."""

    hidden: tuple[int, ...] | None = None
    """Sizes of the hidden layers, such as 100 or 100-50; if not given, as in the paper: 100 for images
    (100 features or more), else 20."""
    l2: NonNegative = 0.0
    """Strength of the l2 term in every client's loss."""

    def with_defaults(self, features: int, shape: tuple[int, ...] = ()) -> DNN:
        """This description with all defaults filled in, for rows with this many features."""
        return dataclasses.replace(self, hidden=_hidden(self.hidden, features))

    def build(self, features: int, classes: int, shape: tuple[int, ...] = ()) -> Network:
        """The model for rows with this many features and classes."""
        hidden = _hidden(self.hidden, features)
        return Network(features=features, classes=classes, hidden=hidden, l2=self.l2)


def _hidden(given: tuple[int, ...] | None, features: int) -> tuple[int, ...]:
    """Sizes of hidden layers: those given, or else those of the paper."""
    return given if given is not None else ((100,) if features >= 100 else (20,))


@record
class NormalisedDNN(Description):
    """A network of linear layers with batch normalisation and ReLU between them."""

    hidden: tuple[int, ...] | None = None
    """Sizes of the hidden layers, at least one; by default as for dnn."""
    l2: NonNegative = 0.0
    """Strength of the l2 term in every client's loss, over all parameters but the running statistics."""

    def with_defaults(self, features: int, shape: tuple[int, ...] = ()) -> NormalisedDNN:
        """This description with all defaults filled in, for rows with this many features."""
        if self.hidden == ():
            raise InputError(
                "hidden of model 'dnn-bn' must name at least one layer, such as 100; model mlr has none."
            )
        return dataclasses.replace(self, hidden=_hidden(self.hidden, features))

    def build(self, features: int, classes: int, shape: tuple[int, ...] = ()) -> NormalisedNetwork:
        """The model for rows with this many features and classes."""
        hidden = self.with_defaults(features).hidden
        assert hidden is not None
        return NormalisedNetwork(features=features, classes=classes, hidden=hidden, l2=self.l2)


@record
class CNN(Description):
    """A convolutional network for rows that are images."""

    channels: tuple[int, ...] = (8, 16)
    """Output channels of each stage of convolution, 2×2 pooling and ReLU, such as 8-16."""
    hidden: tuple[int, ...] = (64,)
    """Sizes of the hidden layers after the stages."""
    kernel: Annotated[int, Bound(least=1, most=99)] = 3
    """Height and width of the convolutions, an odd number."""
    shape: tuple[int, ...] | None = None
    """Height and width of an image, and its channels if there are several, such as 28-28 or 32-32-3; taken
    from the data if not given."""
    l2: NonNegative = 0.0
    """Strength of the l2 term in every client's loss."""

    def with_defaults(self, features: int, shape: tuple[int, ...] = ()) -> CNN:
        """This description with all defaults filled in, for rows with this many features and this shape."""
        own = self.shape or shape
        shown = "×".join(map(str, own))
        if not own:
            raise InputError(
                f"Model 'cnn' is for images, and the image shape of rows of {features} numbers is not known; "
                "give it, as in cnn:shape=28-28 or cnn:shape=32-32-3, or use model mlr or dnn."
            )
        if len(own) not in (2, 3) or math.prod(own) != features:
            raise InputError(
                f"Model 'cnn' is for images of height × width or height × width × channels, and rows of "
                f"{features} numbers do not form images of {shown}; give cnn:shape=..., or use model mlr or "
                "dnn."
            )
        if not self.channels:
            raise InputError(
                "channels of model 'cnn' must name at least one stage, such as 8-16; model dnn has none."
            )
        if self.kernel % 2 == 0:
            raise InputError(f"kernel of model 'cnn' must be an odd number, not {self.kernel}.")
        if min(own[:2]) < 2 ** len(self.channels):
            raise InputError(
                f"Images of {shown} cannot be halved {len(self.channels)} times; give model 'cnn' fewer "
                f"channels, such as cnn:channels={self.channels[0]}, or use model mlr or dnn."
            )
        return dataclasses.replace(self, shape=own)

    def build(self, features: int, classes: int, shape: tuple[int, ...] = ()) -> Convolutional:
        """The model for rows with this many features and classes, and this shape."""
        own = self.with_defaults(features, shape).shape
        assert own is not None
        return Convolutional(
            shape=own, classes=classes, channels=self.channels, hidden=self.hidden, kernel=self.kernel,
            l2=self.l2,
        )  # fmt: skip


MODELS = Known[Description](
    "models", {"mlr": MLR, "dnn": DNN, "dnn-bn": NormalisedDNN, "cnn": CNN}, Description
)


@record
class OwnModel(Description):
    """The description of a model that is given as an object, whatever the rows are."""

    model: Model

    @property
    def path(self) -> str:
        """What a record calls it: `module:Class`."""
        return f"{type(self.model).__module__}:{type(self.model).__qualname__}"

    def build(self, features: int, classes: int, shape: tuple[int, ...] = ()) -> Model:
        """The model, after a check that it fits rows with this many features and classes."""
        return _fitting(self.model, self.path, features, classes)


@record
class MadeModel(Description):
    """The description of a model that the user's function `build(features, classes)` returns."""

    path: str
    """`module:function`, the name that a record uses."""

    def build(self, features: int, classes: int, shape: tuple[int, ...] = ()) -> Model:
        """The model that the function returns, after a check that it fits."""
        try:
            function = imported(self.path)
        except Exception as error:  # third-party modules can raise anything
            raise InputError(
                f"The model {self.path} cannot be imported ({_why(error)}); its module must be installed or "
                "in a folder on PYTHONPATH."
            ) from None
        if not callable(function):
            raise InputError(f"The model {self.path} is not a function build(features, classes).")
        try:
            model = function(features, classes)
        except Exception as error:
            raise InputError(
                f"The function {self.path} failed for {features} features and {classes} classes: "
                f"{_why(error)}."
            ) from error
        if not isinstance(model, Model):
            raise InputError(f"The function {self.path} must return a pfedme.Model, not {model!r:.60}.")
        return _fitting(model, self.path, features, classes)


def imported(path: str) -> Any:
    """The object at `module:name` or `module:name.name`."""
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def _fitting(model: Model, name: str, features: int, classes: int) -> Model:
    """The user's model, after a check that it fits rows with this many features and classes."""
    if model.classes is None:
        model = dataclasses.replace(model, classes=classes)
    wanted = classes or 1
    try:
        theta = jax.eval_shape(model.init, jax.random.key(0))
        rows = jax.ShapeDtypeStruct((2, features), "float32")
        shape = tuple(jax.eval_shape(model.apply, theta, rows).shape)
    except (TypeError, ValueError, AssertionError) as error:
        raise InputError(
            f"The model {name} cannot be applied to rows of {features} numbers: {_why(error)}"
        ) from None
    if model.classes != classes or shape != (2, wanted):
        told = f"{classes} classes" if classes else "a quantity (classes=0)"
        raise InputError(
            f"The model {name} returns scores of shape {shape} for 2 rows and {model.classes} classes; the "
            f"data has {told}, so the shape must be (2, {wanted})."
        )
    return model


def _why(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def parse_model(text: str) -> Description:
    """The model that `mlr`, `dnn:hidden=100-50,l2=0.001`, `cnn:channels=8-16`, ... describes, or that the
    function `my_package:build` makes.

    >>> parse_model("my_package:build")
    MadeModel(path='my_package:build')
    """
    module, colon, name = text.partition(":")
    if colon and module not in MODELS and all(map(str.isidentifier, f"{module}.{name}".split("."))):
        return MadeModel(path=text)
    return parse(text, MODELS, "model")
