"""JAX models in Beam's `RunInference`: what Beam's own tests ask of other handlers, and more."""

import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.ml.inference.base import (
    KeyedModelHandler,
    ModelMetadata,
    RunInference,
)
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms import window
from helpers import assert_close, assert_same_bits

from beamjax.errors import ArrayFormatError, OptionsError, StructureError
from beamjax.pipelines import JaxModelHandler, save_model
from beamjax.pipelines.inference import MAX_INLINE_BYTES, encode_model
from beamjax.storage.arrays import decode_arrays, encode_arrays

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(4, 3)).astype("f4"), "b": np.ones((1, 3), "f4")}
EXAMPLES = [RNG.normal(size=4).astype("f4") for _ in range(100)]


def linear(params, x):
    return {"scores": x @ params["w"] + params["b"], "best": jnp.argmax(x @ params["w"], axis=1)}


def expected_of(fn, params, example):
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], example)
    return jax.tree.map(lambda leaf: np.asarray(leaf[0]), fn(params, one))


def assert_predicts(handler, examples, fn, params):
    model = handler.load_model()
    found = handler.run_inference(examples, model)
    assert [each.example is example for each, example in zip(found, examples, strict=True)]
    for each, example in zip(found, examples, strict=True):
        assert_close(each.inference, expected_of(fn, params, example), rtol=1e-5)


@pytest.fixture
def handler():
    return JaxModelHandler(linear, PARAMS, EXAMPLES[0])


@pytest.mark.parametrize("count", [1, 2, 8, 9, 64, 100])
def test_any_number_of_examples(handler, count):
    assert_predicts(handler, EXAMPLES[:count], linear, PARAMS)


def test_a_batch_is_compiled_for_few_sizes(handler):
    model = handler.load_model()
    for count in range(1, 80):
        handler.run_inference(EXAMPLES[:count], model)
    assert model._calls[0]._cache_size() == 3


def test_examples_are_trees_of_numbers_and_arrays():
    def fn(params, batch):
        return batch["x"].sum(axis=(1, 2)) * params[0], (batch["n"] + 1,)

    example = {"x": jax.ShapeDtypeStruct((2, 2), "bfloat16"), "n": 1}
    handler = JaxModelHandler(fn, [jnp.bfloat16(2)], example)
    rows = [{"x": np.full((2, 2), i, "bfloat16"), "n": i} for i in range(3)]
    assert_predicts(handler, rows, fn, [jnp.bfloat16(2)])


def test_a_model_that_needs_the_number_of_examples():
    def fn(params, x):
        return jnp.stack([x[i] * params for i in range(int(x.shape[0]))])

    handler = JaxModelHandler(fn, np.float32(3), EXAMPLES[0], batch_sizes=[2, 4])
    assert_predicts(handler, EXAMPLES[:7], fn, np.float32(3))


def test_a_model_of_64_bits_in_a_worker_of_32():
    with jax.enable_x64(True):
        handler = JaxModelHandler(lambda p, x: x + p, np.float64(1e-12), np.float64(0))
    (found,) = handler.run_inference([np.float64(1)], handler.load_model())
    assert_same_bits(found.inference, np.float64(1 + 1e-12))


def test_handlers_are_pickled_without_the_function():
    handler = JaxModelHandler(lambda params, x: x * params, np.float32(2), np.float32(0))
    clone = pickle.loads(pickle.dumps(handler))  # which can't pickle a lambda
    (found,) = clone.run_inference([np.float32(3)], clone.load_model())
    assert_same_bits(found.inference, np.float32(6))


def predict_in_a_pipeline(large_model):
    handler = JaxModelHandler(linear, PARAMS, EXAMPLES[0], large_model=large_model)
    with beam.Pipeline(FnApiRunner()) as pipeline:
        found = (
            pipeline
            | beam.Create(list(enumerate(EXAMPLES)))
            | RunInference(KeyedModelHandler(handler))
            | beam.MapTuple(lambda key, result: (key, int(result.inference["best"])))
        )
        best = [(i, int(np.argmax(x @ PARAMS["w"]))) for i, x in enumerate(EXAMPLES)]
        assert_that(found, equal_to(best))
    return pipeline.result


def test_in_a_pipeline():
    result = predict_in_a_pipeline(large_model=False)
    counters = {m.key.metric.name: m for m in result.metrics().query()["counters"]}
    assert counters["num_inferences"].committed == len(EXAMPLES)
    assert counters["num_inferences"].key.metric.namespace == "BeamML_JAX"


@pytest.mark.long
def test_one_copy_on_a_machine():
    """In a process of its own: the server that Beam starts for the model ends with it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(_shared).result()


def _shared():
    predict_in_a_pipeline(large_model=True)


def test_examples_that_do_not_fit_are_dead_letters(handler):
    with beam.Pipeline(FnApiRunner()) as pipeline:
        examples = pipeline | beam.Create([EXAMPLES[0], np.ones(5, "f4")])
        one_by_one = JaxModelHandler(linear, PARAMS, EXAMPLES[0], batch_sizes=[1])
        good, bad = examples | RunInference(one_by_one).with_exception_handling()
        assert_that(good | beam.combiners.Count.Globally(), equal_to([1]), label="good")
        texts = bad.failed_inferences | beam.Map(lambda failed: "float32[5]" in repr(failed[1]))
        assert_that(texts, equal_to([True]), label="bad")


def test_preprocess_and_postprocess(handler):
    filled = handler.with_preprocess_fn(lambda text: np.full(4, len(text), "f4"))
    chain = filled.with_postprocess_fn(lambda result: int(result.inference["best"]))
    best = int(np.argmax(PARAMS["w"].sum(axis=0)))
    with beam.Pipeline(FnApiRunner()) as pipeline:
        assert_that(pipeline | beam.Create(["ab"]) | RunInference(chain), equal_to([best]))


def test_a_side_input_updates_the_model(tmp_path):
    paths = [str(tmp_path / f"model-{i}") for i in range(2)]
    for i, path in enumerate(paths):
        save_model(path, lambda params, x: x * params, np.float32(i + 1), np.float32(0))
    handler = JaxModelHandler(model_path=paths[0])
    options = PipelineOptions(["--streaming"])
    with beam.Pipeline(FnApiRunner(), options=options) as pipeline:
        updates = (
            pipeline
            | "updates" >> beam.Create([(0, paths[0]), (10, paths[1])])
            | "at"
            >> beam.MapTuple(
                lambda at, path: window.TimestampedValue(ModelMetadata(path, path), at)
            )
            | "windows" >> beam.WindowInto(window.FixedWindows(10))
        )
        found = (
            pipeline
            | beam.Create([1, 11])
            | beam.Map(lambda at: window.TimestampedValue(np.float32(at), at))
            | beam.WindowInto(window.FixedWindows(10))
            | RunInference(handler, model_metadata_pcoll=updates)
            | beam.Map(
                lambda result: (float(result.example), float(result.inference), result.model_id)
            )
        )
        assert_that(found, equal_to([(1.0, 1.0, paths[0]), (11.0, 22.0, paths[1])]))


def test_metrics_and_limits_of_batches(handler):
    assert handler.get_num_bytes([{"a": np.zeros(3, "f4")}, {"a": np.zeros(3, "f4")}]) == 24
    assert handler.batch_elements_kwargs() == {"max_batch_size": 64}
    shared = JaxModelHandler(linear, PARAMS, EXAMPLES[0], model_copies=2)
    assert shared.share_model_across_processes()
    assert shared.model_copies() == 2


def test_saved_models(tmp_path):
    path = str(tmp_path / "model")
    save_model(path, linear, PARAMS, EXAMPLES[0], batch_sizes=[16])
    handler = JaxModelHandler(model_path=path)
    assert handler.batch_elements_kwargs() == {"max_batch_size": 16}
    assert_predicts(handler, EXAMPLES[:20], linear, PARAMS)
    (tmp_path / "model").write_bytes(b"not a model")
    with pytest.raises(ArrayFormatError, match=path):
        JaxModelHandler(model_path=path)


def prints(params, x):
    jax.debug.print("{}", x.shape[0])
    return x.at[0].set(x[0])  # needs a batch


def test_a_model_may_be_named_by_a_link(tmp_path):
    save_model(str(tmp_path / "model"), linear, PARAMS, EXAMPLES[0])
    (tmp_path / "latest").symlink_to("model")
    assert_predicts(JaxModelHandler(model_path=str(tmp_path / "latest")), EXAMPLES, linear, PARAMS)


FORGED = [
    {"artefacts": None},
    {"artefacts": 5},
    {"artefacts": [0, 8, 16]},
    {"types": []},
    {"types": [["float32", [-1]]]},
    {"types": [["no", [3]]]},
    {"example": "x"},
    {"result": 7},
    {"batch_sizes": "x"},
    {"batch_sizes": [0]},
    {"x64": 1},
    {"damaged": True},
    {"params": 1},
]


@pytest.mark.parametrize("change", FORGED)
def test_forged_models_are_refused(change, tmp_path):
    found, meta = decode_arrays(encode_model(linear, PARAMS, EXAMPLES[0], None, None))
    if change.pop("damaged", False):
        found[0] = np.zeros(40, np.uint8)
    if change.pop("params", 0):
        found.append(np.zeros(3))
    meta = {name: value for name, value in (meta | change).items() if value is not None}
    (tmp_path / "m.model").write_bytes(encode_arrays(found, meta))
    with pytest.raises(ArrayFormatError, match=r"m\.model: "):
        JaxModelHandler(model_path=str(tmp_path / "m.model")).load_model()


def test_what_is_no_model_is_refused_at_once():
    wide = np.zeros(MAX_INLINE_BYTES, np.uint8)
    one = EXAMPLES[0]
    for message, error, args, more in [
        ("neither", OptionsError, (), {}),
        ("both", OptionsError, (linear, PARAMS, one), {"model_path": "x"}),
        ("batch_sizes", OptionsError, (linear, PARAMS, one), {"batch_sizes": [0]}),
        ("batch_sizes", OptionsError, (linear, PARAMS, one), {"batch_sizes": 8}),
        ("platforms", OptionsError, (linear, PARAMS, one), {"platforms": "gpu"}),
        ("large_modl", OptionsError, (linear, PARAMS, one), {"large_modl": True}),
        ("max_batch_size", OptionsError, (linear, PARAMS, one), {"max_batch_size": 8}),
        ("save_model", StructureError, (lambda p, x: x, wide, one), {}),
        ("axis 0", StructureError, (lambda p, x: x.sum(), 0, one), {}),
        ("no arrays", StructureError, (linear, PARAMS, None), {}),
        ("a number", StructureError, (linear, PARAMS, "text"), {}),
        ("dot_general", TypeError, (linear, PARAMS, np.zeros(5, "f4")), {}),
        (
            r"of shape \(3, n\) for a batch of n examples",
            StructureError,
            (lambda p, x: (x @ p).T, PARAMS["w"], one),
            {},
        ),
        (
            r"as \['b'\] an array of shape \(\)",
            StructureError,
            (lambda p, x: {"a": x, "b": x.sum()}, 0, one),
            {},
        ),
        (
            r"not on a single example .*dot_general.*jax.vmap\(fn, \(None, 0\)\)",
            StructureError,
            (lambda p, x: p @ x, PARAMS["w"].T, one),
            {},
        ),
        (
            "a list of numbers.*np.asarray",
            StructureError,
            (lambda p, x: x @ p, PARAMS["w"], [1.0] * 4),
            {},
        ),
        (
            r"test_inference.py:\d+ \(prints\): .* calls Python",
            StructureError,
            (prints, 0, one),
            {},
        ),
        (
            r"params\['name'\]: found a str \('m'\)",
            StructureError,
            (lambda p, x: x, {"w": 1, "name": "m"}, one),
            {},
        ),
        (
            r"params\['t'\]: found a ndarray",
            StructureError,
            (lambda p, x: x, {"t": np.array([None])}, one),
            {},
        ),
    ]:
        with pytest.raises(error, match=message):
            JaxModelHandler(*args, **more)
    handler = JaxModelHandler(linear, PARAMS, EXAMPLES[0])
    with pytest.raises(OptionsError, match="temperature"):
        handler.validate_inference_args({"temperature": 1.0})


@pytest.mark.parametrize(
    ("example", "found"),
    [
        (np.zeros(5, "f4"), r"float32\[5\]"), (np.zeros(4), r"float64\[4\]"),
        ([np.zeros(4, "f4")], r"that is a list of 1 .float32\[4\]., expected float32\[4\]"),
        ({"x": 1}, "that is a dict with the keys .'x'."), (1.5, r"float64\[\]"),
    ],
)  # fmt: skip
def test_an_example_of_another_type_is_refused(handler, example, found):
    with pytest.raises(StructureError, match=f"found an example.*{found}"):
        handler.run_inference([EXAMPLES[0], example], handler.load_model())


def test_a_number_that_would_change_is_refused():
    handler = JaxModelHandler(lambda p, x: x, 0, np.uint8(0))
    model = handler.load_model()
    assert int(handler.run_inference([255], model)[0].inference) == 255
    for number in (256, 1.5):
        with pytest.raises(StructureError, match="expected uint8"):
            handler.run_inference([number], model)


DEPENDENT = {
    "means": lambda p, x: x - x.mean(0, keepdims=True),
    "maxima": lambda p, x: x / x.max(0, keepdims=True),
    "running sums": lambda p, x: jnp.cumsum(x, 0),
    "running sums from the end": lambda p, x: jnp.cumsum(x[::-1], 0)[::-1],
    "neighbours": lambda p, x: jnp.roll(x, 1, 0),
    "second neighbours": lambda p, x: jnp.roll(x, 2, 0),
    "other order": lambda p, x: x[::-1],
    "batch norm": lambda p, x: {
        "y": x,
        "z": (x - x.mean(0, keepdims=True)) / (x.std(0, keepdims=True) + 1),
    },
    "booleans": lambda p, x: (x > 0) ^ jnp.any(x < 0, 0, keepdims=True),
}


@pytest.mark.parametrize("name", DEPENDENT)
@pytest.mark.parametrize("count", [2, 5, 64])
def test_a_result_that_depends_on_other_examples_is_refused(name, count):
    handler = JaxModelHandler(DEPENDENT[name], 0, EXAMPLES[0])
    model = handler.load_model()
    handler.run_inference(EXAMPLES[:1], model)  # alone in its batch
    with pytest.raises(StructureError, match=r"in a batch of \d+ examples, the result.* changes"):
        handler.run_inference(EXAMPLES[:count], model)


def test_equal_examples_do_not_hide_that_results_depend_on_others():
    for value in (0, 1, 7):
        handler = JaxModelHandler(lambda p, x: x - x.mean(0), 0, np.float32(0))
        with pytest.raises(StructureError, match="changes with the other examples"):
            handler.run_inference([np.float32(value)] * 3, handler.load_model())


def test_independent_results_of_all_kinds_pass():
    def fn(params, batch):
        drawn = jax.vmap(lambda i: jax.random.uniform(jax.random.key(i)))(batch["i"])
        steps = jax.vmap(lambda n: jax.lax.while_loop(lambda c: c < n, lambda c: c * 2 + 1, 0))
        return {
            "drawn": drawn,
            "steps": steps(batch["i"]),
            "row": batch["x"] / batch["x"].sum(axis=1, keepdims=True),
            "table": params[batch["i"]],
            "not": ~batch["b"],
        }

    rows = [{"i": i % 3, "x": EXAMPLES[i], "b": np.bool_(i % 2)} for i in range(70)]
    table = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    assert_predicts(JaxModelHandler(fn, table, rows[0]), rows, fn, table)


def test_each_batch_size_is_checked_once(monkeypatch):
    handler = JaxModelHandler(linear, PARAMS, EXAMPLES[0])
    model, calls = handler.load_model(), []
    inner = model._results
    monkeypatch.setattr(model, "_results", lambda size, x: calls.append(size) or inner(size, x))
    for count in (1, 1, 5, 5, 60, 60):
        handler.run_inference(EXAMPLES[:count], model)
    assert calls == [1, 1, *[8] * 6, *[64] * 6]
