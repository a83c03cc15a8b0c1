"""The project itself: public names, a light import, layers, version, what the wheel carries, what a skip means."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import types
import zipfile
from pathlib import Path

import pytest

import omni_notebook
import readme_verbs
from omni_notebook.verbs import registry

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "vllm", "matplotlib", "IPython", "ipywidgets", "numpy", "tokenizers", "anyio", "PIL", "rich")
IMPORT_BUDGET_S = 0.3
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

PUBLIC = [
    "AsyncOmni",
    "LoRARequest",
    "OmniACK",
    "OmniRequestOutput",
    "OmniSamplingParams",
    "PipelineConfig",
    "RemoteOmni",
    "StageConfig",
    "UpstreamOmni",
    "__version__",
    "audit",
    "audit_async",
    "borrowed",
    "current",
    "dashboard",
    "errors",
    "history",
    "last_acks",
    "plot_reclaimed",
    "plot_timeline",
    "serve",
    "load_ipython_extension",
    "unload_ipython_extension",
]


def run_python(code, **options):
    return subprocess.run(
        [sys.executable, *options.pop("flags", ()), "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        **options,
    )


# ------------------------------------------------------------------------------------------ public names


def test_the_public_surface_is_exactly_all():
    assert sorted(omni_notebook.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves(name):
    value = getattr(omni_notebook, name)
    assert value is not None
    assert getattr(omni_notebook, name) is value


def test_public_names_come_from_this_package():
    homes = {name: getattr(getattr(omni_notebook, name), "__module__", "") for name in PUBLIC if name != "__version__"}
    homes["errors"] = omni_notebook.errors.__name__
    assert {name: home for name, home in homes.items() if not home.startswith("omni_notebook")} == {}


def test_dir_lists_the_public_names():
    assert set(PUBLIC) <= set(dir(omni_notebook))


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="module 'omni_notebook' has no attribute 'wake_me'"):
        _ = omni_notebook.wake_me


def test_errors_is_the_module_and_its_tree_draws_every_class():
    errors = omni_notebook.errors
    assert isinstance(errors, types.ModuleType)
    drawn = set(re.findall(r"\w+Error", errors.__doc__))
    assert drawn >= {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and name.endswith("Error") and name[0] != "_"
    }


def test_version_is_the_installed_and_the_declared_one():
    assert omni_notebook.__version__ == importlib.metadata.version("omni-notebook") == PROJECT["version"]


# ----------------------------------------------------------------------------------------- a light import


NOT_INSTALLED = """
import importlib.metadata as metadata
real = metadata.distribution
def distribution(name):
    if name.replace("_", "-") == "omni-notebook":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.distribution = distribution
import omni_notebook as omni
"""


def test_a_checkout_that_is_not_installed_audits_and_says_what_it_is():
    code = f"""{NOT_INSTALLED}
from omni_notebook import cli
with omni.AsyncOmni("demo", executor="uni") as engine:
    known = {{"sampling_params": {{"num_inference_steps": 2}}}}
    print(omni.audit(engine, [0], cycles=1, **known).record.version, omni.__version__)
cli.main(["doctor", "--json"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    audited, _, doctors = done.stdout.partition("\n")
    assert audited == "0+unknown 0+unknown", done.stderr
    assert json.loads(doctors)["version"] == "0+unknown"
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_import_loads_nothing_heavy():
    loaded = json.loads(run_python("import omni_notebook, json, sys; print(json.dumps(sorted(sys.modules)))").stdout)
    assert {module.partition(".")[0] for module in loaded}.isdisjoint(HEAVY)


def test_import_takes_less_than_the_budget():
    code = "import time; start = time.perf_counter(); import omni_notebook; print(time.perf_counter() - start)"
    assert min(float(run_python(code).stdout) for _ in range(5)) <= IMPORT_BUDGET_S


@pytest.mark.parametrize("module", ["protocol", "config", "errors"])
def test_the_plain_types_load_neither_torch_nor_ipython(module):
    code = f"import omni_notebook.{module}, json, sys; print(json.dumps(sorted(sys.modules)))"
    loaded = {name.partition(".")[0] for name in json.loads(run_python(code).stdout)}
    assert loaded.isdisjoint({"torch", "IPython", "ipywidgets", "matplotlib"})


def test_charts_load_neither_torch_nor_the_engine():
    loaded = json.loads(
        run_python("import omni_notebook.notebook.charts, json, sys; print(json.dumps(sorted(sys.modules)))").stdout
    )
    assert [name for name in loaded if name == "torch" or name.startswith("omni_notebook.engine")] == []


# ------------------------------------------------------------------------------------------------- layers


def test_imports_point_down_only():
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# -------------------------------------------------------------------------------------------------- wheel


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_says_that_it_is_typed(wheel_names):
    assert "omni_notebook/py.typed" in wheel_names


def test_the_wheel_carries_the_licence(wheel_names):
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)


def test_the_wheel_carries_every_file_of_the_demo_models(wheel_names):
    folder = ROOT / "omni_notebook" / "models" / "demo"
    files = {
        str(path.relative_to(ROOT)) for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert any(name.endswith(".safetensors") for name in files)
    assert files <= wheel_names


def test_the_wheel_carries_what_an_audit_runs_and_the_schema_of_its_file(wheel_names):
    folder = "omni_notebook/verbs/auditing"
    assert {f"{folder}/{name}" for name in ("audit.schema.json", "reader.py", "taker.py")} <= wheel_names


def test_the_wheel_carries_nothing_but_the_package(wheel_names):
    assert {name.partition("/")[0] for name in wheel_names} == {
        "omni_notebook",
        f"omni_notebook-{PROJECT['version']}.dist-info",
    }


# ------------------------------------------------------------------------------------------- what repeats


def names_of(requirements):
    return {re.split(r"[<>=\[ ]", line)[0].lower().replace("_", "-") for line in requirements}


def lines_of(path):
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line and line[0] not in "#-"]


def test_binder_installs_what_the_package_needs_and_jupyterlab():
    assert names_of(lines_of(ROOT / "binder" / "requirements.txt")) == names_of(PROJECT["dependencies"]) - {"torch"} | {
        "jupyterlab"
    }


@pytest.mark.parametrize("extra", ["test", "dev", "lab", "browser", "diffusers"])
def test_every_dependency_that_we_run_with_is_pinned(extra):
    pins = lines_of(ROOT / "constraints.txt")
    assert [pin for pin in pins if "==" not in pin] == []
    wanted = names_of(PROJECT["dependencies"] + PROJECT["optional-dependencies"][extra]) - {"omni-notebook"}
    assert wanted - names_of(pins) == set()


def test_the_readme_lists_the_verbs_that_there_are():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = re.search(r"<!-- verbs:begin -->\n(.*?)<!-- verbs:end -->", text, re.DOTALL)[1]
    assert table == readme_verbs.table()
    for name, verb in registry.verbs().items():
        assert f"| `{name}` | {registry.summary(verb)} | " in table
    assert "| `await engine.wake_up([0])` |" in table


# -------------------------------------------------------------------------------------------------- skips

SKIPPING = """
import pytest

def test_plain(): pytest.skip("no such device")

@pytest.mark.gpu
def test_gpu(): pytest.skip("no accelerator")

@pytest.mark.xfail(reason="known")
def test_known(): assert False
"""


def run_pytest(folder, source, *, test_all):
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs an accelerator\n", encoding="utf-8")
    (folder / "test_it.py").write_text(source, encoding="utf-8")
    env = {**os.environ, "OMNI_TEST_ALL": "1" if test_all else "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)


def test_a_skip_is_allowed_on_a_machine_that_does_not_claim_to_run_everything(tmp_path):
    done = run_pytest(tmp_path, SKIPPING, test_all=False)
    assert done.returncode == 0
    assert "2 skipped, 1 xfailed" in done.stdout


def test_under_test_all_only_gpu_tests_may_skip(tmp_path):
    done = run_pytest(tmp_path, SKIPPING, test_all=True)
    assert done.returncode == 1
    assert "1 failed, 1 skipped, 1 xfailed" in done.stdout
    assert "only tests marked `gpu` may skip. Skipped: no such device" in done.stdout


def test_under_test_all_a_whole_file_may_not_skip(tmp_path):
    done = run_pytest(tmp_path, 'import pytest\npytest.importorskip("no_such_module_anywhere")\n', test_all=True)
    assert done.returncode != 0
    assert "only tests marked `gpu` may skip" in done.stdout


@pytest.mark.parametrize(
    ("args", "marks", "wants"),
    [
        (["/x/tests"], "", False),
        (["tests/engine", "tests/memory/test_states.py"], "", False),
        (["tests"], "not gpu", False),
        (["tests"], "gpu and not slow", True),
        (["/x/tests/gpu/test_own_gpu.py::test_x"], "", True),
        (["tests/vllm"], "", True),
    ],
)
def test_only_runs_that_are_about_gpus_see_them(args, marks, wants):
    from tests.conftest import wants_gpus

    assert wants_gpus(args, marks) is wants
