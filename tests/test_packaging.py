"""An installed wheel, an editable install and a bare checkout all import the same package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "streambp_fx", "passes")

PROBE = """
import importlib.metadata, pathlib, streambp_fx, streambp_fx.passes.rules.registry as registry
from importlib.resources import files
points = importlib.metadata.entry_points(group="torch_dynamo_backends", name="streambp")
print(*(point.value for point in points), registry.__name__, files("streambp_fx") / "py.typed")
print(pathlib.Path(streambp_fx.__file__).resolve())
"""


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def python_folders() -> set[str]:
    """Every package that the checkout holds, by its installed name."""
    folders = {path.parent for path in (ROOT / "passes").rglob("*.py")}
    names = {".".join(("streambp_fx", *path.relative_to(ROOT).parts)) for path in folders}
    own = {path.parent for path in (ROOT / "streambp_fx").rglob("*.py")}
    inside = {path for path in own if not path.resolve().is_relative_to(ROOT / "passes")}
    return names | {".".join(path.relative_to(ROOT).parts) for path in inside}


def test_every_package_is_listed() -> None:
    assert set(project()["tool"]["setuptools"]["packages"]) == python_folders()


def test_a_bare_checkout_has_the_passes(tmp_path: Path) -> None:
    """Isolated from any install: -S leaves out what an editable install adds to the path."""
    path = [str(ROOT), *{sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}]
    command = (
        f"import sys; sys.path[:0] = {path!r}; "
        "from importlib.util import find_spec; print(find_spec('streambp_fx.passes').origin)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", command], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve() == ROOT / "passes" / "__init__.py"


def test_the_version_has_a_changelog_entry() -> None:
    version = project()["project"]["version"]
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment that sees this one's packages, but no install of the project.

    Returns its Python.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    # Links, not a .pth: a .pth would also run this environment's own editable install.
    for package in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "streambp_fx" not in package.name:
            (site / package.name).symlink_to(package)
    return folder / "bin" / "python"


def install(python: Path, *arguments: str) -> None:
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--no-deps", "--no-build-isolation", *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def probe(python: Path, cwd: Path) -> tuple[list[str], Path]:
    done = subprocess.run([str(python), "-c", PROBE], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    words, location = done.stdout.strip().splitlines()
    return words.split(), Path(location)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what is shipped, so that building leaves nothing in the real checkout."""
    target = tmp_path / "checkout"
    target.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, target / name)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("linked", [True, False], ids=["linked", "link_lost"])
def test_an_editable_install_imports(
    environment: Path, checkout: Path, tmp_path: Path, linked: bool
) -> None:
    """With and without the link to the passes, which not every way to copy a checkout keeps."""
    if not linked:
        (checkout / "streambp_fx" / "passes").unlink()
    install(environment, "--editable", str(checkout))
    (entry_point, registry, typed), location = probe(environment, tmp_path)
    assert entry_point == "streambp_fx.backend:streambp"
    assert registry == "streambp_fx.passes.rules.registry"
    assert location.is_relative_to(checkout) and Path(typed).exists()


@pytest.mark.slow
def test_a_wheel_holds_every_module_once_and_imports(
    environment: Path, checkout: Path, tmp_path: Path
) -> None:
    command = [str(environment), "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "-w", str(tmp_path), str(checkout)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    code = {".py", ".cpp"}
    held = [name for name in zipfile.ZipFile(wheel).namelist() if Path(name).suffix in code]
    sources = {
        "streambp_fx/" + path.relative_to(checkout).as_posix()
        for path in (checkout / "passes").rglob("*")
        if path.suffix in code
    } | {
        path.relative_to(checkout).as_posix()
        for path in (checkout / "streambp_fx").rglob("*")
        if path.suffix in code and not path.resolve().is_relative_to(checkout / "passes")
    }
    assert sorted(held) == sorted(sources)
    install(environment, "--force-reinstall", str(wheel))
    (_, registry, typed), location = probe(environment, tmp_path)
    assert registry == "streambp_fx.passes.rules.registry" and Path(typed).exists()
    assert not location.is_relative_to(checkout)
