"""The two things a user writes: a `Job` (what to train) and a `Fleet` (where).

Both are frozen. The text under a field is its help, its JSON Schema description and its line in
docs/reference. A field whose default is None is *derived* (see `elastic.base.resolve`), and
`elastic config show` says from what. Units are in the names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from elastic.base.outer_config import Outer
from elastic.base.schema import mistake
from elastic.base.section import Name, Positive, Section, Share

# --------------------------------------------------------------------------------------- model


class DecoderModel(Section):
    """Our own decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    kind: Literal["decoder"] = "decoder"
    """`decoder`: the decoder of `elastic.training.model`."""
    d_model: Positive = 256
    """Width of the residual stream."""
    num_layers: Positive = 4
    """Number of blocks."""
    num_heads: Positive = 4
    """Query heads; divides `d_model`."""
    num_kv_heads: Positive | None = None
    """Key and value heads; divides `num_heads`. Derived: `num_heads`."""
    ffn_dim: Positive | None = None
    """Width of the SwiGLU layer. Derived: 8/3 of `d_model`, rounded up to a multiple of 16."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the mean square in RMSNorm."""
    tied_head: bool = True
    """The output head is the embedding."""
    qk_norm: bool = False
    """RMSNorm on queries and keys, per head."""

    @model_validator(mode="after")
    def _heads_divide(self) -> DecoderModel:
        if self.d_model % self.num_heads:
            raise mistake(f"num_heads {self.num_heads} does not divide d_model {self.d_model}", "num_heads")
        width = self.d_model // self.num_heads
        if width % 2:
            raise mistake(f"d_model / num_heads is {width}; rotary positions need it even", "num_heads")
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            why = f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}"
            raise mistake(why, "num_kv_heads")
        return self


class HuggingFaceModel(Section):
    """Any causal language model of `transformers`, from a local folder (extra `hf`)."""

    kind: Literal["hf"]
    """`hf`: a Hugging Face causal language model."""
    path: str
    """Local folder with `config.json` (and weights, if `weights` is true), or a `config.json`."""
    weights: bool = False
    """Start from the folder's weights instead of fresh ones."""


class PythonModel(Section):
    """A model of your own: a Python function that returns an `nn.Module`."""

    kind: Literal["python"]
    """`python`: call `entry`."""
    entry: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """`module:function`, called as `function(vocab_size=..., seq_len=..., **arguments)`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of your function."""


Model = Annotated[DecoderModel | HuggingFaceModel | PythonModel, Field(discriminator="kind")]

# ---------------------------------------------------------------------------------------- data


class BytesTokenizer(Section):
    """One token per UTF-8 byte, and 256 for end of document."""

    kind: Literal["bytes"] = "bytes"
    """`bytes`: built in."""


class TokenizersTokenizer(Section):
    """A `tokenizer.json` of the `tokenizers` library (extra `hf`)."""

    kind: Literal["tokenizers"]
    """`tokenizers`: Hugging Face tokenizers."""
    file: str
    """Path of `tokenizer.json`."""
    end_of_document: str = "<|endoftext|>"
    """Token put between documents."""


class TiktokenTokenizer(Section):
    """A `.tiktoken` rank file (extra `tiktoken`)."""

    kind: Literal["tiktoken"]
    """`tiktoken`: OpenAI's tiktoken."""
    file: str
    """Path of the `.tiktoken` file of base64 tokens and ranks."""
    pattern: str
    """Regular expression that splits text before merging, as the model's authors give it."""
    end_of_document: str = "<|endoftext|>"
    """Special token put between documents; gets the first free id."""


Tokenizer = Annotated[BytesTokenizer | TokenizersTokenizer | TiktokenTokenizer, Field(discriminator="kind")]


class Data(Section):
    """What to read, and how to cut it into sequences."""

    sources: Annotated[list[str], Field(min_length=1)] = ["builtin:stdlib"]
    """Files, folders, globs or fsspec URLs; `builtin:stdlib` is Python's own library source."""
    validation_sources: list[str] | None = None
    """Held-out sources. Without them, `validation_share` of the files is held out."""
    validation_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share of the files held out, chosen by the hash of their names."""
    text_column: str = "text"
    """Column of tables and key of JSON lines; dots reach into nested records."""
    on_bad_file: Literal["stop", "skip"] = "stop"
    """What to do with a file that cannot be read: stop, or skip it and name it."""
    max_document_mb: Annotated[float, Field(gt=0)] = 64.0
    """Documents and JSON lines above this size are refused, with file and line."""
    tokenizer: Tokenizer = BytesTokenizer()
    """How text becomes tokens."""
    seq_len: Positive = 256
    """Tokens a sequence predicts; it holds one more."""
    cache_folder: str | None = None
    """Where tokenised shards lie, a path. Derived: `data/` in the run folder; `~/.cache/elastic` on every
    node if the run folder is in a bucket."""


# --------------------------------------------------------------------------------------- budget


class Budget(Section):
    """When the run is done, and when it must stop before that."""

    tokens: Positive | None = None
    """Tokens to train on, over all islands. Give this or `epochs`."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training sequences. Give this or `tokens`."""
    max_hours: Annotated[float, Field(gt=0)] | None = None
    """Stop, resumable, after this many hours of this run, all attempts together."""
    max_cost: Annotated[float, Field(gt=0)] | None = None
    """Stop, resumable, at this cost; the fleet's prices must be set."""

    @model_validator(mode="after")
    def _one_measure(self) -> Budget:
        if self.tokens is None and self.epochs is None:
            raise mistake("say how much to train: budget.tokens or budget.epochs")
        if self.tokens is not None and self.epochs is not None:
            raise mistake("give budget.tokens or budget.epochs, not both", "epochs")
        return self


class Inner(Section):
    """The optimiser inside an island: AdamW, warm-up, then cosine, by progress."""

    batch_sequences: Positive = 32
    """Sequences in one inner step of one island, at any number of workers."""
    micro_batch_sequences: Positive | None = None
    """Sequences a worker holds at once. Derived: `batch_sequences`, at most 32."""
    lr: Annotated[float, Field(gt=0)] = 3e-3
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's decay of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """AdamW's decoupled weight decay, on matrices only (not on norms and biases)."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """Global gradient norm above which gradients are scaled down."""
    warmup_share: Share = 0.02
    """Share of the budget in which the rate rises linearly."""
    final_lr_share: Share = 0.1
    """Rate at the end, as a share of the peak."""
    compute_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the forward and backward pass; `auto`: bf16 on accelerators, fp32 on CPU."""


class Checkpoint(Section):
    """What is written, how often, how long it is kept."""

    snapshot_every: Positive = 10
    """Outer steps between two full snapshots of the outer state."""
    island_every: Positive = 5
    """Outer steps between two checkpoints of an island."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Complete snapshots, and complete checkpoints of each island, that are kept."""


class Validation(Section):
    """How the outer parameters are judged while they train."""

    every: Positive = 10
    """Outer steps between two validations."""
    sequences: Positive = 64
    """Held-out sequences of a validation during the run; the last one uses them all."""


class Logging(Section):
    """Where facts go besides the run folder's events."""

    every_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds between two progress lines off a terminal."""
    tensorboard: bool = True
    """Write TensorBoard files into `tensorboard/`."""
    wandb_project: str | None = None
    """Send metrics to this Weights & Biases project (extra `wandb`)."""


class Job(Section):
    """What to train."""

    name: Name
    """Name of the job; also of its default run folder."""
    run_folder: str | None = None
    """Folder or fsspec URL of the run. Derived: `runs/<name>`."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the parameters and of the order of the data."""
    init_from: str | None = None
    """Start from the weights of another run folder or of a Hugging Face folder."""
    model: Model = DecoderModel()
    """The model."""
    data: Data = Data()
    """The corpus."""
    budget: Budget
    """How much to train."""
    inner: Inner = Inner()
    """The optimiser inside an island."""
    outer: Outer = Outer()
    """The optimiser between islands."""
    checkpoint: Checkpoint = Checkpoint()
    """What is kept."""
    validation: Validation = Validation()
    """How it is judged."""
    logging: Logging = Logging()
    """Who is told."""


# ---------------------------------------------------------------------------------------- fleet


class Workers(Section):
    """How many workers an island may have."""

    min: Positive = 1
    """The island starts with this many."""
    max: Positive = 1
    """The island grows to this many."""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        """`workers: 2` means exactly two, `workers: [1, 4]` one to four."""
        if type(value) is int:
            return {"min": value, "max": value}
        if isinstance(value, list | tuple) and [type(each) for each in value] == [int, int]:
            return {"min": value[0], "max": value[1]}
        if not isinstance(value, dict | Workers):
            raise mistake("expected a number as 2, a range as [1, 4], or min and max")
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        number = {"type": "integer", "exclusiveMinimum": 0}
        pair = {"type": "array", "items": number, "minItems": 2, "maxItems": 2}
        return {"anyOf": [handler(core_schema), number, pair], "description": cls.__doc__}

    @model_validator(mode="after")
    def _ordered(self) -> Workers:
        if self.min > self.max:
            raise mistake(f"workers.min {self.min} is above workers.max {self.max}", "min")
        return self


class Island(Section):
    """Accelerators with fast links between them: one Ray Train run."""

    name: Name
    """Name of the island."""
    region: str
    """Value of the region label of its nodes."""
    workers: Workers = Workers()
    """Smallest and largest number of workers; also as `2` for exactly two, `[1, 4]` for one to four."""
    cpus_per_worker: Annotated[float, Field(gt=0)] = 1.0
    """CPUs a worker reserves."""
    gpus_per_worker: Annotated[float, Field(ge=0)] = 0.0
    """GPUs a worker reserves; with 0 it computes on the CPU."""
    threads_per_worker: Positive | None = None
    """Threads of a CPU worker. Derived: `cpus_per_worker`, at least 1."""
    price_per_worker_hour: Annotated[float, Field(ge=0)] | None = None
    """Price of one worker for one hour, in the currency of `budget.max_cost`."""


class LocalCluster(Section):
    """A Ray of our own on this machine, one simulated node per region."""

    kind: Literal["local"] = "local"
    """`local`: start a Ray cluster and end it with the run."""


class ExistingCluster(Section):
    """A Ray cluster that is already there."""

    kind: Literal["existing"]
    """`existing`: connect to a Ray cluster."""
    address: str = "auto"
    """Ray address; `auto` finds the one of this node or this Ray job."""
    autoscaling: bool = False
    """The cluster may grow: wait for capacity instead of refusing at once."""


Cluster = Annotated[LocalCluster | ExistingCluster, Field(discriminator="kind")]


class Fleet(Section):
    """Where to train."""

    name: Name = "local"
    """Name of the fleet."""
    cluster: Cluster = LocalCluster()
    """The Ray cluster."""
    region_label: str = "ray.io/region"
    """Node label that carries the region."""
    region_resource: str | None = "region_{region}"
    """Custom resource of the region's nodes, `{region}` filled in; null: labels only."""
    control_region: str | None = None
    """Region of the synchronizer. Derived: the driver's own node."""
    islands: Annotated[list[Island], Field(min_length=1)]
    """The islands."""
    min_islands: Positive | None = None
    """The run starts with this many of its islands, or not at all. Derived: all of them."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest wait for `min_islands` to join."""
    worker_env: dict[str, str] = {}
    """Environment variables of every worker; nothing else of the driver's is forwarded."""

    @field_validator("islands")
    @classmethod
    def _names_are_unique(cls, islands: list[Island]) -> list[Island]:
        names = [island.name for island in islands]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise mistake(f"island names must differ; given more than once: {', '.join(twice)}")
        return islands

    @field_validator("region_resource")
    @classmethod
    def _only_region_is_filled_in(cls, pattern: str | None) -> str | None:
        if pattern is not None and set("{}") & set(pattern.replace("{region}", "")):
            raise mistake("the only thing that can be filled in is {region}")
        return pattern

    @model_validator(mode="after")
    def _minimum_exists(self) -> Fleet:
        if self.min_islands is not None and self.min_islands > len(self.islands):
            why = f"min_islands {self.min_islands} is above the number of islands, {len(self.islands)}"
            raise mistake(why, "min_islands")
        return self
