"""What `expertd inspect` says about a model, as plain values for JSON. Names of keys are a contract (docs/memory.md).

Not here: how it is printed (`cli.inspect`), how it would run (`plan`).
"""

from __future__ import annotations

from typing import Any

from expertd.model.expertmap import ExpertMap, LayerExperts
from expertd.model.names import Role, block_of, single_expert, stacked_expert


def inspect_report(experts: ExpertMap, fingerprint: str) -> dict[str, Any]:
    """Sizes in bytes; `experts_used` is the largest number of experts that a layer reads for a token."""
    model = experts.model
    sizes = [m.expert_nbytes for m in experts.layers]
    header = sum(min(offset, nbytes) for offset, nbytes in zip(model.data_offsets, model.file_nbytes, strict=True))
    return {
        "arch": model.arch,
        "name": model.name,
        "fingerprint": fingerprint,
        "files": [str(path) for path in model.files],
        "file_bytes": model.nbytes,
        "header_bytes": header,
        "padding_bytes": model.nbytes - header - model.tensor_nbytes,
        "tensors": len(model.tensors),
        "tensor_bytes": model.tensor_nbytes,
        "parameters": {"total": model.n_elements, "active": active_elements(experts)},
        "layers": experts.n_layers,
        "moe_layers": len(experts.layers),
        "experts": experts.n_experts,
        "experts_used": experts.n_experts_used,
        "expert_bytes": experts.expert_nbytes,
        "dense_bytes": experts.dense_nbytes,
        "other_bytes": {"nextn": experts.buckets[Role.NEXTN], "unknown": experts.buckets[Role.UNKNOWN]},
        "dense_parts": {
            role.value: n for role, n in experts.buckets.items() if role not in (Role.EXPERT, Role.NEXTN, Role.UNKNOWN)
        },
        "expert_size_bytes": {"min": min(sizes, default=0), "max": max(sizes, default=0)},
        "bytes_per_token": experts.token_nbytes,
        "expert_bytes_per_token": experts.token_expert_nbytes,
        "context_length": model.integer("context_length") or 0,
        "quant": experts.quant,
        "warnings": list(experts.warnings),
    }


def active_elements(experts: ExpertMap) -> int:
    """Parameters that one token is multiplied with: all but idle experts, nextn and tables of which one row is read."""
    used = {t.name: m for m in experts.layers for t in m.tensors}
    tied = "output.weight" not in experts.model.by_name
    total = 0
    for t, role in zip(experts.model.tensors, experts.roles, strict=True):
        if role in (Role.NEXTN, Role.UNKNOWN):
            continue
        if role is Role.EXPERT:
            m = used[t.name]
            total += t.n_elements * m.used // m.n_experts if m.n_experts else 0
        elif role is not Role.EMBEDDING or (tied and t.name == "token_embd.weight"):
            total += t.n_elements
    return total


def tensor_rows(experts: ExpertMap) -> list[dict[str, Any]]:
    """One row a tensor, in the files' order."""
    return [
        {
            "name": t.name,
            "type": t.type_name,
            "shape": list(t.shape),
            "role": role.value,
            "file": t.file,
            "offset": t.offset,
            "bytes": t.nbytes,
            "by_gap": t.by_gap,
        }
        for t, role in zip(experts.model.tensors, experts.roles, strict=True)
    ]


def layer_rows(experts: ExpertMap) -> list[dict[str, Any]]:
    """One row a layer of the trunk; where each expert's bytes lie is `offset + index * stride` of its tensors."""
    moe = {m.layer: m for m in experts.layers}
    dense = dense_by_layer(experts)
    return [
        {
            "layer": i,
            "dense_bytes": dense.get(i, 0),
            "experts": moe[i].n_experts if i in moe else 0,
            "experts_used": moe[i].used if i in moe else 0,
            "expert_bytes": moe[i].nbytes if i in moe else 0,
            "expert_size_bytes": moe[i].expert_nbytes if i in moe else 0,
            "tensors": _expert_tensors(moe[i]) if i in moe else [],
        }
        for i in range(experts.n_layers)
    ]


def dense_by_layer(experts: ExpertMap) -> dict[int, int]:
    """Dense bytes of each block of the trunk; -1 has those outside the blocks."""
    total: dict[int, int] = {}
    for t, role in zip(experts.model.tensors, experts.roles, strict=True):
        if role in (Role.EXPERT, Role.NEXTN):
            continue
        layer = block_of(t.name)
        key = -1 if layer is None else layer
        total[key] = total.get(key, 0) + t.nbytes
    return total


def _expert_tensors(m: LayerExperts) -> list[dict[str, Any]]:
    rows = []
    for t in m.tensors:
        stacked = stacked_expert(t.name)
        single = single_expert(t.name)
        role = stacked[1] if stacked else f"{single[2]} of expert {single[1]}" if single else ""
        stride = t.nbytes // m.n_experts if stacked and m.n_experts else t.nbytes
        rows.append({"name": t.name, "role": role, "file": t.file, "offset": t.offset, "stride": stride})
    return rows
