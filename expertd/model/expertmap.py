"""The expert map: which bytes of which file make expert (layer, index), and what all other bytes are.

Every tensor falls in one bucket, and the buckets add up to the model's tensor data. Not here: what the names mean
(`names`), how much memory it takes to run (`plan`).

What a layer's number of experts is, the tensors' shapes say; the keys may be absent or wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from expertd.errors import ModelUnsupportedError
from expertd.model.cursor import quote
from expertd.model.gguf import GgufModel
from expertd.model.names import Role, block_of, role_of, single_expert, stacked_expert
from expertd.model.tensors import TensorInfo
from expertd.types import ExpertLayout, ExpertTensor, Extent, MoeLayer

_MATMUL_ORDER = ("gate", "up", "gate_up", "down")
_ASSUMED_USED = 8
MAX_EXPERTS = 1 << 12


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """The experts of one layer: `used` of `n_experts` are read for a token, each `expert_nbytes` long."""

    layer: int
    n_experts: int
    used: int
    expert_nbytes: int
    tensors: tuple[TensorInfo, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True)
class ExpertMap:
    """Where all bytes of a model belong. `buckets` has every role; their sum is the model's tensor data."""

    model: GgufModel
    n_layers: int
    """Blocks of the trunk: those that an ordinary decode runs."""
    n_nextn: int
    n_experts: int
    n_experts_used: int
    layers: tuple[LayerExperts, ...]
    roles: tuple[Role, ...]
    """The role of each of `model.tensors`, in their order."""
    buckets: dict[Role, int]
    unsupported: str
    """Why no layout can be made; empty when one can."""
    warnings: tuple[str, ...]

    @property
    def expert_nbytes(self) -> int:
        return self.buckets[Role.EXPERT]

    @property
    def dense_nbytes(self) -> int:
        """Everything that each token may read: all but experts, nextn and unknown."""
        return sum(n for role, n in self.buckets.items() if role not in (Role.EXPERT, Role.NEXTN, Role.UNKNOWN))

    @cached_property
    def token_expert_nbytes(self) -> int:
        """Bytes of experts that one decoded token reads."""
        return sum(m.used * m.expert_nbytes for m in self.layers)

    @cached_property
    def token_dense_nbytes(self) -> int:
        """Bytes of dense weights that one decoded token reads: of a lookup table that is not the output, one row."""
        total = self.dense_nbytes
        tied = "output.weight" not in self.model.by_name
        for t, role in zip(self.model.tensors, self.roles, strict=True):
            if role is Role.EMBEDDING and not (tied and t.name == "token_embd.weight"):
                rows = max(1, t.n_elements // t.shape[0]) if t.shape and t.shape[0] else 1
                total -= t.nbytes - t.nbytes // rows
        return total

    @property
    def token_nbytes(self) -> int:
        return self.token_expert_nbytes + self.token_dense_nbytes

    @cached_property
    def quant(self) -> dict[str, int]:
        """Bytes by tensor type, largest first."""
        total: dict[str, int] = {}
        for t in self.model.tensors:
            total[t.type_name] = total.get(t.type_name, 0) + t.nbytes
        return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))

    def layout(self) -> ExpertLayout:
        """What steering needs. Nextn blocks are in neither part of it: an ordinary decode does not read them.

        Raises ModelUnsupportedError where experts have no stacked tensors or no whole number of bytes each.
        """
        if self.unsupported:
            raise ModelUnsupportedError(f"{self.model.files[0]}: {self.unsupported}", hint=_unsupported_hint(self))
        dense = [
            t
            for t, role in zip(self.model.tensors, self.roles, strict=True)
            if role not in (Role.EXPERT, Role.NEXTN) and t.nbytes
        ]
        return ExpertLayout(
            files=self.model.files,
            file_nbytes=self.model.file_nbytes,
            n_layers=self.n_layers,
            n_experts=self.n_experts,
            n_experts_used=self.n_experts_used,
            layers=tuple(
                MoeLayer(m.layer, m.n_experts, tuple(_stacked(t, m.n_experts) for t in m.tensors)) for m in self.layers
            ),
            dense=_merged(dense),
        )


def build_map(model: GgufModel) -> ExpertMap:
    """Sort every tensor of a model into its bucket and find the experts. Never raises for a model that was read."""
    n_blocks = _n_blocks(model)
    n_nextn = min(max(0, model.integer("nextn_predict_layers") or 0), n_blocks)
    n_layers = n_blocks - n_nextn
    roles = tuple(role_of(t.name, n_layers, n_blocks) for t in model.tensors)
    buckets = dict.fromkeys(Role, 0)
    stacked: dict[int, dict[str, TensorInfo]] = {}
    single: dict[int, dict[tuple[int, str], TensorInfo]] = {}
    for t, role in zip(model.tensors, roles, strict=True):
        buckets[role] += t.nbytes
        if role is not Role.EXPERT:
            continue
        if (found := stacked_expert(t.name)) is not None:
            stacked.setdefault(found[0], {})[found[1]] = t
        elif (one := single_expert(t.name)) is not None:
            single.setdefault(one[0], {})[one[1:]] = t
    layers, faults = _layers(stacked, single, [max(0, n) for n in model.integers("expert_used_count", n_layers)])
    n_experts = max((m.n_experts for m in layers), default=0)
    unknown = [t.name for t, role in zip(model.tensors, roles, strict=True) if role is Role.UNKNOWN]
    warnings = [*model.warnings, *faults, *_notes(model, layers, buckets, bool(single), n_nextn, unknown)]
    unsupported = "experts are stored one tensor each, as before April 2024: llama.cpp cannot load it" if single else ""
    if not unsupported and faults:
        unsupported = faults[0]
    return ExpertMap(
        model,
        n_layers,
        n_nextn,
        n_experts,
        max((m.used for m in layers), default=0),
        tuple(layers),
        roles,
        buckets,
        unsupported,
        tuple(warnings),
    )


def _n_blocks(model: GgufModel) -> int:
    """block_count, where it is one that the tensors bear out: nextn blocks may be left out of a file."""
    present = max((b for t in model.tensors if (b := block_of(t.name)) is not None), default=-1) + 1
    promised = model.integer("block_count") or 0
    nextn = max(0, model.integer("nextn_predict_layers") or 0)
    return promised if 0 < promised <= present + nextn else present


def _layers(
    stacked: dict[int, dict[str, TensorInfo]],
    single: dict[int, dict[tuple[int, str], TensorInfo]],
    used: list[int],
) -> tuple[list[LayerExperts], list[str]]:
    layers: list[LayerExperts] = []
    faults: list[str] = []
    for layer in sorted({*stacked, *single}):
        tensors = [stacked[layer][r] for r in _MATMUL_ORDER if r in stacked.get(layer, {})]
        counts = {t.shape[2] if len(t.shape) > 2 else 1 for t in tensors}
        indices = {index for index, _ in single.get(layer, {})}
        if indices:
            counts.add(max(indices) + 1)
            tensors += [t for _, t in sorted(single[layer].items())]
        n = max(counts)
        total = sum(t.nbytes for t in tensors)
        if len(counts) > 1:
            faults.append(f"layer {layer}: its expert tensors disagree on the number of experts: {sorted(counts)}")
        elif not n:
            faults.append(f"layer {layer}: its expert tensors hold no experts")
        elif n > MAX_EXPERTS:
            faults.append(f"layer {layer}: {n} experts, more than any model has")
        elif not indices and any(n and t.nbytes % n for t in tensors):
            faults.append(f"layer {layer}: its experts have no whole number of bytes each")
        k = used[layer] if layer < len(used) else 0
        layers.append(LayerExperts(layer, n, min(k or _ASSUMED_USED, n), total // n if n else 0, tuple(tensors)))
    return layers, faults


def _notes(
    model: GgufModel,
    layers: list[LayerExperts],
    buckets: dict[Role, int],
    single: bool,
    n_nextn: int,
    unknown: list[str],
) -> list[str]:
    """What a user should know about the map, apart from faults."""
    notes: list[str] = []
    kind = model.kv.get("general.type", "model")
    if not model.arch:
        notes.append("general.architecture is absent: llama.cpp will not load it")
    if kind != "model" or model.arch == "clip":
        notes.append(f"this is no language model of its own (general.type {kind!r}, architecture {model.arch!r})")
    if single:
        notes.append("experts are stored one tensor each, as before April 2024: re-convert, it cannot be loaded")
    n_experts = max((m.n_experts for m in layers), default=0)
    if not layers:
        notes.append("no experts: steering gives nothing")
    elif not model.integer("expert_used_count"):
        notes.append(
            f"{model.arch}.expert_used_count is absent: {min(_ASSUMED_USED, n_experts)} experts a token assumed"
        )
    promised = model.integer("expert_count")
    if layers and promised and promised != n_experts:
        notes.append(f"{model.arch}.expert_count says {promised}, the tensors hold {n_experts}")
    if buckets[Role.NEXTN]:
        notes.append(
            f"{buckets[Role.NEXTN]} bytes of multi-token prediction (nextn), which an ordinary decode does not read"
        )
    elif n_nextn:
        notes.append("nextn blocks are announced, but their tensors are not in this file")
    if buckets[Role.GROUP_EXPERT]:
        notes.append(
            f"{buckets[Role.GROUP_EXPERT]} bytes of group experts (chexps) belong to several experts at once: "
            "counted with the dense weights"
        )
    if unknown:
        notes.append(
            f"{len(unknown)} tensors of unknown purpose, {buckets[Role.UNKNOWN]} bytes, first {quote(unknown[0])}"
        )
    return notes


def _unsupported_hint(experts: ExpertMap) -> str:
    stored_singly = any(single_expert(m.tensors[-1].name) for m in experts.layers if m.tensors)
    return (
        "re-convert the model with a current llama.cpp" if stored_singly else "the file was written by another program"
    )


def _stacked(t: TensorInfo, n_experts: int) -> ExpertTensor:
    found = stacked_expert(t.name)
    role = found[1] if found else ""
    return ExpertTensor(role, t.name, t.file, t.offset, t.nbytes // n_experts if n_experts else 0)


def _merged(tensors: list[TensorInfo]) -> tuple[Extent, ...]:
    extents: list[Extent] = []
    for t in sorted(tensors, key=lambda t: (t.file, t.offset)):
        if extents and extents[-1].file == t.file and extents[-1].end == t.offset:
            extents[-1] = Extent(t.file, extents[-1].offset, extents[-1].nbytes + t.nbytes)
        else:
            extents.append(Extent(t.file, t.offset, t.nbytes))
    return tuple(extents)
