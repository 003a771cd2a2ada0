"""The one configuration: frozen sections with defaults, the same for YAML, environment, flags and Helm values.

Precedence is flag > environment (``TWINPOOL_ROUTER__HTTP_PORT=8000``) > file > default; see ``config_loader``.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Disaggregate = Literal["always", "auto", "never"]


class Section(BaseModel):
    """A frozen part of the configuration; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelConfig(Section):
    """Which model is served."""

    path: str = Field("demo", description="demo, a local Hugging Face folder, or a hub id")
    revision: str | None = Field(None, description="hub revision; None takes the default branch")
    name: str | None = Field(None, description="name in requests; None takes the folder's or hub id's")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto takes the checkpoint's")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes cuda where present")
    kernels: Literal["auto", "reference", "native"] = Field(
        "auto", description="native: C++ for CPUs, compiled on first use; reference: torch; auto takes the faster"
    )
    kernel_tuning: Literal["auto", "off"] = Field(
        "auto", description="auto times attention's tiles at the first start on a kind of GPU; off takes the defaults"
    )
    max_model_len: int | None = Field(None, gt=0, description="longest prompt plus answer; None takes the model's")


class EngineSection(Section):
    """Size and pace of one engine."""

    block_size: int = Field(16, gt=0, description="tokens per KV block")
    kv_memory_gib: float | None = Field(
        None, gt=0, description="memory for KV; None takes 1 GiB on CPU, 85 % of what is left on GPU"
    )
    num_blocks: int | None = Field(None, gt=1, description="KV blocks, overrides kv_memory_gib")
    max_num_seqs: int = Field(64, gt=0, description="most requests in one batch")
    max_num_batched_tokens: int = Field(2048, gt=0, description="token budget of one step")
    prefill_chunk: int = Field(512, gt=0, description="most prompt tokens of one request per step")
    prefix_caching: bool = Field(True, description="reuse KV of equal prefixes")
    local_prefill_budget: int = Field(128, gt=0, description="prompt tokens per step beside decoding requests")
    threads: int = Field(1, ge=0, description="CPU threads for computation; 0 leaves torch's default")
    cores: tuple[int, ...] = Field((), description="processor cores that these threads keep to; none: any")
    speculation: Literal["off", "ngram"] = Field(
        "ngram", description="ngram verifies drafts found in the context, while that is measured to pay (decode)"
    )
    num_drafts: int = Field(4, gt=0, description="most drafts of one request per step")
    ngram_min: int = Field(2, gt=0, description="shortest repetition, in tokens, that gives drafts")
    ngram_max: int = Field(4, gt=0, description="longest repetition, in tokens, that is looked for")

    @model_validator(mode="after")
    def _ngram_lengths(self) -> Self:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min ({self.ngram_min}) must not exceed ngram_max ({self.ngram_max})")
        return self


class PoolSection(Section):
    """One pool of workers."""

    replicas: int = Field(1, ge=0, description="workers that `twinpool up` starts")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(0, ge=0, le=65535, description="port of the first worker; 0 picks free ones")
    kv_port: int = Field(0, ge=0, le=65535, description="prefill: port of the kv.v1 service; 0 picks a free one")
    advertise: str | None = Field(None, description="host name or address that peers dial; None takes host")
    health_port: int | None = Field(
        None, ge=0, le=65535, description="port for grpc.health.v1 alone, in plain text, for probes; None opens none"
    )
    worker_id: str | None = Field(None, description="identity; None takes role and port")
    tp_size: int = Field(1, gt=0, description="tensor parallel ranks of each pipeline stage of a worker")
    pp_size: int = Field(1, gt=0, description="pipeline stages of a worker; its ranks are tp_size × pp_size processes")
    launcher: Literal["local", "ray"] = Field(
        "local", description="how ranks start: processes on this machine, or on the nodes of a Ray cluster"
    )
    node_labels: tuple[str, ...] = Field(
        (), description="key=value labels of the Ray nodes that may run the pool's workers"
    )
    engine: EngineSection = EngineSection()
    drain_timeout_s: float = Field(30.0, ge=0, description="time that running requests get after SIGTERM")


class RouterSection(Section):
    """The router."""

    host: str = Field("127.0.0.1", description="address to listen on")
    grpc_port: int = Field(8100, ge=0, le=65535, description="public gRPC; 0 picks a free port")
    http_port: int = Field(8000, ge=0, le=65535, description="OpenAI-compatible HTTP; 0 picks a free port")
    health_port: int | None = Field(
        None, ge=0, le=65535, description="port for grpc.health.v1 alone, in plain text, for probes; None opens none"
    )
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="admin.v1 on 127.0.0.1, for holders of session.token; None opens none (`twinpool up`: takes 8101, "
        "or a free port where that is in use or grpc_port is 0), 0 picks a free one",
    )
    keepalive_s: float = Field(
        30.0, gt=0, description="a client's connection is asked for a sign of life after so much silence"
    )
    keepalive_timeout_s: float = Field(
        10.0, gt=0, description="without a sign of life within this, the connection and its requests end"
    )
    opening_timeout_s: float = Field(
        30.0, gt=0, description="a client's connection that has sent no request (HTTP) or no greeting (gRPC) is closed"
    )
    disaggregate: Disaggregate = Field("auto", description="when prompts go to the prefill pool")
    pace_weight: float = Field(
        0.25,
        ge=0,
        description="auto: what a second that running answers lose to a prompt on their decode worker counts against "
        "a second before a first token",
    )
    route_hints: bool = Field(
        False, description="take x-twinpool-route (local or remote) from a request's metadata; for measurements"
    )
    max_queued: int = Field(512, ge=0, description="requests admitted at once; more are answered RESOURCE_EXHAUSTED")
    max_queue_s: float = Field(
        120.0, gt=0, description="requests that would wait longer than this, by estimate, are refused at once"
    )
    prefill_window: int = Field(
        2048, gt=0, description="prompt tokens per prefill worker sent ahead of their first token; the rest queues here"
    )
    default_deadline_s: float = Field(600.0, gt=0, description="for requests that bring none")
    max_attempts: int = Field(20, gt=0, description="dispatches of one request, losses included")
    discovery: Literal["static", "dns", "controller"] = Field(
        "static",
        description="where workers are found: static takes router.workers, dns resolves the names there to "
        "all their addresses, controller asks the process at controller.host that starts them",
    )
    discovery_interval_s: float = Field(2.0, gt=0, description="dns: names are resolved this often")
    workers: tuple[str, ...] = Field((), description="addresses (host:port) of workers, both pools; dns: names")
    drain_timeout_s: float = Field(30.0, ge=0, description="time that requests in flight get after SIGTERM")
    kept_traces: int = Field(1000, gt=0, description="ended requests that `twinpool trace` can tell of")
    otlp_endpoint: str | None = Field(
        None, description="OpenTelemetry collector that gets a trace per request (OTLP gRPC, http://host:4317)"
    )
    tool_format: Literal["auto", "hermes", "llama"] = Field(
        "auto", description="how the model writes tool calls; auto sees it in the chat template"
    )
    reasoning: Literal["auto", "off"] = Field(
        "auto", description="auto sends <think>...</think> as reasoning_content, if the chat template knows the tags"
    )

    @property
    def known_admin_port(self) -> int:
        """The port that `twinpool drain`, `flush-cache` and `log-level` dial."""
        return 8101 if self.admin_port is None else self.admin_port

    @model_validator(mode="after")
    def _discovery_finds_something(self) -> Self:
        if self.discovery == "dns" and not self.workers:
            raise ValueError("discovery dns resolves the names in router.workers; list them (prefill:9000,decode:9000)")
        return self

    @field_validator("workers")
    @classmethod
    def _workers_have_ports(cls, workers: tuple[str, ...]) -> tuple[str, ...]:
        for address in workers:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(f"{address!r} is no host:port; write each address with the port of the worker")
        return workers


class RaySection(Section):
    """The Ray cluster that places workers, or ranks of a worker."""

    address: str | None = Field(
        None, description="host:port of a running Ray cluster; None starts a head per worker, which followers join"
    )
    namespace: str = Field("twinpool", description="Ray namespace of placement groups and actors")
    placement_group: str | None = Field(
        None,
        description="placement group in the namespace whose bundles take the ranks in order, the first on the node of "
        "this process; None makes one",
    )
    head_port: int = Field(6379, ge=0, le=65535, description="port of an own head; 0 picks a free one")
    node_cpus: int | None = Field(None, ge=0, description="CPUs that an own node offers; None takes the machine's")
    cpus_per_rank: float = Field(1.0, gt=0, description="CPUs that each rank reserves, beside its GPU if it has one")
    object_store_mib: int = Field(80, ge=75, description="object store of an own node; nothing of ours uses it")
    placement_timeout_s: float = Field(600.0, gt=0, description="time for enough nodes to join and be free")
    orphan_s: float = Field(
        600.0, ge=0, description="a worker of the controller's that has lost Ray serves on for so long, then drains"
    )


class ControllerSection(Section):
    """The process that starts and drains workers: ``twinpool up``, or ``twinpool serve controller``."""

    launcher: Literal["local", "ray"] = Field(
        "local", description="where `twinpool up` runs workers: on this machine, or on the Ray cluster at ray.address"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="gRPC for routers and `twinpool scale`; None takes 8200 (`twinpool up`: a free port where "
        "that is in use or router.grpc_port is 0), 0 picks a free one",
    )

    @property
    def known_port(self) -> int:
        """The port that routers and `twinpool scale` dial."""
        return 8200 if self.port is None else self.port


class TransportSection(Section):
    """How KV travels."""

    connector: Literal["auto", "nixl", "nccl", "local"] = Field(
        "auto", description="auto takes nixl if installed, else nccl (torch.distributed; gloo on CPU)"
    )
    ucx_tls: str | None = Field(None, description="UCX_TLS; None lets UCX choose")
    ucx_net_devices: str | None = Field(
        None, description="UCX_NET_DEVICES; None takes lo on loopback, else UCX's choice"
    )
    require: str | None = Field(None, description="refuse links whose transport does not contain this, e.g. rdma")
    read_timeout_s: float = Field(20.0, gt=0, description="a read that takes longer is fenced by destroying its link")
    hold_timeout_s: float = Field(120.0, gt=0, description="longest life of a promised KV")
    open_timeout_s: float = Field(10.0, gt=0, description="a hold that no decode worker joined ends after this")


class SessionSection(Section):
    """Leases between processes."""

    report_interval_s: float = Field(0.25, gt=0, description="signs of life are sent this often")
    suspect_after_s: float = Field(1.0, gt=0, description="silence after which a peer gets no new work")
    dead_after_s: float = Field(3.0, gt=0, description="silence after which a session ends")
    token: str | None = Field(None, description="cluster token that peers must present; None only on loopback")

    @model_validator(mode="after")
    def _intervals_grow(self) -> Self:
        if not self.report_interval_s < self.suspect_after_s < self.dead_after_s:
            raise ValueError(
                f"report_interval_s ({self.report_interval_s}) < suspect_after_s ({self.suspect_after_s}) < "
                f"dead_after_s ({self.dead_after_s}) must hold; else a healthy peer is taken for dead"
            )
        return self


class TlsSection(Section):
    """Encryption. The files (PEM) are read again when they change: certificates rotate without a restart."""

    cert: str | None = Field(
        None, description="certificate chain of this process; with key and ca it turns TLS on between all parts"
    )
    key: str | None = Field(None, description="private key of cert")
    ca: str | None = Field(None, description="authority from which routers' and workers' certificates must come")
    server_name: str | None = Field(
        None, description="name that every worker's certificate carries; None takes the dialled host or address"
    )
    public: bool = Field(True, description="TLS on the router's gRPC and HTTP ports too; false behind a TLS proxy")
    public_cert: str | None = Field(None, description="certificate chain for the router's public ports; None: cert")
    public_key: str | None = Field(None, description="private key of public_cert")
    public_client_ca: str | None = Field(
        None, description="clients of the router must show a certificate of this authority; None asks for none"
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if any((self.cert, self.key, self.ca)) and not all((self.cert, self.key, self.ca)):
            raise ValueError("cert, key and ca must be set together; set all three, or none for no TLS")
        if bool(self.public_cert) != bool(self.public_key):
            raise ValueError("public_cert and public_key must be set together; set both or neither")
        if self.public_client_ca and not self.is_public:
            raise ValueError("public_client_ca needs TLS on the public ports; set public_cert and public_key, or cert")
        return self

    @property
    def is_internal(self) -> bool:
        """Whether routers and workers speak TLS to each other."""
        return self.cert is not None

    @property
    def is_public(self) -> bool:
        """Whether the router's public ports speak TLS."""
        return self.public and bool(self.public_cert or self.cert)


class AuthSection(Section):
    """Who may use the router's public ports; without keys, everybody who can reach them."""

    keys_file: str | None = Field(
        None, description="YAML file of API keys (docs/security.md), read again when it changes"
    )
    keys: tuple[str, ...] = Field((), description="API keys as name:sha256, with limits as :max_in_flight=8 and so on")


class ClientSection(Section):
    """How the command line reaches a router."""

    api_key: str | None = Field(None, description="bearer token for routers that ask for API keys")
    tls: bool = Field(False, description="TLS with the system's authorities; a file below turns TLS on too")
    tls_ca: str | None = Field(None, description="authority of the router's certificate; None takes the system's")
    tls_cert: str | None = Field(None, description="certificate chain for routers that ask for one")
    tls_key: str | None = Field(None, description="private key of tls_cert")
    tls_server_name: str | None = Field(None, description="name in the router's certificate; None takes the address")


class FollowerSection(Section):
    """A node that joins the Ray head of a worker (ray.address) and lends itself to ranks."""

    host: str = Field("127.0.0.1", description="address of this node, at which its Ray processes and health listen")
    port: int = Field(0, ge=0, le=65535, description="health port; 0 picks a free one")


class LoggingSection(Section):
    """Logs."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe line that is shown")
    format: Literal["text", "json"] = Field("text", description="json: one object per line")


class Config(Section):
    """Everything that can be configured."""

    model: ModelConfig = ModelConfig()
    router: RouterSection = RouterSection()
    prefill: PoolSection = PoolSection()
    decode: PoolSection = PoolSection()
    transport: TransportSection = TransportSection()
    session: SessionSection = SessionSection()
    ray: RaySection = RaySection()
    follower: FollowerSection = FollowerSection()
    tls: TlsSection = TlsSection()
    auth: AuthSection = AuthSection()
    client: ClientSection = ClientSection()
    controller: ControllerSection = ControllerSection()
    logging: LoggingSection = LoggingSection()
