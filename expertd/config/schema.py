"""Every setting: its type, its default, its limits and what it means, once.

`load` reads them from files, environment and flags, `document` writes them as the commented file that ships, and
`expertd config show` prints them. Names of sections and keys are a contract. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from expertd.runtime.requests import Sampling


def about(meaning: str, *, kind: str = "", reload: bool = False, flag: str = "", **limits: Any) -> msgspec.Meta:
    """The description of a setting. `kind` names how text becomes its value (see `values`), `reload` tells that SIGHUP
    applies it without a restart, `flag` is the option of `expertd serve` that sets it, `limits` are msgspec's."""
    return msgspec.Meta(description=meaning, extra={"kind": kind, "reload": reload, "flag": flag}, **limits)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections: immutable values, nothing but what is named."""


class ModelSettings(Section, frozen=True, kw_only=True):
    """The model to serve."""

    path: Annotated[str, about("The GGUF file; any shard of a split model.", kind="path", flag="--model")] = ""
    alias: Annotated[str, about("Its name in the API; empty takes the file's name.")] = ""


class EngineSettings(Section, frozen=True, kw_only=True):
    """How llama.cpp runs the model."""

    n_ctx: Annotated[
        int,
        about(
            "Tokens a conversation can hold; 0 takes what the model was trained for.", ge=0, le=1 << 24, flag="--ctx"
        ),
    ] = 4096
    n_batch: Annotated[int, about("Prompt tokens in one call; 0 chooses.", ge=0, le=1 << 20)] = 0
    n_ubatch: Annotated[int, about("Prompt tokens computed at once; 0 chooses.", ge=0, le=1 << 20)] = 0
    threads: Annotated[
        int, about("Threads for decoding; 0 takes the physical cores.", ge=0, le=4096, flag="--threads")
    ] = 0
    threads_batch: Annotated[int, about("Threads for prompts; 0 takes as many as for decoding.", ge=0, le=4096)] = 0
    kv_type: Annotated[
        Literal["f16", "q8_0", "q4_0", "bf16", "f32"],
        about("Type of the KV cache; q8_0 and q4_0 need flash attention."),
    ] = "f16"
    flash_attention: Annotated[
        Literal["auto", "on", "off"], about("Fused attention: less memory for long contexts; auto asks llama.cpp.")
    ] = "auto"
    n_gpu_layers: Annotated[
        int, about("Layers on the GPU; -1 is all. Without effect where the build has no GPU.", ge=-1, le=100_000)
    ] = 0
    n_cpu_moe: Annotated[
        int, about("First layers whose experts stay in RAM although the layer is on the GPU.", ge=0, le=100_000)
    ] = 0
    override_tensor: Annotated[
        list[str], about('Where tensors go: "pattern=buffer", the first match wins.', kind="overrides")
    ] = msgspec.field(default_factory=list)
    load: Annotated[
        Literal["lazy", "stock"], about("lazy maps the file without reading it; stock reads the whole file first.")
    ] = "lazy"
    prompt_cache: Annotated[
        int | str, about("Memory for conversations kept for reuse; 0 keeps none.", kind="size_or_auto")
    ] = "auto"
    hang_seconds: Annotated[
        float,
        about(
            "How long the engine may stand still, without a token, a layer, a page or a byte from the disk, before the "
            "daemon ends and is started anew; ten times as long while it computes; 0 is for ever.",
            kind="seconds",
            ge=0,
        ),
    ] = 120.0


class SamplingSettings(Section, frozen=True, kw_only=True):
    """What a request gets where it says nothing; llama.cpp's own words and defaults."""

    temperature: Annotated[float, about("0 or below is greedy.", le=100)] = 0.8
    top_k: Annotated[int, about("Likeliest tokens kept; 0 keeps all.", ge=0)] = 40
    top_p: Annotated[float, about("Probability mass kept; 1 keeps all.", ge=0, le=1)] = 0.95
    min_p: Annotated[float, about("Least probability beside the likeliest; 0 is off.", ge=0, le=1)] = 0.05
    typical_p: Annotated[float, about("Locally typical sampling; 1 is off.", ge=0, le=1)] = 1.0
    top_n_sigma: Annotated[float, about("Standard deviations below the likeliest logit; below 0 is off.")] = -1.0
    xtc_probability: Annotated[float, about("Chance of dropping the likeliest tokens; 0 is off.", ge=0, le=1)] = 0.0
    xtc_threshold: Annotated[float, about("Least probability that XTC drops.", ge=0, le=1)] = 0.1
    dynatemp_range: Annotated[float, about("Width of the dynamic temperature; 0 is off.", ge=0)] = 0.0
    dynatemp_exponent: Annotated[float, about("Exponent of the dynamic temperature.", ge=0)] = 1.0
    repeat_last_n: Annotated[int, about("Tokens that penalties look at; 0 none, -1 the context.", ge=-1)] = 64
    repeat_penalty: Annotated[float, about("Divides repeated logits; 1 is off.", ge=0)] = 1.0
    frequency_penalty: Annotated[float, about("By count of repetitions; 0 is off.", ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, about("By presence; 0 is off.", ge=-2, le=2)] = 0.0
    dry_multiplier: Annotated[float, about("DRY against repeated sequences; 0 is off.", ge=0)] = 0.0
    dry_base: Annotated[float, about("Base of DRY's exponential.", ge=0)] = 1.75
    dry_allowed_length: Annotated[int, about("Repetition that DRY lets pass, in tokens.", ge=0)] = 2
    dry_penalty_last_n: Annotated[int, about("Tokens that DRY looks at; 0 none, -1 the context.", ge=-1)] = -1
    dry_sequence_breakers: Annotated[list[str], about("Strings across which DRY does not look.")] = msgspec.field(
        default_factory=lambda: ["\n", ":", '"', "*"]
    )
    mirostat: Annotated[int, about("0 off, 1 Mirostat, 2 Mirostat 2.0.", ge=0, le=2)] = 0
    mirostat_tau: Annotated[float, about("Mirostat's target surprise.", ge=0)] = 5.0
    mirostat_eta: Annotated[float, about("Mirostat's learning rate.", ge=0)] = 0.1
    logit_bias: Annotated[list[tuple[int, float]], about("Pairs of token id and bias.")] = msgspec.field(
        default_factory=list
    )
    seed: Annotated[int, about("-1 draws one for each request.", ge=-1, le=(1 << 32) - 1)] = -1
    grammar: Annotated[str, about("A GBNF grammar that every answer follows; empty is none.")] = ""
    grammar_triggers: Annotated[
        list[str], about("Patterns that start the grammar; none holds it from the first token.")
    ] = msgspec.field(default_factory=list)

    def sampling(self) -> Sampling:
        """These defaults as the runtime takes them."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        for name in ("dry_sequence_breakers", "logit_bias", "grammar_triggers"):
            values[name] = tuple(values[name])
        values["seed"] = None if self.seed < 0 else self.seed
        return Sampling(**values)


class CacheSettings(Section, frozen=True, kw_only=True):
    """Which experts stay in memory."""

    steering: Annotated[
        Literal["auto", "on", "off"],
        about("auto steers unless the whole model fits with room to spare.", flag="--steering"),
    ] = "auto"
    budget: Annotated[
        int | str,
        about(
            "Bytes of experts held; auto follows the memory that the machine and the cgroup leave; 25% is a share "
            "of the model's expert bytes.",
            kind="budget",
            reload=True,
            flag="--budget",
        ),
    ] = "auto"
    policy: Annotated[
        str, about("Which experts stay; auto moves to the one that hits most.", min_length=1, flag="--policy")
    ] = "auto"
    half_life: Annotated[
        float, about("Tokens after which a use counts half; 0 takes the measured default.", ge=0, le=1e6)
    ] = 0.0
    pin_budget: Annotated[
        int | str,
        about(
            "Bytes of experts that may be locked; auto pins only where routing is skewed enough to pay; 0 pins none.",
            kind="budget",
            reload=True,
        ),
    ] = "auto"
    reserve: Annotated[
        int | str,
        about("Memory that an auto budget leaves free for everything else.", kind="size_or_auto", reload=True),
    ] = "auto"
    lock_dense: Annotated[bool, about("Lock the weights that every token uses.")] = True


class ProfileSettings(Section, frozen=True, kw_only=True):
    """The saved hot map: which experts this use of the model needs."""

    name: Annotated[
        str,
        about("The profile to load and to teach.", flag="--profile", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"),
    ] = "default"
    save_seconds: Annotated[float, about("Between saves; 0 saves at the stop alone.", kind="seconds", ge=0)] = 300.0


class WarmSettings(Section, frozen=True, kw_only=True):
    """What is brought into memory at the start."""

    level: Annotated[
        Literal["none", "dense", "profile", "all"],
        about(
            "dense: what every token uses; profile: and the profile's experts; all: up to the budget.", flag="--warm"
        ),
    ] = "profile"
    ready_requires: Annotated[
        Literal["loaded", "warm", "rehearsed"], about("When /readyz and systemd are told that the daemon is ready.")
    ] = "loaded"


class ServerSettings(Section, frozen=True, kw_only=True):
    """Who can reach the daemon, and how much they can ask."""

    host: Annotated[str, about("Address to listen on.", flag="--host", min_length=1)] = "127.0.0.1"
    port: Annotated[int, about("Port to listen on; 0 takes a free one.", flag="--port", ge=0, le=65535)] = 8642
    socket: Annotated[
        str,
        about(
            "Unix socket for the admin verbs; auto is admin.sock in RUNTIME_DIRECTORY or XDG_RUNTIME_DIR/expertd; "
            "empty is none.",
            kind="path",
            flag="--socket",
        ),
    ] = "auto"
    api_keys_file: Annotated[
        str,
        about(
            "File with one key a line; auto is the systemd credential api-keys where there is one; empty is none.",
            kind="path",
            reload=True,
        ),
    ] = "auto"
    admin_key_file: Annotated[
        str,
        about(
            "File with the key for admin verbs over TCP; auto is the systemd credential admin-key; empty is none.",
            kind="path",
            reload=True,
        ),
    ] = "auto"
    max_queue: Annotated[int, about("Requests that may wait; more get 429.", ge=0, le=100_000)] = 16
    order: Annotated[
        Literal["arrival", "overlap"],
        about(
            "Who goes next: arrival is first come, first served; overlap lets one go first whose conversation or "
            "profile uses experts that are in memory, past nobody more than four times nor after ten seconds."
        ),
    ] = "arrival"
    max_body: Annotated[int, about("Largest request body.", kind="size", ge=1 << 10)] = 16 << 20
    max_tokens: Annotated[int, about("Most tokens of one answer; 0 is no limit.", ge=0)] = 0
    request_seconds: Annotated[float, about("Longest time for one answer; 0 is no limit.", kind="seconds", ge=0)] = 0.0
    allowed_hosts: Annotated[
        list[str], about("Host headers accepted besides loopback names; bound to loopback others are refused.")
    ] = msgspec.field(default_factory=list)
    cors_origins: Annotated[list[str], about("Web origins that may call, besides those on localhost.")] = msgspec.field(
        default_factory=list
    )
    tls_certificate: Annotated[str, about("PEM file with the certificate chain; needs tls_key.", kind="path")] = ""
    tls_key: Annotated[str, about("PEM file with the private key; needs tls_certificate.", kind="path")] = ""
    drain_seconds: Annotated[
        float, about("Time for running streams to end at a stop.", kind="seconds", ge=0, le=3600)
    ] = 8.0


class LogSettings(Section, frozen=True, kw_only=True):
    """What is said, and to whom."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], about("Least important lines shown.", reload=True)
    ] = "info"
    format: Annotated[
        Literal["auto", "text", "journal", "json"],
        about("auto is journal under systemd and text elsewhere.", flag="--log-format"),
    ] = "auto"


class TraceSettings(Section, frozen=True, kw_only=True):
    """Recorded routing. Off by default: which experts a text used tells something of the text."""

    enabled: Annotated[bool, about("Record from the start.")] = False
    path: Annotated[str, about("File to write; empty is routes.trace in the state directory.", kind="path")] = ""
    max_bytes: Annotated[int, about("Size at which recording stops.", kind="size", ge=1 << 12)] = 256 << 20


class StateSettings(Section, frozen=True, kw_only=True):
    """Where the daemon keeps what outlives it."""

    directory: Annotated[
        str, about("auto is STATE_DIRECTORY, else XDG_STATE_HOME/expertd.", kind="path", min_length=1)
    ] = "auto"


SECTIONS: dict[str, type[Section]] = {
    "model": ModelSettings,
    "engine": EngineSettings,
    "sampling": SamplingSettings,
    "cache": CacheSettings,
    "profile": ProfileSettings,
    "warm": WarmSettings,
    "server": ServerSettings,
    "log": LogSettings,
    "trace": TraceSettings,
    "state": StateSettings,
}
