"""Profiles over HTTP: list and read are open to whoever holds an API key, the rest is the admin's."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from expertd.runtime.profile_file import Document, document, from_document
from expertd.runtime.profiles import Profiles, summary
from expertd.server.bodies.admin import MergeBody, RenameBody
from expertd.server.bodies.decode import read
from expertd.server.context import context_of
from expertd.server.wire import JsonResponse


def _profiles(request: Request) -> Profiles:
    """NotReadyError before the model is loaded, StateError where nothing is steered."""
    return context_of(request).service.actions.profiles


async def listed(request: Request) -> Response:
    """All profiles of the loaded model, and why they are not saved where they are not."""
    profiles = _profiles(request)
    rows = await asyncio.to_thread(profiles.list)
    shape = profiles.shape
    model = {"name": shape.model, "fingerprint": shape.fingerprint, "layers": shape.n_layers,
             "experts": shape.n_experts, "experts_used": shape.n_used}  # fmt: skip
    return JsonResponse({"model": model, "profiles": rows, "trouble": profiles.trouble})


async def one(request: Request) -> Response:
    """A profile with its counts, a row a layer."""
    found = await asyncio.to_thread(_profiles(request).get, request.path_params["name"])
    return JsonResponse({**summary(found), **document(found)})


async def put(request: Request) -> Response:
    """Adds or replaces one with a document as `one` gives it."""
    profiles = _profiles(request)
    profile = from_document(await read(request, Document), request.path_params["name"])
    saved = await asyncio.to_thread(profiles.put, profile)
    return JsonResponse({**summary(profile), "saved": saved})


async def delete(request: Request) -> Response:
    name = request.path_params["name"]
    await asyncio.to_thread(_profiles(request).delete, name)
    return JsonResponse({"deleted": name})


async def rename(request: Request) -> Response:
    name, body = request.path_params["name"], await read(request, RenameBody)
    saved = await asyncio.to_thread(_profiles(request).rename, name, body.to)
    return JsonResponse({"renamed": name, "to": body.to, "saved": saved})


async def merge(request: Request) -> Response:
    """The sum of several under one name; they stay."""
    body, profiles = await read(request, MergeBody), _profiles(request)
    saved = await asyncio.to_thread(profiles.merge, body.profiles, body.into)
    return JsonResponse({**summary(profiles.get(body.into)), "saved": saved})


async def save(request: Request) -> Response:
    """Writes what is not on the disk yet."""
    profiles = _profiles(request)
    await asyncio.to_thread(profiles.save)
    return JsonResponse({"trouble": profiles.trouble})
