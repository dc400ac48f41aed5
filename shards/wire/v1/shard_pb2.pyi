from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Command(_message.Message):
    __slots__ = ("hello", "submit", "prompt", "pace", "cancel", "pin", "unpin", "clear", "heartbeat", "hand_over")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    prompt: Prompt
    pace: Pace
    cancel: Cancel
    pin: Pin
    unpin: Unpin
    clear: Clear
    heartbeat: Heartbeat
    hand_over: HandOver
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., pin: _Optional[_Union[Pin, _Mapping]] = ..., unpin: _Optional[_Union[Unpin, _Mapping]] = ..., clear: _Optional[_Union[Clear, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., hand_over: _Optional[_Union[HandOver, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router", "heartbeat_ms")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    router: str
    heartbeat_ms: int
    def __init__(self, router: _Optional[str] = ..., heartbeat_ms: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request", "prompt_tokens", "max_new_tokens", "domain", "rank", "deadline_ms", "prefill_slice", "choices", "sampling", "trace", "preemptible", "answered_tokens", "source", "reuse", "adapter")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SLICE_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIBLE_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request: int
    prompt_tokens: int
    max_new_tokens: int
    domain: str
    rank: int
    deadline_ms: int
    prefill_slice: int
    choices: int
    sampling: Sampling
    trace: str
    preemptible: bool
    answered_tokens: int
    source: Source
    reuse: Reuse
    adapter: str
    def __init__(self, request: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., domain: _Optional[str] = ..., rank: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., prefill_slice: _Optional[int] = ..., choices: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., trace: _Optional[str] = ..., preemptible: _Optional[bool] = ..., answered_tokens: _Optional[int] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., reuse: _Optional[_Union[Reuse, _Mapping]] = ..., adapter: _Optional[str] = ...) -> None: ...

class Reuse(_message.Message):
    __slots__ = ("start", "stop", "budget")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    start: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[int]
    budget: float
    def __init__(self, start: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[int]] = ..., budget: _Optional[float] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("address", "tokens")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    address: str
    tokens: int
    def __init__(self, address: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "top_logprobs", "logit_bias", "min_new_tokens", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    top_logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    min_new_tokens: int
    grammar: Grammar
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_new_tokens: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("form", "text")
    class Form(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        FORM_UNSPECIFIED: _ClassVar[Grammar.Form]
        JSON_SCHEMA: _ClassVar[Grammar.Form]
        REGEX: _ClassVar[Grammar.Form]
        CHOICE: _ClassVar[Grammar.Form]
        RULES: _ClassVar[Grammar.Form]
    FORM_UNSPECIFIED: Grammar.Form
    JSON_SCHEMA: Grammar.Form
    REGEX: Grammar.Form
    CHOICE: Grammar.Form
    RULES: Grammar.Form
    FORM_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    form: Grammar.Form
    text: str
    def __init__(self, form: _Optional[_Union[Grammar.Form, str]] = ..., text: _Optional[str] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("request", "token_ids")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request: int
    token_ids: bytes
    def __init__(self, request: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("request", "rank", "prefill_slice", "paused")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SLICE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    request: int
    rank: int
    prefill_slice: int
    paused: bool
    def __init__(self, request: _Optional[int] = ..., rank: _Optional[int] = ..., prefill_slice: _Optional[int] = ..., paused: _Optional[bool] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: int
    def __init__(self, request: _Optional[int] = ...) -> None: ...

class Pin(_message.Message):
    __slots__ = ("call", "name", "domain", "keys", "for_ms")
    CALL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FOR_MS_FIELD_NUMBER: _ClassVar[int]
    call: int
    name: str
    domain: str
    keys: bytes
    for_ms: int
    def __init__(self, call: _Optional[int] = ..., name: _Optional[str] = ..., domain: _Optional[str] = ..., keys: _Optional[bytes] = ..., for_ms: _Optional[int] = ...) -> None: ...

class Unpin(_message.Message):
    __slots__ = ("call", "name")
    CALL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    call: int
    name: str
    def __init__(self, call: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class Clear(_message.Message):
    __slots__ = ("call", "domain")
    CALL_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    call: int
    domain: str
    def __init__(self, call: _Optional[int] = ..., domain: _Optional[str] = ...) -> None: ...

class HandOver(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, address: _Optional[_Iterable[str]] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("epoch", "step", "welcome", "tokens", "progress", "finished", "load", "cache", "predictions", "answers", "adapters")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    welcome: Welcome
    tokens: Tokens
    progress: _containers.RepeatedCompositeFieldContainer[Progress]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    load: Load
    cache: _containers.RepeatedCompositeFieldContainer[CacheEvent]
    predictions: _containers.RepeatedCompositeFieldContainer[Prediction]
    answers: _containers.RepeatedCompositeFieldContainer[CacheAnswer]
    adapters: Adapters
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., progress: _Optional[_Iterable[_Union[Progress, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., cache: _Optional[_Iterable[_Union[CacheEvent, _Mapping]]] = ..., predictions: _Optional[_Iterable[_Union[Prediction, _Mapping]]] = ..., answers: _Optional[_Iterable[_Union[CacheAnswer, _Mapping]]] = ..., adapters: _Optional[_Union[Adapters, _Mapping]] = ...) -> None: ...

class Adapters(_message.Message):
    __slots__ = ("known", "loaded", "active", "slots")
    class Names(_message.Message):
        __slots__ = ("name",)
        NAME_FIELD_NUMBER: _ClassVar[int]
        name: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, name: _Optional[_Iterable[str]] = ...) -> None: ...
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    known: Adapters.Names
    loaded: _containers.RepeatedScalarFieldContainer[str]
    active: _containers.RepeatedScalarFieldContainer[str]
    slots: int
    def __init__(self, known: _Optional[_Union[Adapters.Names, _Mapping]] = ..., loaded: _Optional[_Iterable[str]] = ..., active: _Optional[_Iterable[str]] = ..., slots: _Optional[int] = ...) -> None: ...

class CacheAnswer(_message.Message):
    __slots__ = ("call", "blocks", "held_blocks")
    CALL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    call: int
    blocks: int
    held_blocks: int
    def __init__(self, call: _Optional[int] = ..., blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("shard", "model", "block_tokens", "context_tokens", "vocabulary", "window_tokens", "max_requests", "version", "device", "dtype", "snapshot_follows", "keeps_cache", "shapes_answers", "heartbeat_ms", "continues_answers", "kv_address", "kv_group")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_CACHE_FIELD_NUMBER: _ClassVar[int]
    SHAPES_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_GROUP_FIELD_NUMBER: _ClassVar[int]
    shard: str
    model: str
    block_tokens: int
    context_tokens: int
    vocabulary: int
    window_tokens: int
    max_requests: int
    version: str
    device: str
    dtype: str
    snapshot_follows: bool
    keeps_cache: bool
    shapes_answers: bool
    heartbeat_ms: int
    continues_answers: bool
    kv_address: str
    kv_group: bytes
    def __init__(self, shard: _Optional[str] = ..., model: _Optional[str] = ..., block_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., vocabulary: _Optional[int] = ..., window_tokens: _Optional[int] = ..., max_requests: _Optional[int] = ..., version: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., snapshot_follows: _Optional[bool] = ..., keeps_cache: _Optional[bool] = ..., shapes_answers: _Optional[bool] = ..., heartbeat_ms: _Optional[int] = ..., continues_answers: _Optional[bool] = ..., kv_address: _Optional[str] = ..., kv_group: _Optional[bytes] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("request", "choice", "count", "token_ids", "logprobs")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request: _containers.RepeatedScalarFieldContainer[int]
    choice: _containers.RepeatedScalarFieldContainer[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    token_ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, request: _Optional[_Iterable[int]] = ..., choice: _Optional[_Iterable[int]] = ..., count: _Optional[_Iterable[int]] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("entry", "logprob", "top_token_ids", "top_logprobs")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    entry: int
    logprob: float
    top_token_ids: bytes
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, entry: _Optional[int] = ..., logprob: _Optional[float] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("request", "computed_tokens", "cached_tokens", "blended_tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLENDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: int
    computed_tokens: int
    cached_tokens: int
    blended_tokens: int
    def __init__(self, request: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., blended_tokens: _Optional[int] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("request", "ttft_s")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    request: int
    ttft_s: float
    def __init__(self, request: _Optional[int] = ..., ttft_s: _Optional[float] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("request", "choice", "reason", "stop", "prompt_tokens", "cached_tokens", "output_tokens", "message", "cause", "blended_tokens", "by_token")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Finished.Reason]
        STOP: _ClassVar[Finished.Reason]
        LENGTH: _ClassVar[Finished.Reason]
        CANCELLED: _ClassVar[Finished.Reason]
        REJECTED: _ClassVar[Finished.Reason]
        FAILED: _ClassVar[Finished.Reason]
        DEADLINE: _ClassVar[Finished.Reason]
    REASON_UNSPECIFIED: Finished.Reason
    STOP: Finished.Reason
    LENGTH: Finished.Reason
    CANCELLED: Finished.Reason
    REJECTED: Finished.Reason
    FAILED: Finished.Reason
    DEADLINE: Finished.Reason
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CAUSE_UNSPECIFIED: _ClassVar[Finished.Cause]
        INVALID: _ClassVar[Finished.Cause]
        CONTEXT: _ClassVar[Finished.Cause]
        OVERLOADED: _ClassVar[Finished.Cause]
        DRAINING: _ClassVar[Finished.Cause]
        GRAMMAR: _ClassVar[Finished.Cause]
    CAUSE_UNSPECIFIED: Finished.Cause
    INVALID: Finished.Cause
    CONTEXT: Finished.Cause
    OVERLOADED: Finished.Cause
    DRAINING: Finished.Cause
    GRAMMAR: Finished.Cause
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    BLENDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BY_TOKEN_FIELD_NUMBER: _ClassVar[int]
    request: int
    choice: int
    reason: Finished.Reason
    stop: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    message: str
    cause: Finished.Cause
    blended_tokens: int
    by_token: bool
    def __init__(self, request: _Optional[int] = ..., choice: _Optional[int] = ..., reason: _Optional[_Union[Finished.Reason, str]] = ..., stop: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., message: _Optional[str] = ..., cause: _Optional[_Union[Finished.Cause, str]] = ..., blended_tokens: _Optional[int] = ..., by_token: _Optional[bool] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "waiting_tokens", "blocks_total", "blocks_free", "prefill_s_per_token", "step_s", "draining", "blocks_pinnable", "drafted_tokens", "accepted_tokens", "disk", "peers", "uncaptured_steps", "model_drafted_tokens", "model_accepted_tokens")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PINNABLE_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    UNCAPTURED_STEPS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_tokens: int
    blocks_total: int
    blocks_free: int
    prefill_s_per_token: float
    step_s: float
    draining: bool
    blocks_pinnable: int
    drafted_tokens: int
    accepted_tokens: int
    disk: DiskUse
    peers: PeerUse
    uncaptured_steps: int
    model_drafted_tokens: int
    model_accepted_tokens: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., prefill_s_per_token: _Optional[float] = ..., step_s: _Optional[float] = ..., draining: _Optional[bool] = ..., blocks_pinnable: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., disk: _Optional[_Union[DiskUse, _Mapping]] = ..., peers: _Optional[_Union[PeerUse, _Mapping]] = ..., uncaptured_steps: _Optional[int] = ..., model_drafted_tokens: _Optional[int] = ..., model_accepted_tokens: _Optional[int] = ...) -> None: ...

class PeerUse(_message.Message):
    __slots__ = ("fetches", "blocks", "failed", "received_bytes", "seconds", "taken_over")
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_OVER_FIELD_NUMBER: _ClassVar[int]
    fetches: int
    blocks: int
    failed: int
    received_bytes: int
    seconds: float
    taken_over: int
    def __init__(self, fetches: _Optional[int] = ..., blocks: _Optional[int] = ..., failed: _Optional[int] = ..., received_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., taken_over: _Optional[int] = ...) -> None: ...

class DiskUse(_message.Message):
    __slots__ = ("held", "written", "read", "broken", "failed", "skipped")
    HELD_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    held: int
    written: int
    read: int
    broken: int
    failed: int
    skipped: int
    def __init__(self, held: _Optional[int] = ..., written: _Optional[int] = ..., read: _Optional[int] = ..., broken: _Optional[int] = ..., failed: _Optional[int] = ..., skipped: _Optional[int] = ...) -> None: ...

class CacheEvent(_message.Message):
    __slots__ = ("kind", "keys", "tier")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[CacheEvent.Kind]
        STORED: _ClassVar[CacheEvent.Kind]
        EVICTED: _ClassVar[CacheEvent.Kind]
        CLEARED: _ClassVar[CacheEvent.Kind]
    KIND_UNSPECIFIED: CacheEvent.Kind
    STORED: CacheEvent.Kind
    EVICTED: CacheEvent.Kind
    CLEARED: CacheEvent.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    kind: CacheEvent.Kind
    keys: bytes
    tier: str
    def __init__(self, kind: _Optional[_Union[CacheEvent.Kind, str]] = ..., keys: _Optional[bytes] = ..., tier: _Optional[str] = ...) -> None: ...

class AssetsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AssetPiece(_message.Message):
    __slots__ = ("file", "content", "last")
    FILE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    file: str
    content: bytes
    last: bool
    def __init__(self, file: _Optional[str] = ..., content: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...
