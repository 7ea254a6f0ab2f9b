"""Loading jobs and fleets: every mistake, at its place, with the nearest right thing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from elastic.base.configfile import load_both, load_fleet, load_job
from elastic.base.errors import EXIT_CONFIG, ConfigError

pytestmark = pytest.mark.unit

MINIMAL = "name: demo\nbudget: {tokens: 1000}\n"
FLEET = "islands:\n  - {name: us, region: us-east}\n  - {name: eu, region: eu-west}\n"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own_with_all_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    real = importlib.util.find_spec
    extras = {"transformers", "tokenizers", "tiktoken", "s3fs", "gcsfs", "wandb"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in extras or real(name))


def write(text: str, name: str = "job.yaml") -> str:
    Path(name).write_text(text, "utf-8")
    return name


def job_problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_job(write(text), overrides)
    return caught.value.problems


def fleet_problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_fleet(write(text, "fleet.yaml"), overrides)
    return caught.value.problems


def test_all_mistakes_come_at_once_in_reading_order() -> None:
    """A file full of mistakes is answered with all of them, sorted by line, in one error of exit code 2."""
    text = """\
name: demo
lr: 3e-4
sed: 1
model:
  d_model: 100
  num_heads: 3
data:
  sources: [nowhere.txt]
  tokenizer: {kind: tiktokn}
  seq_len: "256"
budget:
  tokns: 5
inner:
  lr: 3e-4
  lr: 2
  learning-rate: 3
  betas: [0.9, "0.95"]
  clip_norm: -1
  batch_sequences: true
  compute_dtype: bf61
outer:
  preset: synchronous
  momentum: 0.9
logging:
  wandb_project: 12
  tensorboard: yes
"""
    with pytest.raises(ConfigError) as caught:
        load_job(write(text), ["inner.eps=abc"])
    assert caught.value.exit_code == EXIT_CONFIG
    assert str(caught.value) == "\n".join(caught.value.problems)
    assert caught.value.problems == [
        "job.yaml:2:1: unknown key 'lr'; did you mean inner.lr or outer.lr?",
        "job.yaml:3:1: unknown key 'sed'; did you mean 'seed'?",
        "job.yaml:6:14: model.num_heads: num_heads 3 does not divide d_model 100",
        "job.yaml:9:21: data.tokenizer.kind: unknown kind 'tiktokn', one of bytes, tokenizers, tiktoken; "
        "did you mean 'tiktoken'?",
        "job.yaml:10:12: data.seq_len: expected whole number > 0 (saw: '256'); take off the quotes",
        "job.yaml:12:3: unknown key 'tokns' in budget; did you mean 'tokens'?",
        "job.yaml:15:3: key 'lr' is given twice; first on line 14",
        "job.yaml:16:3: unknown key 'learning-rate' in inner; did you mean 'lr'?",
        "job.yaml:17:16: inner.betas.1: expected number >= 0 and <= 1 (saw: '0.95'); take off the quotes",
        "job.yaml:18:14: inner.clip_norm: expected number > 0 (saw: -1)",
        "job.yaml:19:20: inner.batch_sequences: expected whole number > 0 (saw: true)",
        "job.yaml:20:18: inner.compute_dtype: expected one of auto, fp32, bf16 (saw: 'bf61'); "
        "did you mean 'bf16'?",
        "job.yaml:23:13: outer.momentum: has no effect under preset synchronous; remove it",
        "job.yaml:25:18: logging.wandb_project: expected text (saw: 12); put it in quotes",
        "job.yaml:26:16: logging.tensorboard: expected true or false (saw: 'yes'); write true",
        "override 'inner.eps=abc': inner.eps: expected number > 0 (saw: 'abc')",
    ]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("inner: {lerning_rate: 1}", "did you mean 'lr'?"),
        ("inner: {batch_size: 1}", "did you mean 'batch_sequences'?"),
        ("inner: {seq_len: 1}", "did you mean data.seq_len?"),
        ("outer: {sync-every: 1}", "did you mean 'sync_every'?"),
        ("model: {hidden_size: 1}", "did you mean 'd_model'?"),
        ("model: {path: x}", "did you mean"),
        ("max_hours: 1", "did you mean budget.max_hours?"),
        ("modle: {d_model: 1}", "did you mean 'model'?"),
        ("outer: {zzz: 1}", "valid here: preset, sync_every"),
    ],
)
def test_unknown_keys_are_answered_with_the_right_name_or_section(key: str, hint: str) -> None:
    """A misspelt key, another trainer's name, a right key in the wrong section: each gets its hint."""
    (problem,) = job_problems(MINIMAL + key + "\n")
    assert "unknown key" in problem
    assert hint in problem


def test_numbers_in_scientific_form_are_numbers_everywhere() -> None:
    """`3e-4` and `6e6` work in the file and in overrides, though YAML 1.1 reads them as text."""
    job = load_job(write(MINIMAL + "inner: {lr: 3e-4}\n"), ["inner.eps=1e-9", "budget.tokens=6e6"]).value
    assert (job.inner.lr, job.inner.eps, job.budget.tokens) == (3e-4, 1e-9, 6_000_000)


@pytest.mark.parametrize("value", ["6.5", "'7'", "[1]", "true", "-3", "0", ".inf", "{a: 1}"])
def test_a_whole_number_is_nothing_else(value: str) -> None:
    """Fractions, text, lists, booleans, infinities and numbers out of range are refused for a count."""
    (problem,) = job_problems(f"name: demo\nbudget: {{tokens: {value}}}\n")
    assert problem.startswith("job.yaml:2:18: budget.tokens: expected whole number > 0")


def test_missing_required_keys_are_named_with_their_meaning() -> None:
    """A file without a budget says so, and what a budget is."""
    assert job_problems("name: demo\n") == ["job.yaml:1:1: missing key 'budget': How much to train."]
    assert fleet_problems("islands:\n  - name: us\n") == [
        "fleet.yaml:2:5: missing key 'islands.0.region': Value of the region label of its nodes."
    ]


@pytest.mark.parametrize(("budget", "why"), [("{}", "say how much"), ("{tokens: 1, epochs: 1}", "not both")])
def test_budget_takes_exactly_one_measure(budget: str, why: str) -> None:
    """Neither and both of tokens and epochs are mistakes; so is a budget left empty."""
    (problem,) = job_problems(f"name: demo\nbudget: {budget}\n")
    assert why in problem


def test_sections_left_empty_are_their_defaults() -> None:
    """A section whose keys are all commented out counts as not given."""
    assert load_job(write(MINIMAL + "outer:\nmodel:\n  # d_model: 3\n")).value.outer.preset == "diloco"


def test_the_default_kind_may_be_left_out() -> None:
    """`model: {d_model: 64}` is a decoder; `kind` in an override chooses another before its keys are read."""
    assert load_job(write(MINIMAL + "model: {d_model: 64}\n")).value.model.d_model == 64
    Path("my_model.py").write_text("", "utf-8")
    python = load_job(write(MINIMAL), ["model.entry=my_model:make", "model.kind=python"]).value.model
    assert (python.kind, python.entry) == ("python", "my_model:make")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("{num_heads: 4, num_kv_heads: 3}", "num_kv_heads 3 does not divide num_heads 4"),
        ("{d_model: 60, num_heads: 4}", "d_model / num_heads is 15; rotary positions need it even"),
        ("{kind: python, entry: nonsense}", "model.entry: expected text matching"),
        ("{kind: python, entry: 'no_such_module_here:f'}", "no Python module 'no_such_module_here'"),
        ("{kind: hf, path: models/none}", "no such file or folder: 'models/none'; relative paths start from"),
        ("7", "model: expected section of kind decoder, hf, python (saw: 7)"),
    ],
)
def test_models_that_cannot_be_built_are_refused_early(model: str, why: str) -> None:
    """What does not divide, does not exist or cannot be imported is told before anything starts."""
    (problem,) = job_problems(MINIMAL + f"model: {model}\n")
    assert why in problem


def test_files_that_are_named_must_exist() -> None:
    """Sources and tokenizer files are looked for in the current directory, and the message says which."""
    text = MINIMAL + "data: {sources: [a.txt, 'b-*.txt', 'builtin:stdlb'], "
    text += "tokenizer: {kind: tokenizers, file: t}}\n"
    here = Path.cwd()
    assert job_problems(text, "init_from=runs/none") == [
        f"job.yaml:3:18: data.sources.0: no such file or folder: 'a.txt'; relative paths start from {here}",
        "job.yaml:3:36: data.sources.2: unknown corpus 'builtin:stdlb'; there is builtin:stdlib",
        f"job.yaml:3:90: data.tokenizer.file: no such file or folder: 't'; relative paths start from {here}",
        f"override 'init_from=runs/none': init_from: no such file or folder: 'runs/none'; "
        f"relative paths start from {here}",
    ]


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket, a tokenizer or a tracker whose package is not installed says which extra brings it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    Path("ranks").write_text("", "utf-8")
    text = MINIMAL + "run_folder: s3://b/r\ndata:\n  sources: ['gs://b/x', 'https://h/x']\n"
    text += "  tokenizer: {kind: tiktoken, file: ranks, pattern: '.'}\nlogging: {wandb_project: p}\n"
    problems = job_problems(text)
    extras = [problem.split("elastic-islands[")[1].split("]")[0] for problem in problems]
    assert extras == ["s3", "gcs", "tiktoken", "wandb"]


def test_options_without_effect_are_refused_and_null_takes_them_back() -> None:
    """Under `synchronous` an outer learning rate means nothing: an error, until it is set to null."""
    text = MINIMAL + "outer: {lr: 0.5, weights: uniform}\n"
    assert job_problems(text, "outer.preset=synchronous") == [
        "job.yaml:3:13: outer.lr: has no effect under preset synchronous; remove it",
        "job.yaml:3:27: outer.weights: has no effect under preset synchronous; remove it",
    ]
    job = load_job(write(MINIMAL + "outer: {lr: 0.5}\n"), ["outer.preset=synchronous", "outer.lr=null"]).value
    assert (job.outer.preset, job.outer.lr, job.outer.warmup) == ("synchronous", 1.0, 1.0)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("inner.lrr=1", "unknown key 'lrr' in inner; did you mean 'lr'?"),
        ("lr=1", "unknown key 'lr'; did you mean inner.lr or outer.lr?"),
        ("seed.x=1", "'seed' is a value; there is no 'x' in it"),
        ("seed=", "no value; write null to go back to the default"),
        ("seed", "expected key=value, as in inner.lr=3e-4"),
        ("fleets/mine.yaml", "a fleet is given with --fleet"),
        ("islands.us.workers=2", "that is a key of the fleet; write fleet.islands.us.workers=2"),
        ("seed=[1", "not YAML"),
        ("outer=3", "outer: expected section (saw: 3)"),
        ("..=3", "unknown key ''"),
    ],
)
def test_wrong_overrides_are_named_whole(override: str, why: str) -> None:
    """A wrong override is quoted as it was typed, with what is wrong about it."""
    (problem,) = job_problems(MINIMAL, override)
    assert problem.startswith(f"override '{override}': ")
    assert why in problem


def test_an_override_given_twice_is_refused() -> None:
    """Two values for one key are a mistake, not a question of order."""
    assert job_problems(MINIMAL, "seed=1", "seed=2") == ["override 'seed=2': 'seed' is given twice"]


def test_overrides_replace_lists_and_whole_sections() -> None:
    """A list or section given as a value takes the place of the file's."""
    Path("a.txt").write_text("", "utf-8")
    text = MINIMAL + "data: {sources: [x.txt, y.txt], seq_len: 3}\n"
    data = load_job(write(text), ["data={seq_len: 5}", "data.sources=[a.txt]"]).value.data
    assert (data.sources, data.seq_len) == (["a.txt"], 5)


def test_the_environment_configures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that look like settings change no value."""
    before = load_job(write(MINIMAL)).value
    for name in ("SEED", "ELASTIC_SEED", "ELASTIC__INNER__LR", "RUN_FOLDER", "name", "inner.lr"):
        monkeypatch.setenv(name, "7")
    assert load_job("job.yaml").value == before


def test_loading_does_not_depend_on_what_was_loaded_before() -> None:
    """Defaults are not changed by loading: the same file gives the same job again."""
    first = load_job(write(MINIMAL), ["data.tokenizer.kind=bytes", "model.d_model=32"]).value
    assert load_job("job.yaml").value.model.d_model == 256
    assert load_job("job.yaml", ["model.d_model=32"]).value == first


# ----------------------------------------------------------------------------------------- fleets


@pytest.mark.parametrize(
    ("workers", "expected"), [("2", (2, 2)), ("[1, 4]", (1, 4)), ("{min: 2, max: 3}", (2, 3)), ("{}", (1, 1))]
)
def test_workers_have_short_forms(workers: str, expected: tuple[int, int]) -> None:
    """One number is exact, two are a range."""
    text = f"islands: [{{name: us, region: r, workers: {workers}}}]\n"
    found = load_fleet(write(text, "fleet.yaml")).value.islands[0].workers
    assert (found.min, found.max) == expected


@pytest.mark.parametrize(
    ("workers", "why"),
    [
        ("[4, 1]", "islands.0.workers.min: workers.min 4 is above workers.max 1"),
        ("{min: 4}", "islands.0.workers.min: workers.min 4 is above workers.max 1"),
        ("[1, 2, 3]", "expected a number as 2, a range as [1, 4], or min and max"),
        ("'2'", "expected a number as 2, a range as [1, 4], or min and max"),
        ("['1', 4]", "expected a number as 2, a range as [1, 4], or min and max"),
        ("true", "expected a number as 2, a range as [1, 4], or min and max"),
        ("0", "islands.0.workers.max: expected whole number > 0 (saw: 0)"),
    ],
)
def test_workers_that_make_no_range_are_refused(workers: str, why: str) -> None:
    """The message says what is expected."""
    problems = fleet_problems(f"islands:\n  - {{name: us, region: r, workers: {workers}}}\n")
    assert why in problems[0]


def test_fleets_that_contradict_themselves_are_refused() -> None:
    """Names twice, more islands needed than there are, a resource pattern with strange places to fill."""
    assert fleet_problems(FLEET + "min_islands: 3\n") == [
        "fleet.yaml:4:14: min_islands: min_islands 3 is above the number of islands, 2"
    ]
    twice = "islands: [{name: us, region: a}, {name: us, region: b}]\nregion_resource: 'x_{zone}'\n"
    assert fleet_problems(twice) == [
        "fleet.yaml:1:10: islands: island names must differ; given more than once: us",
        "fleet.yaml:2:18: region_resource: the only thing that can be filled in is {region}",
    ]
    assert "expected list of section (at least 1)" in fleet_problems("islands: []\n")[0]


def test_unquoted_numbers_and_switches_for_text_are_explained() -> None:
    """A region named 1 needs quotes; one named `no` is text already."""
    assert "expected text (saw: 1); put it in quotes" in fleet_problems("islands: [{name: a, region: 1}]")[0]
    fleet = load_fleet(write("islands: [{name: a, region: no}]\nworker_env: {A: on}\n", "fleet.yaml")).value
    assert (fleet.islands[0].region, fleet.worker_env) == ("no", {"A": "on"})
    assert "worker_env.A: expected text (saw: 3)" in fleet_problems(FLEET + "worker_env: {A: 3}\n")[0]


def test_islands_are_overridden_by_name_or_position() -> None:
    """`islands.eu` and `islands.1` are the same island; an unknown one lists those there are."""
    overrides = ["islands.eu.workers=[1,3]", "islands.0.gpus_per_worker=1", "worker_env.NCCL_DEBUG=INFO"]
    fleet = load_fleet(write(FLEET, "fleet.yaml"), overrides).value
    assert (fleet.islands[1].workers.max, fleet.islands[0].gpus_per_worker) == (3, 1.0)
    assert fleet.worker_env == {"NCCL_DEBUG": "INFO"}
    short = FLEET.replace("us-east}", "us-east, workers: 2}")
    assert fleet_problems(short, "islands.us.workers.max=3") == [
        "override 'islands.us.workers.max=3': 'islands.0.workers' is 2 without keys; override it whole"
    ]
    assert fleet_problems(FLEET, "islands.asia.workers=2") == [
        "override 'islands.asia.workers=2': 'islands' has no item 'asia'; there are: us, eu"
    ]


def test_job_and_fleet_mistakes_come_together() -> None:
    """Both files are read before anything is said; `fleet.` overrides keep their name in messages."""
    write(MINIMAL + "sed: 1\n")
    write(FLEET + "mn_islands: 1\n", "fleet.yaml")
    with pytest.raises(ConfigError) as caught:
        load_both("job.yaml", "fleet.yaml", ["fleet.min_islands=x"])
    assert caught.value.problems == [
        "job.yaml:3:1: unknown key 'sed'; did you mean 'seed'?",
        "fleet.yaml:4:1: unknown key 'mn_islands'; did you mean 'min_islands'?",
        "override 'fleet.min_islands=x': min_islands: expected whole number > 0 (saw: 'x')",
    ]


def test_a_cost_limit_needs_prices_and_a_batch_enough_sequences() -> None:
    """What only job and fleet together can get wrong is told with the place in the right file."""
    write(MINIMAL.replace("tokens: 1000", "tokens: 1000, max_cost: 5") + "inner: {batch_sequences: 4}\n")
    write(FLEET, "fleet.yaml")
    overrides = ["fleet.islands.us.price_per_worker_hour=2", "fleet.islands.eu.workers=8"]
    with pytest.raises(ConfigError) as caught:
        load_both("job.yaml", "fleet.yaml", overrides)
    assert caught.value.problems == [
        "job.yaml:2:34: budget.max_cost needs price_per_worker_hour on every island; "
        "fleet local has none for eu",
        "override 'fleet.islands.eu.workers=8': island eu may have 8 workers, "
        "but inner.batch_sequences is 4; each worker needs at least one sequence of the batch",
    ]


def test_further_checks_run_beside_other_mistakes() -> None:
    """A misspelt key in one section does not hide a missing file in another."""
    problems = job_problems("name: demo\ndata: {sources: [gone.txt]}\nbudgt: {tokens: 1}\n")
    assert problems[0] == "job.yaml:1:1: missing key 'budget': How much to train."
    assert problems[1].startswith("job.yaml:2:18: data.sources.0: no such file or folder: 'gone.txt'")
    assert problems[2] == "job.yaml:3:1: unknown key 'budgt'; did you mean 'budget'?"
