"""The geometry of a MoE model: the numbers that decide what a token costs, without the weights.

A geometry comes by name (`presets`), or from a JSON or TOML file whose keys are the fields below. Which tensors follow
from it lies in `tensors`, what is written into them in `blocks` and `synth`.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expertd.errors import BenchError, UsageError

ARCHITECTURES = ("qwen3moe", "llama", "olmoe", "glm4moe", "deepseek2", "gpt-oss", "minimax-m2")


@dataclass(frozen=True)
class Geometry:
    """Sizes in elements. `expert_ff` is one expert's width, `dense_ff` that of the leading `dense_layers`.

    `q_lora`, `kv_lora`, `rope_dim`, `nope_dim` and `value_dim` are for latent attention (deepseek2) alone; `rope_dim`
    also says how much of a head is rotated elsewhere (0: all of it). `types` are GGML's names. `keys` are further
    metadata of the architecture, without its prefix.
    """

    name: str
    arch: str
    layers: int
    experts: int
    experts_used: int
    embedding: int
    expert_ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dense_layers: int = 0
    dense_ff: int = 0
    shared_experts: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    value_dim: int = 0
    context: int = 32768
    expert_type: str = "Q4_0"
    dense_type: str = "Q4_0"
    output_type: str = "Q6_K"
    keys: Mapping[str, int | float | bool] = field(default_factory=dict)

    @property
    def moe_layers(self) -> range:
        """Numbers of the layers that route."""
        return range(self.dense_layers, self.layers)

    def changed(self, **changes: Any) -> Geometry:
        """The same with other numbers, checked; None leaves a number as it is. Raises UsageError."""
        wanted = {key: value for key, value in changes.items() if value is not None}
        return checked(dataclasses.replace(self, **wanted)) if wanted else self


def from_file(path: Path) -> Geometry:
    """A geometry from a .json or .toml file. Raises BenchError when it cannot be read, UsageError when it is off."""
    try:
        raw = path.read_bytes()
        table = tomllib.loads(raw.decode()) if path.suffix.lower() == ".toml" else json.loads(raw)
    except OSError as e:
        raise BenchError(f"cannot read the geometry {path}: {e.strerror}") from e
    except (ValueError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} is neither JSON nor TOML: {e}", hint="give a table of numbers") from e
    if not isinstance(table, dict):
        raise UsageError(f"{path} holds no table", hint="give fields by name: arch, layers, experts ...")
    return from_table(table, str(path), Path(path).stem)


def from_table(table: Mapping[str, Any], where: str, name: str) -> Geometry:
    """A geometry from named values; `where` is for the message, `name` where the table has none. Raises UsageError."""
    fields = {f.name: f for f in dataclasses.fields(Geometry)}
    for key in table:
        if key not in fields:
            raise UsageError(f"{where}: no such field: {key}", hint=f"known are {', '.join(fields)}")
    values = {"name": name, **table}
    missing = [f.name for f in fields.values() if f.name not in values and _is_required(f)]
    if missing:
        raise UsageError(f"{where}: missing {', '.join(missing)}", hint="give every size of the model")
    for key, value in values.items():
        kind = {"int": int, "str": str}.get(str(fields[key].type), dict)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UsageError(f"{where}: {key} = {value!r} is no {'number' if kind is int else kind.__name__}")
    return checked(Geometry(**values))


def _is_required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def checked(g: Geometry) -> Geometry:
    """`g` itself. Raises UsageError, naming the field, when no model can have these numbers."""
    if g.arch not in ARCHITECTURES:
        raise UsageError(f"{g.name}: cannot write architecture {g.arch}", hint=f"one of {', '.join(ARCHITECTURES)}")
    for key in ("layers", "experts", "experts_used", "embedding", "expert_ff", "heads", "kv_heads", "head_dim"):
        if getattr(g, key) < 1:
            raise UsageError(f"{g.name}: {key} = {getattr(g, key)} is below 1")
    for key in ("embedding", "expert_ff", "head_dim", "dense_ff", "q_lora", "kv_lora", "rope_dim", "nope_dim"):
        if getattr(g, key) % 32:
            raise UsageError(f"{g.name}: {key} = {getattr(g, key)} is no multiple of 32, the length of a block")
    if g.experts_used > g.experts:
        raise UsageError(f"{g.name}: {g.experts_used} experts used of {g.experts}")
    if g.heads % g.kv_heads:
        raise UsageError(f"{g.name}: {g.heads} heads do not divide by {g.kv_heads} KV heads")
    if not 0 <= g.dense_layers < g.layers:
        raise UsageError(f"{g.name}: {g.dense_layers} dense layers of {g.layers} leave none that routes")
    if g.dense_layers and not g.dense_ff:
        raise UsageError(f"{g.name}: dense layers need dense_ff")
    if g.vocab < 512:
        raise UsageError(f"{g.name}: vocab = {g.vocab} is below 512, the smallest with every byte in it")
    _check_arch(g)
    return g


def _check_arch(g: Geometry) -> None:
    if g.arch == "deepseek2":
        if not (g.kv_lora and g.rope_dim and g.nope_dim and g.value_dim):
            raise UsageError(f"{g.name}: deepseek2 needs kv_lora, rope_dim, nope_dim and value_dim")
        # llama.cpp takes 26 and 27 layers for the lite model, which has no q_lora, whatever the file says.
        if (g.layers in (26, 27)) == bool(g.q_lora):
            lite = "26 or 27 layers" if not g.q_lora else "any number of layers but 26 and 27"
            raise UsageError(f"{g.name}: llama.cpp runs deepseek2 with q_lora = {g.q_lora} only at {lite}")
    elif g.arch == "olmoe" and g.heads * g.head_dim != g.embedding:
        raise UsageError(f"{g.name}: olmoe's heads x head_dim must be its embedding")
    takes_dense = g.arch in ("glm4moe", "deepseek2")
    if not takes_dense and (g.dense_layers or g.shared_experts):
        raise UsageError(f"{g.name}: {g.arch} has no dense layers and no shared experts")
