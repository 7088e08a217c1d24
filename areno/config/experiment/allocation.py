"""The grammar of backends and allocations: which engine runs what, on how many devices, and how they are divided.

    fsdp:d4                          four data-parallel training ranks
    fsdp[actor]:d2t2                 the same with a name; (actor) works too
    megatron:(attn:d4p2t2|ffn:d2p2e4)   attention and expert layers divided differently
    areno:d2+fsdp:d2                 generation and training, each on devices of its own
    sglang[rollout]:d4|fsdp[actor]:d4   both on the same devices
    sglang.d4p1m1+d2p2m1             the form of earlier versions, in which m is tensor parallel
    actor_gen:d4,*:d8                sizes by model: generation on four devices, training on eight others
    d4m1                             sizes alone: generation and training on the same devices

``|`` binds tighter than ``+``. The letters: d data, t tensor, p pipeline, c context, e expert parallel.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from areno.config.options import nearest
from areno.errors import UsageError

INFERENCE_BACKENDS = ("areno", "sglang", "vllm")
"""Backends that generate; ``areno`` is the engine of this package."""

TRAIN_BACKENDS = ("fsdp", "megatron", "archon")
"""Backends that train; ``fsdp`` is served by the engine of this package."""

_DIMS = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}
_INFERENCE_DIMS, _TRAIN_DIMS = "dtp", "dptce"
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
    """The text is not in the grammar, or its parts contradict each other."""


class AllocationValidationError(UsageError):
    """The text is well formed, but its backend cannot be divided so."""


class AllocationType(enum.Enum):
    """How generation and training share the devices."""

    COLOCATE = "colocate"
    DECOUPLED_TRAIN = "decoupled_train"
    LLM_SERVER_ONLY = "llm_server_only"


@dataclass(frozen=True, kw_only=True)
class ParallelStrategy:
    """How one engine is divided.

    Attributes:
        data: data-parallel size d.
        tensor: tensor-parallel size t.
        pipeline: pipeline stages p.
        context: context-parallel size c.
        expert: expert-parallel size e.
        expert_tensor: tensor-parallel size within an expert; 0 takes that of the other layers.
    """

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
        """Number of devices: d t p c. Experts are spread over the same ones."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def expert_data(self) -> int:
        """Data-parallel size of the expert layers."""
        return self.world_size // (self.pipeline * self.expert_tensor * self.expert)

    @property
    def dims(self) -> str:
        """Text after the colon, sizes of 1 left out; the hybrid form where experts have a tensor size of their own."""
        if self.expert_tensor == self.tensor:
            return _dims_text(d=self.data, p=self.pipeline, t=self.tensor, c=self.context, e=self.expert)
        attention = _dims_text(d=self.data, p=self.pipeline, t=self.tensor, c=self.context)
        experts = _dims_text(d=self.expert_data, p=self.pipeline, t=self.expert_tensor, e=self.expert)
        return f"(attn:{attention}|ffn:{experts})"


def _dims_text(**sizes: int) -> str:
    return "".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1) or "d1"


@dataclass(frozen=True)
class ModelAllocation:
    """One engine: its backend, its name if it has one, and how it is divided."""

    backend: str
    parallel: ParallelStrategy
    name: str = ""

    @classmethod
    def from_str(cls, spec: str, name: str = "") -> ModelAllocation:
        """Read one component, such as ``fsdp:d2t2``.

        Args:
            spec: the text; white space does not matter.
            name: name of the engine where the text gives none.

        Raises:
            InvalidAllocationModeError: it is not one component in the grammar.
            AllocationValidationError: the backend cannot be divided so.
        """
        text = re.sub(r"\s+", "", spec)
        if "+" in text or len(_members(text)) > 1:
            raise InvalidAllocationModeError(
                f"{spec!r} names several engines where one is expected; give each section its own backend"
            )
        match = _HEAD.fullmatch(text)
        if match is None or match["backend"] not in (*INFERENCE_BACKENDS, *TRAIN_BACKENDS):
            raise InvalidAllocationModeError(_no_backend(spec, text))
        backend, dims = match["backend"], match["dims"]
        if not dims:
            raise InvalidAllocationModeError(f"{spec!r} says no size; write {text.rstrip(':')}:d1 for one device")
        parallel = _hybrid(spec, backend, dims) if "attn:" in dims or "ffn:" in dims else _plain(spec, backend, dims)
        allocation = cls(backend, parallel, match["square"] or match["round"] or name)
        allocation._validate(spec)
        return allocation

    @property
    def is_inference(self) -> bool:
        """Whether the backend generates."""
        return self.backend in INFERENCE_BACKENDS

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.parallel.world_size

    @property
    def spec(self) -> str:
        """The text without the name, as the setting ``backend`` holds it."""
        return f"{self.backend}:{self.parallel.dims}"

    def __str__(self) -> str:
        return f"{self.backend}({self.name}):{self.parallel.dims}" if self.name else self.spec

    def _validate(self, spec: str) -> None:
        parallel = self.parallel
        if self.backend == "fsdp" and (parallel.pipeline > 1 or parallel.expert > 1):
            raise AllocationValidationError(
                f"{spec!r}: fsdp has neither pipeline (p) nor expert (e) parallelism; use d and t, such as "
                f"fsdp:d{parallel.world_size}"
            )
        share = parallel.pipeline * parallel.expert_tensor * parallel.expert
        if parallel.world_size % share:
            raise AllocationValidationError(
                f"{spec!r}: {parallel.world_size} devices cannot hold p x t x e = {parallel.pipeline} x "
                f"{parallel.expert_tensor} x {parallel.expert} = {share} parts of the experts; make it a divisor"
            )


def _no_backend(spec: str, text: str) -> str:
    known = ", ".join((*INFERENCE_BACKENDS, *TRAIN_BACKENDS))
    if not text:
        return f"the backend is empty; write one such as fsdp:d1 (backends: {known})"
    if _SIZES.fullmatch(text):
        return f"{spec!r} says no backend; write {_trains(text)} to train or areno:{_modern(text)} to generate"
    if _DOTTED.fullmatch(text):
        return f"{spec!r} is the dotted form of allocation_mode; write {_component(text, first=True)} with a colon"
    word = re.split(r"[^A-Za-z_]", text, maxsplit=1)[0]
    hint = nearest(word, (*INFERENCE_BACKENDS, *TRAIN_BACKENDS))
    return f"{spec!r} is no backend{hint}; write BACKEND:SIZES such as fsdp:d2t2, with one of {known}"


def _sizes(spec: str, dims: str, allowed: str, what: str) -> dict[str, int]:
    if not re.fullmatch(r"([a-z][1-9][0-9]*)+", dims):
        raise InvalidAllocationModeError(
            f"{spec!r}: {dims!r} is no list of sizes; write letters with numbers from 1, such as d2t2"
        )
    sizes = {letter: int(number) for letter, number in _DIM.findall(dims)}
    wrong = sorted(set(sizes) - set(allowed))
    if wrong:
        raise InvalidAllocationModeError(
            f"{spec!r}: {what} has no size {wrong[0]!r}; choose among {', '.join(allowed)}"
        )
    return sizes


def _plain(spec: str, backend: str, dims: str) -> ParallelStrategy:
    allowed = _INFERENCE_DIMS if backend in INFERENCE_BACKENDS else _TRAIN_DIMS
    sizes = _sizes(spec, dims, allowed, backend)
    return ParallelStrategy(**{_DIMS[letter]: size for letter, size in sizes.items()})


def _hybrid(spec: str, backend: str, dims: str) -> ParallelStrategy:
    if backend != "megatron":
        raise InvalidAllocationModeError(
            f"{spec!r}: only megatron divides attn and ffn differently; write {backend}:d1"
        )
    inner = dims[1:-1] if dims.startswith("(") and dims.endswith(")") else dims
    match = re.fullmatch(r"attn:([^|]*)\|ffn:([^|]*)", inner)
    if match is None:
        raise InvalidAllocationModeError(f"{spec!r}: write both parts, as megatron:(attn:d4p2t2|ffn:d2p2e4)")
    attention = _sizes(spec, match[1], "cdtp", "attn")
    experts = _sizes(spec, match[2], "detp", "ffn")
    stages = attention.get("p", 1)
    if experts.get("p", 1) != stages:
        raise InvalidAllocationModeError(
            f"{spec!r}: attn has p{stages} and ffn p{experts.get('p', 1)}; both go through the same stages, make them equal"
        )
    strategy = ParallelStrategy(
        **{_DIMS[letter]: size for letter, size in attention.items()},
        expert=experts.get("e", 1),
        expert_tensor=experts.get("t", 1),
    )
    share = stages * strategy.expert * strategy.expert_tensor
    if experts.get("d", max(strategy.world_size // share, 1)) * share != strategy.world_size:
        raise InvalidAllocationModeError(
            f"{spec!r}: attn takes {strategy.world_size} devices and ffn {experts.get('d', 1) * share}; make them equal"
        )
    return strategy


def _members(component: str) -> list[str]:
    """Part a component at ``|``, but not inside parentheses and not before the ffn of a hybrid."""
    found: list[str] = []
    for piece in re.split(r"\|(?![^()]*\))", component):
        if found and re.match(r"(attn|ffn):", piece):
            found[-1] += "|" + piece
        else:
            found.append(piece)
    return found


@dataclass(frozen=True)
class AllocationMode:
    """Several engines: components on devices of their own, each a group of engines that share theirs."""

    components: tuple[tuple[ModelAllocation, ...], ...]

    @classmethod
    def from_str(cls, text: str) -> AllocationMode:
        """Read an allocation, the dotted form of earlier versions included.

        Raises:
            InvalidAllocationModeError: it is not in the grammar, or names are missing or given twice.
            AllocationValidationError: a backend cannot be divided so.
        """
        compact = re.sub(r"\s+", "", translate_legacy(text))
        groups = tuple(
            tuple(ModelAllocation.from_str(member) for member in _members(component))
            for component in compact.split("+")
        )
        mode = cls(groups)
        mode._validate(text)
        return mode

    @property
    def engines(self) -> tuple[ModelAllocation, ...]:
        """All engines, in the order of the text."""
        return tuple(engine for group in self.components for engine in group)

    @property
    def world_size(self) -> int:
        """Number of devices; engines that share theirs count once."""
        return sum(group[0].world_size for group in self.components)

    @property
    def type(self) -> AllocationType:
        """How generation and training share the devices."""
        if all(engine.is_inference for engine in self.engines):
            return AllocationType.LLM_SERVER_ONLY
        return AllocationType.COLOCATE if len(self.components) == 1 else AllocationType.DECOUPLED_TRAIN

    def backends(self) -> dict[str, str]:
        """Return the text of each role's ``backend``: by name where engines have one, else rollout and actor by kind.

        Raises:
            InvalidAllocationModeError: two engines would have the same role.
        """
        found: dict[str, str] = {}
        for engine in self.engines:
            role = engine.name or ("rollout" if engine.is_inference else "actor")
            if role in found:
                raise InvalidAllocationModeError(f"{self}: two engines for {role}; name them, as in fsdp[critic]:d1")
            found[role] = engine.spec
        return found

    def colocated(self) -> dict[str, str]:
        """Return for each role that shares devices the role whose devices they are."""
        shared = {}
        for first, *later in self.components:
            for engine in later:
                shared[engine.name] = first.name or ("rollout" if first.is_inference else "actor")
        return shared

    def __str__(self) -> str:
        return "+".join("|".join(map(str, group)) for group in self.components)

    def _validate(self, text: str) -> None:
        names = [engine.name for engine in self.engines if engine.name]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise InvalidAllocationModeError(
                f"{text!r}: two engines are called {twice[0]}; give each a name of its own"
            )
        if len(self.components) > 2 and any(not group[0].name for group in self.components):
            raise InvalidAllocationModeError(f"{text!r}: three or more parts must all be named, as in fsdp[critic]:d1")
        for group in self.components:
            for engine in group[1:]:
                if not engine.name:
                    raise InvalidAllocationModeError(
                        f"{text!r}: {engine} shares devices and has no name; write {engine.backend}[actor]:..."
                    )
                if engine.world_size != group[0].world_size:
                    raise InvalidAllocationModeError(
                        f"{text!r}: {engine} takes {engine.world_size} devices and {group[0]} {group[0].world_size}; "
                        "engines that share devices must have as many"
                    )


def translate_legacy(text: str) -> str:
    """Write the forms of earlier versions with colons; other texts stay.

    ``sglang.d4p1m1+d2p2m1`` is ``sglang:d4+megatron:d2p2``: m is tensor parallel, and a training part without a backend is
    fsdp, or megatron where it has what fsdp lacks. ``actor_gen:d4,*:d8`` is ``areno:d4+fsdp:d8``. Sizes alone, such as
    ``d2p2m1``, are one allocation of which generation and training share the devices.
    """
    compact = re.sub(r"\s+", "", text)
    if "," in compact:
        return _by_model(text, compact)
    if _SIZES.fullmatch(compact):
        return f"areno[rollout]:{_modern(compact)}|{_trains(compact, '[actor]')}"
    parts = [_component(part, first=not index) for index, part in enumerate(compact.split("+"))]
    return text if parts == compact.split("+") else "+".join(parts)


def _component(part: str, *, first: bool) -> str:
    if match := _DOTTED.fullmatch(part):
        return f"{match[1]}:{_modern(match[2])}"
    return _trains(part) if _SIZES.fullmatch(part) and not first else part


def _by_model(text: str, compact: str) -> str:
    """``NAME:SIZES`` for each model, with ``*`` for those that are not named."""
    prefix, _, rest = compact.partition(".")
    backend, rest = (prefix, rest) if prefix in INFERENCE_BACKENDS else ("areno", compact)
    sizes: dict[str, str] = {}
    for part in rest.split(","):
        model, _, dims = part.partition(":")
        role = _MODELS.get(model)
        if role is None or not _SIZES.fullmatch(dims):
            raise InvalidAllocationModeError(
                f"{text!r}: {part!r} is not MODEL:SIZES; write MODEL as one of {', '.join(_MODELS)}, and SIZES such as d4"
            )
        sizes[role] = dims
    generates, trains = sizes.pop("rollout", sizes.get("*", "")), sizes.pop("actor", sizes.get("*", ""))
    others = [_trains(dims, f"[{role}]") for role, dims in sizes.items() if role != "*"]
    named = ("[rollout]", "[actor]") if others else ("", "")
    parts = [f"{backend}{named[0]}:{_modern(generates)}"] if generates else []
    parts += [_trains(trains, named[1])] if trains else []
    return "+".join([*parts, *others])


def _trains(dims: str, name: str = "") -> str:
    beyond = any(int(size) > 1 for letter, size in _DIM.findall(dims) if letter in "pe")
    return f"{'megatron' if beyond else 'fsdp'}{name}:{_modern(dims)}"


def _modern(dims: str) -> str:
    sizes = {letter: int(number) for letter, number in _DIM.findall(dims)}
    tensor = max(sizes.get("m", 1), sizes.get("t", 1))
    return _dims_text(d=sizes.get("d", 1), p=sizes.get("p", 1), t=tensor, c=sizes.get("c", 1), e=sizes.get("e", 1))
