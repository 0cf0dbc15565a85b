"""Is it alive, is it ready, what does it serve: health, models, props, slots and metrics."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from expertd import __version__
from expertd.server.chat import loaded
from expertd.server.context import Context, context_of
from expertd.server.contract import ModelInfo
from expertd.server.errors import NotFoundError, NotImplementedHereError
from expertd.server.wire import JsonResponse, encode

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def health(request: Request) -> Response:
    """As llama-server: 503 until requests are served."""
    service = context_of(request).service
    if service.state == "ready":
        return JsonResponse({"status": "ok"})
    words = {"loading": "Loading model", "warming": "Loading model", "stopping": "Stopping"}
    message = words.get(service.state) or f"Failed to load: {service.failure}"
    body = {"error": {"code": 503, "message": message, "type": "unavailable_error"}}
    return JsonResponse(body, status_code=503, headers={"retry-after": "5"})


async def livez(request: Request) -> Response:
    """The event loop turns."""
    return JsonResponse({"status": "ok"})


async def readyz(request: Request) -> Response:
    """The model is loaded and as warm as was asked for; else how far it is."""
    service = context_of(request).service
    progress = service.progress
    total = progress.total
    body = {
        "status": service.state,
        "progress": {
            "what": progress.what,
            "done": progress.done,
            "total": total,
            "percent": round(100 * progress.done / total, 1) if total else 0.0,
        },
    }
    if service.state == "ready":
        return JsonResponse({"status": "ready"})
    if service.failure:
        body["message"] = service.failure
    return JsonResponse(body, status_code=503, headers={"retry-after": "5"})


async def metrics(request: Request) -> Response:
    return Response(context_of(request).metrics(), headers={"content-type": _METRICS_TYPE})


async def models(request: Request) -> Response:
    """The one that is loaded; an empty list before."""
    model = context_of(request).service.model
    return JsonResponse({"object": "list", "data": [_model(model)] if model else []})


async def one_model(request: Request) -> Response:
    model = loaded(context_of(request).service)
    name = request.path_params["model"]
    if name != model.id:
        raise NotFoundError(f"the model {name[:128]!r} is not here", hint=f"this daemon serves {model.id!r}")
    return JsonResponse(_model(model))


def _model(model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "expertd",
        "meta": {
            "n_vocab": model.n_vocab,
            "n_ctx": model.n_ctx,
            "n_ctx_train": model.n_ctx_train,
            "n_params": model.n_params,
            "size": model.nbytes,
            "arch": model.arch,
            "n_layers": model.n_layers,
            "n_experts": model.n_experts,
            "n_experts_used": model.n_experts_used,
            "expert_bytes": model.expert_nbytes,
        },
    }


async def props(request: Request) -> Response:
    """llama-server's description of itself, as far as it holds here."""
    context = context_of(request)
    model = loaded(context.service)
    return JsonResponse(
        {
            "default_generation_settings": {"n_ctx": model.n_ctx, "params": _params(context)},
            "total_slots": 1,
            "model_alias": model.id,
            "model_path": model.path,
            "chat_template": model.chat_template or "",
            "bos_token": model.bos,
            "eos_token": model.eos,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"expertd {__version__}",
            "model_description": model.description,
        }
    )


def _params(context: Context) -> dict[str, Any]:
    sampling = context.settings.sampling
    names = [n for n in sampling.__dataclass_fields__ if n not in ("grammar", "grammar_triggers")]
    params = {name: getattr(sampling, name) for name in names}
    return {**params, "seed": -1 if sampling.seed is None else sampling.seed, "n_predict": -1}


async def slots(request: Request) -> Response:
    context = context_of(request)
    loaded(context.service)
    return Response(encode(context.service.slots()), media_type="application/json")


async def embeddings(request: Request) -> Response:
    raise NotImplementedHereError(
        "expertd serves no embeddings: it runs generative mixture-of-experts models",
        hint="run an embedding model with llama-server beside it",
    )


async def not_here(request: Request) -> Response:
    raise NotFoundError(f"nothing is at {request.url.path[:128]}", hint="see /openapi.json")
