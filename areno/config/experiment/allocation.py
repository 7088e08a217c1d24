"""The grammar of the settings ``backend`` and ``allocation_mode``: engines, their devices and their parallelism.

    fsdp:d4                          four data-parallel training ranks
    fsdp[actor]:d2t2                 engine named actor: data-parallel size 2, tensor-parallel size 2 (or fsdp(actor):d2t2)
    megatron:(attn:d4p2t2|ffn:d2p2e4)   different parallelism for attention and expert layers
    areno:d2+fsdp:d2                 generation and training on separate devices
    sglang[rollout]:d4|fsdp[actor]:d4   generation and training on the same devices
    sglang.d4p1m1+d2p2m1             the legacy dotted form, in which m is the tensor-parallel size
    actor_gen:d4,*:d8                legacy: generation (actor_gen) on four devices, all other models (*) on eight others
    d4m1                             legacy: generation and training on the same devices

``|`` binds more tightly than ``+``. The letters mean data (d), tensor (t), pipeline (p), context (c) and expert (e)
parallelism.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from areno.config.options import nearest
from areno.errors import UsageError

INFERENCE_BACKENDS = ("areno", "sglang", "vllm")
"""Inference backends; ``areno`` is the engine of this package."""

TRAIN_BACKENDS = ("fsdp", "megatron", "archon")
"""Names of training backends. The names are accepted for compatibility: areno's own engine trains in all three cases."""

_BACKENDS = (*INFERENCE_BACKENDS, *TRAIN_BACKENDS)
_DIMS = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_HEAD = re.compile(rf"(?P<backend>{_NAME})(?:\[(?P<square>{_NAME})\]|\((?P<round>{_NAME})\))?(?::(?P<dims>.*))?")
_DIM = re.compile(r"([a-z])([1-9][0-9]*)")
_SIZES = re.compile(r"(?:[dmtpce][1-9][0-9]*)+")
_DOTTED = re.compile(rf"([A-Za-z]+)\.({_SIZES.pattern})")
_MODELS = {
    "actor_gen": "rollout",
    "actor_train": "actor",
    "actor": "actor",
    "ref_inf": "ref",
    "ref": "ref",
    "critic_train": "critic",
    "critic": "critic",
    "*": "*",
}


class InvalidAllocationModeError(UsageError):
    """A ``backend`` or ``allocation_mode`` has invalid syntax, or conflicting sizes or engines.

    Also raised if a backend does not support a kind of parallelism, such as context parallelism in ``sglang:c2``.
    """


class AllocationValidationError(UsageError):
    """A ``backend`` or ``allocation_mode`` has valid syntax, but its parallel sizes are impossible.

    Raised if fsdp has pipeline or expert parallelism, or if the number of devices is not a multiple of
    :attr:`ParallelStrategy.expert_parts`.
    """


@dataclass(frozen=True, kw_only=True)
class ParallelStrategy:
    """Parallel sizes of an engine. If ``expert_tensor`` is 0, experts have the tensor-parallel size of the other layers."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 0

    def __post_init__(self) -> None:
        if self.expert_tensor == 0:
            object.__setattr__(self, "expert_tensor", self.tensor)

    @property
    def world_size(self) -> int:
        """Number of devices of the engine: ``data`` x ``tensor`` x ``pipeline`` x ``context``.

        Experts are sharded across the same devices.
        """
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def expert_parts(self) -> int:
        """Number of devices that together hold one copy of all experts."""
        return self.pipeline * self.expert_tensor * self.expert

    @property
    def expert_ranks(self) -> int:
        """Number of tensor-parallel groups that together hold one copy of a pipeline stage's experts.

        The result is ``expert`` x ``expert_tensor`` / ``tensor``, or 0 if this quotient is not an integer.
        """
        parts = self.expert * self.expert_tensor
        return 0 if parts % self.tensor else parts // self.tensor

    @property
    def dims(self) -> str:
        """The parallel sizes, such as ``d2t2`` (data 2, tensor 2). Sizes of 1 are omitted, but a single device is ``d1``.

        If the tensor-parallel size of the experts differs from that of the other layers, the text has the form
        ``(attn:SIZES|ffn:SIZES)``.
        """
        if self.expert_tensor == self.tensor:
            return _dims_text(d=self.data, p=self.pipeline, t=self.tensor, c=self.context, e=self.expert)
        attention = _dims_text(d=self.data, p=self.pipeline, t=self.tensor, c=self.context)
        data = self.world_size // self.expert_parts
        return f"(attn:{attention}|ffn:{_dims_text(d=data, p=self.pipeline, t=self.expert_tensor, e=self.expert)})"


def _dims_text(**sizes: int) -> str:
    return "".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1) or "d1"


@dataclass(frozen=True)
class ModelAllocation:
    """An engine: its backend, its parallel sizes, and its name, which is empty if the engine has none."""

    backend: str
    parallel: ParallelStrategy
    name: str = ""

    @classmethod
    def from_str(cls, spec: str, name: str = "") -> ModelAllocation:
        """Parse one engine, such as ``fsdp:d2t2``. If ``spec`` contains no name, the engine gets the name ``name``.

        Raises:
            InvalidAllocationModeError: the syntax is invalid, the backend does not accept one of the size letters (such as c
                in ``sglang:c2``), or attention (attn) and experts (ffn) have different numbers of devices or
                pipeline stages.
            AllocationValidationError: fsdp has pipeline or expert parallelism, or the number of devices is not a multiple of
                :attr:`ParallelStrategy.expert_parts`.
        """
        text = re.sub(r"\s+", "", spec)
        if "+" in text or len(_members(text)) > 1:
            raise InvalidAllocationModeError(
                f"{spec!r} specifies several engines, but `backend` accepts only one engine; set one `backend` per role, "
                "such as rollout.backend=sglang:d4 and actor.backend=fsdp:d4"
            )
        match = _HEAD.fullmatch(text)
        if match is None or match["backend"] not in _BACKENDS:
            raise InvalidAllocationModeError(_no_backend(spec, text))
        backend, dims = match["backend"], match["dims"]
        if not dims:
            raise InvalidAllocationModeError(f"{spec!r} has no size; write {text.rstrip(':')}:d1 for one device")
        if "attn:" in dims or "ffn:" in dims:
            parallel = _hybrid(spec, backend, dims)
        else:
            parallel = ParallelStrategy(
                **_sizes(spec, dims, "dtp" if backend in INFERENCE_BACKENDS else "dptce", backend)
            )
        if backend == "fsdp" and (parallel.pipeline > 1 or parallel.expert > 1):
            raise AllocationValidationError(
                f"{spec!r}: fsdp has neither pipeline (p) nor expert (e) parallelism; use only data (d), tensor (t) and "
                f"context (c) parallelism, such as fsdp:d{parallel.world_size}"
            )
        if parallel.world_size % parallel.expert_parts:
            raise AllocationValidationError(
                f"{spec!r}: the product of the parallel sizes p (pipeline), t (tensor) and e (expert) is "
                f"{parallel.pipeline} x {parallel.expert_tensor} x {parallel.expert} = {parallel.expert_parts}, which does not "
                f"divide {parallel.world_size}, the number of devices of the engine; choose other sizes"
            )
        return cls(backend, parallel, match["square"] or match["round"] or name)

    @property
    def is_inference(self) -> bool:
        """Whether the engine generates. Otherwise, the engine trains."""
        return self.backend in INFERENCE_BACKENDS

    @property
    def role(self) -> str:
        """Role of the engine: the name of its section in the experiment, such as ``actor``.

        The role of an engine with a name is this name, such as ``critic`` for ``fsdp[critic]:d1``. An engine without a name has
        the role ``rollout`` if it generates, and ``actor`` if it trains.
        """
        return self.name or ("rollout" if self.is_inference else "actor")

    @property
    def world_size(self) -> int:
        """Number of devices of the engine."""
        return self.parallel.world_size

    @property
    def spec(self) -> str:
        """The value of the setting ``backend`` for this engine, such as ``fsdp:d2t2`` for ``fsdp[actor]:d2t2``."""
        return f"{self.backend}:{self.parallel.dims}"

    def __str__(self) -> str:
        return f"{self.backend}({self.name}):{self.parallel.dims}" if self.name else self.spec


def _no_backend(spec: str, text: str) -> str:
    names = ", ".join(_BACKENDS)
    if not text:
        return f"the backend is empty; write a backend such as fsdp:d1 (backends: {names})"
    if _SIZES.fullmatch(text):
        return f"{spec!r} has no backend; write {_trains(text)} for training, or areno:{_modern(text)} for generation"
    if _DOTTED.fullmatch(text):
        better = _component(text, first=True)
        return f"{spec!r} has a dot before the sizes, which only the setting allocation_mode accepts; write {better}"
    hint = nearest(re.split(r"[^A-Za-z_]", text, maxsplit=1)[0], _BACKENDS)
    return f"{spec!r} is not a backend{hint}; write a backend ({names}) and its parallel sizes, such as fsdp:d2t2"


def _sizes(spec: str, dims: str, allowed: str, what: str) -> dict[str, int]:
    if not re.fullmatch(r"([a-z][1-9][0-9]*)+", dims):
        raise InvalidAllocationModeError(
            f"{spec!r}: {dims!r} is not a list of sizes; write each letter with a number of at least 1, such as d2t2"
        )
    sizes = {letter: int(number) for letter, number in _DIM.findall(dims)}
    if wrong := sorted(set(sizes) - set(allowed)):
        raise InvalidAllocationModeError(
            f"{spec!r}: {what} does not support the size letter {wrong[0]!r}; use only {', '.join(allowed)}"
        )
    return {_DIMS[letter]: size for letter, size in sizes.items()}


def _hybrid(spec: str, backend: str, dims: str) -> ParallelStrategy:
    if backend != "megatron":
        raise InvalidAllocationModeError(
            f"{spec!r}: only megatron supports different sizes for attn and ffn; use megatron, or the same sizes for "
            f"both, such as {backend}:d1"
        )
    match = re.fullmatch(r"attn:([^|]*)\|ffn:([^|]*)", re.sub(r"^\((.*)\)$", r"\1", dims))
    if match is None:
        raise InvalidAllocationModeError(
            f"{spec!r} does not have sizes for both attn and ffn; write both, as in megatron:(attn:d4p2t2|ffn:d2p2e4)"
        )
    attention = _sizes(spec, match[1], "cdtp", "attn")
    experts = {"pipeline": 1, "expert": 1, "tensor": 1} | _sizes(spec, match[2], "detp", "ffn")
    strategy = ParallelStrategy(**attention, expert=experts["expert"], expert_tensor=experts["tensor"])
    if experts["pipeline"] != strategy.pipeline:
        raise InvalidAllocationModeError(
            f"{spec!r}: attn has p{strategy.pipeline}, but ffn has p{experts['pipeline']}; use the same p for both, because "
            "attention and experts use the same pipeline stages"
        )
    world, parts = strategy.world_size, strategy.expert_parts
    taken = experts.get("data", max(world // parts, 1)) * parts
    if taken != world:
        raise InvalidAllocationModeError(
            f"{spec!r}: attn takes {world} devices, but ffn takes {taken}; choose sizes for which "
            "the two numbers are equal"
        )
    return strategy


def _members(component: str) -> list[str]:
    """Split ``component`` (engines that share devices, as in ``areno:d4|fsdp[actor]:d4``) into engines.

    The ``|`` between the sizes of attention and expert layers, as in ``megatron:(attn:d4|ffn:d2e2)``, is not a separator.
    """
    return re.split(r"\|(?![^()]*\))(?!(?:attn|ffn):)", component)


@dataclass(frozen=True)
class AllocationMode:
    """The engines of an ``allocation_mode``. ``components`` lists the groups of engines that share devices."""

    components: tuple[tuple[ModelAllocation, ...], ...]

    @classmethod
    def from_str(cls, text: str) -> AllocationMode:
        """Parse an allocation. Also accepts the legacy forms that :func:`translate_legacy` translates.

        Raises:
            InvalidAllocationModeError: the syntax is invalid, an engine lacks a required name, two engines have the same name,
                or engines that share devices have different numbers of devices.
            AllocationValidationError: the parallel sizes of an engine are impossible; see :meth:`ModelAllocation.from_str`.
        """
        compact = re.sub(r"\s+", "", translate_legacy(text))
        mode = cls(tuple(tuple(map(ModelAllocation.from_str, _members(component))) for component in compact.split("+")))
        mode._validate(text)
        return mode

    @property
    def engines(self) -> tuple[ModelAllocation, ...]:
        """All engines, in the order in which the allocation lists them."""
        return tuple(engine for group in self.components for engine in group)

    def backends(self) -> dict[str, str]:
        """Return the ``backend`` of each role; see :attr:`ModelAllocation.role`.

        Raises InvalidAllocationModeError if two engines have the same role.
        """
        backends: dict[str, str] = {}
        for engine in self.engines:
            if engine.role in backends:
                raise InvalidAllocationModeError(
                    f"{self}: two engines have the role {engine.role}; name the engines, as in fsdp[critic]:d1"
                )
            backends[engine.role] = engine.spec
        return backends

    def colocated(self) -> dict[str, str]:
        """Map each colocated role to the role whose devices it shares."""
        return {engine.name: first.role for first, *later in self.components for engine in later}

    def __str__(self) -> str:
        return "+".join("|".join(map(str, group)) for group in self.components)

    def _validate(self, text: str) -> None:
        names = [engine.name for engine in self.engines if engine.name]
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise InvalidAllocationModeError(
                f"{text!r}: two engines are called {duplicates[0]}; give each engine its own name"
            )
        if len(self.components) > 2 and any(not group[0].name for group in self.components):
            raise InvalidAllocationModeError(
                f"{text!r}: an engine has no name; if there are three or more engines, give each engine a name, as in "
                "fsdp[critic]:d1"
            )
        for first, engine in ((first, engine) for first, *later in self.components for engine in later):
            if not engine.name:
                raise InvalidAllocationModeError(
                    f"{text!r}: {engine} shares devices but has no name; write {engine.backend}[actor]:..."
                )
            if engine.world_size != first.world_size:
                raise InvalidAllocationModeError(
                    f"{text!r}: {engine} takes {engine.world_size} devices, but {first} takes {first.world_size}; give engines "
                    "that share devices the same number of devices"
                )


def translate_legacy(text: str) -> str:
    """Translate a legacy form of ``allocation_mode`` to the current form. Text in the current form is returned unchanged.

    - ``sglang.d4p1m1+d2p2m1`` becomes ``sglang:d4+megatron:d2p2``.
    - ``actor_gen:d4,*:d8`` becomes ``areno:d4+fsdp:d8``.
    - ``d2p2m1`` becomes ``areno[rollout]:d2p2|megatron[actor]:d2p2``: generation and training share devices.

    In legacy forms, the letter m is the tensor-parallel size. If the text gives no training backend, the sizes decide: the
    backend is megatron if there is pipeline or expert parallelism, and fsdp if there is not.
    """
    compact = re.sub(r"\s+", "", text)
    if "," in compact:
        return _by_model(text, compact)
    if _SIZES.fullmatch(compact):
        return f"areno[rollout]:{_modern(compact)}|{_trains(compact, '[actor]')}"
    translated = "+".join(_component(part, first=not index) for index, part in enumerate(compact.split("+")))
    return text if translated == compact else translated


def _component(part: str, *, first: bool) -> str:
    if match := _DOTTED.fullmatch(part):
        return f"{match[1]}:{_modern(match[2])}"
    return _trains(part) if _SIZES.fullmatch(part) and not first else part


def _by_model(text: str, compact: str) -> str:
    """Translate the legacy form ``MODEL:SIZES,...``, such as ``actor_gen:d4,*:d8``. ``*`` stands for all other models."""
    prefix, _, rest = compact.partition(".")
    backend, rest = (prefix, rest) if prefix in INFERENCE_BACKENDS else ("areno", compact)
    sizes: dict[str, str] = {}
    for part in rest.split(","):
        model, _, dims = part.partition(":")
        role = _MODELS.get(model)
        if role is None or not _SIZES.fullmatch(dims):
            raise InvalidAllocationModeError(
                f"{text!r}: {part!r} is not of the form MODEL:SIZES, where MODEL is one of {', '.join(_MODELS)}; write an "
                "entry such as actor:d4 (data-parallel size 4)"
            )
        if role in sizes:
            raise InvalidAllocationModeError(f"{text!r} gives sizes for {role} twice; remove one of the two entries")
        sizes[role] = dims
    generates, trains = sizes.pop("rollout", sizes.get("*", "")), sizes.pop("actor", sizes.get("*", ""))
    others = [_trains(dims, f"[{role}]") for role, dims in sizes.items() if role != "*"]
    named = ("[rollout]", "[actor]") if others else ("", "")
    parts = [f"{backend}{named[0]}:{_modern(generates)}"] if generates else []
    parts += [_trains(trains, named[1])] if trains else []
    return "+".join([*parts, *others])


def _trains(dims: str, name: str = "") -> str:
    needs_megatron = any(int(size) > 1 for letter, size in _DIM.findall(dims) if letter in "pe")
    return f"{'megatron' if needs_megatron else 'fsdp'}{name}:{_modern(dims)}"


def _modern(dims: str) -> str:
    sizes = {letter: int(number) for letter, number in _DIM.findall(dims)}
    tensor = max(sizes.get("m", 1), sizes.get("t", 1))
    return _dims_text(d=sizes.get("d", 1), p=sizes.get("p", 1), t=tensor, c=sizes.get("c", 1), e=sizes.get("e", 1))
