"""Copies of the user's own source files, from which a run goes on when the originals have changed or are gone.

What is copied is the module that a setting names and, of what that imports, everything that is the user's own: Python
files that are neither installed, nor part of Python or Coterie. Imports are found by reading the source, so what a
module imports under a name that it computes is not copied, and neither are files other than Python's.

A copy is a folder::

    manifest.json       which setting names which module; of each module its file, the file it was, and its SHA-256
    turned.py           the files, where their modules' names put them
    package/net.py

Copies are imported under names of their own, ``coterie_run_DIGEST.package.net``, so that those of two runs, and the
originals, are different modules. Imports between them, relative and absolute, find the copies, never the originals.
``__file__`` is the original's path: data that a loader finds beside itself are found where they lay.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import re
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from coterie.errors import ConfigError, RunFolderError

MANIFEST = "manifest.json"
_PREFIX = "coterie_run_"
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_OURS = Path(__file__).parents[1]


@dataclass(frozen=True)
class SourceFile:
    """A module's source: the module's name, the path that it was read from, and its text."""

    module: str
    original: str
    is_package: bool
    text: bytes = field(repr=False)

    @property
    def file(self) -> str:
        """Where the copy lies, from the folder of copies on."""
        return self.module.replace(".", "/") + ("/__init__.py" if self.is_package else ".py")

    @property
    def sha256(self) -> str:
        """Checksum of the text."""
        return hashlib.sha256(self.text).hexdigest()


@dataclass(frozen=True)
class Copies:
    """Source files, and which setting names which of them.

    ``settings`` has for each setting the text that was given and the module that it names.
    """

    settings: Mapping[str, tuple[str, str]]
    files: Sequence[SourceFile]

    def manifest(self) -> str:
        """Give the text of ``manifest.json``."""
        settings = {name: {"spec": spec, "module": module} for name, (spec, module) in self.settings.items()}
        modules = {
            each.module: {"file": each.file, "original": each.original, "sha256": each.sha256} for each in self.files
        }
        return json.dumps({"settings": settings, "modules": modules}, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Copies:
        """Read a folder of copies; one that is not what its manifest says is refused with a ``RunFolderError``."""
        path = folder / MANIFEST
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            settings = {name: (str(each["spec"]), str(each["module"])) for name, each in manifest["settings"].items()}
            entries = [(str(name), each) for name, each in manifest["modules"].items()]
            files = [_read_copy(folder, name, each) for name, each in entries]
        except FileNotFoundError as error:
            raise RunFolderError(f"{error.filename} is missing: the run cannot be loaded without it") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunFolderError(f"{path} is damaged: it must be the list of code that this run wrote") from error
        return cls(settings, files)

    def only(self, setting: str) -> Copies:
        """Give one setting's copies: its module and what that imports."""
        own = {each.module: each for each in self.files}
        waiting, wanted = [self.settings[setting][1]], set[str]()
        while waiting:
            module = waiting.pop()
            if module in own and module not in wanted:
                wanted.add(module)
                waiting += _names_in(own[module])
        return Copies({setting: self.settings[setting]}, [each for each in self.files if each.module in wanted])

    def use(self, folder: Path) -> dict[str, str]:
        """Make the modules importable and give, for each setting, the text that names its copy instead.

        ``folder`` is where the copies lie, for tracebacks and for settings that are a file's path. Nothing is executed
        before it is imported, and what is executed then is the text of these files, as it is in memory now.
        """
        _finder.add(self, folder)
        return {name: self._renamed(spec, module, folder) for name, (spec, module) in self.settings.items()}

    def _renamed(self, spec: str, module: str, folder: Path) -> str:
        if spec.startswith("import:"):
            return spec.replace(f":{module}:", f":{self.prefix}.{module}:", 1)
        return str(folder.absolute() / next(each.file for each in self.files if each.module == module))

    @property
    def prefix(self) -> str:
        """The package below which the copies are imported: the same for the same copies."""
        # The originals' paths count, since __file__ is one of them.
        return _PREFIX + hashlib.sha256(self.manifest().encode()).hexdigest()[:16]


def _read_copy(folder: Path, module: str, entry: Mapping[str, Any]) -> SourceFile:
    is_package = str(entry["file"]).endswith("/__init__.py")
    copy = SourceFile(module, str(entry["original"]), is_package, b"")
    if not _NAME.fullmatch(module) or entry["file"] != copy.file:  # nor may a path lead out of the folder
        raise ValueError(f"{module!r} cannot lie in {entry['file']!r}")
    copy = SourceFile(module, copy.original, is_package, (folder / copy.file).read_bytes())
    if copy.sha256 != entry["sha256"]:
        raise RunFolderError(
            f"{folder / copy.file} is not the code that the run began with (its checksum differs): put the old file "
            "back, or begin a new run"
        )
    return copy


# ---------------------------------------------------------------------------------------------------------- collecting


def collect(specs: Mapping[str, str]) -> Copies:
    """Read the source of what settings name: ``import:package.module:name``, or the path of a Python file.

    A setting whose module has no source of the user's own (it is installed, or was typed into a notebook) is left out.
    """
    settings: dict[str, tuple[str, str]] = {}
    files: dict[str, SourceFile] = {}
    for setting, spec in specs.items():
        if spec.startswith("import:"):
            module = spec.split(":")[1]
            origin = _own_file(module)
        else:
            origin = Path(spec)
            module = _free_name(origin, files)
        if origin is None:
            continue
        settings[setting] = (spec, module)
        try:
            _add(module, origin, files)
        except OSError as error:
            raise ConfigError(
                f"{setting} {spec!r} cannot be copied: {error.filename} cannot be read ({error.strerror})"
            ) from None
    return Copies(settings, [files[name] for name in sorted(files)])


def _free_name(path: Path, files: Mapping[str, SourceFile]) -> str:
    name = re.sub(r"\W", "_", path.stem)
    name = name if _NAME.fullmatch(name) else f"_{name}"
    while name in files and files[name].original != str(path):
        name += "_"
    return name


def _add(module: str, origin: Path, files: dict[str, SourceFile]) -> None:
    """Add a module's source, and of all that it imports what is the user's own."""
    waiting = [(module, origin)]
    while waiting:
        name, path = waiting.pop()
        if name in files:
            continue
        files[name] = SourceFile(name, str(path), path.name == "__init__.py", path.read_bytes())
        for each in _names_in(files[name]):
            found = _own_file(each)
            if found is not None:
                waiting.append((each, found))


def _names_in(source: SourceFile) -> list[str]:
    """Give the names of all modules that a source may need: its packages, and what it imports with its packages."""
    package = source.module if source.is_package else source.module.rpartition(".")[0]
    return [each for name in (package, *_imported_names(source.text, package)) for each in _with_parents(name)]


def _imported_names(text: bytes, package: str) -> Iterator[str]:
    """Give the names that a source imports from or imports, of modules or of what is in one."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # of a file that nobody has imported yet, and perhaps nobody ever does
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    above = package.split(".")
    kept = above[: len(above) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _with_parents(module: str) -> list[str]:
    parts = module.split(".") if module else []
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _own_file(module: str) -> Path | None:
    """Find the source of a module of the user's own without importing what is not."""
    try:
        loaded = sys.modules.get(module)
        if loaded is not None:
            found = getattr(loaded, "__spec__", None)
        elif "." in module and _own_folder(module.rpartition(".")[0]) is None:
            return None  # finding a submodule imports its parent, which is somebody else's
        else:
            found = importlib.util.find_spec(module)
    except Exception:  # of a parent that cannot be imported, which may not matter where its import is tried
        return None
    if found is None or not found.has_location or found.origin is None or not found.origin.endswith(".py"):
        return None
    path = Path(found.origin).absolute()
    return None if is_installed(path) else path


def _own_folder(package: str) -> Path | None:
    """Find the folder of a package of the user's own, which need not have an ``__init__.py``."""
    found = getattr(sys.modules.get(package), "__spec__", None)
    if found is None:
        parent = package.rpartition(".")[0]
        found = None if parent and _own_folder(parent) is None else importlib.util.find_spec(package)
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    path = Path(folders[0]).absolute() if folders else None
    return None if path is None or is_installed(path) else path


def is_installed(path: Path) -> bool:
    """Say whether a file is part of Python, of Coterie, or of an installed package."""
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    places += [*site.getsitepackages(), site.getusersitepackages(), str(_OURS)]
    return any(path.is_relative_to(place) for place in places) or "site-packages" in path.parts


# ----------------------------------------------------------------------------------------------------------- importing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports copies from memory: of each module below a prefix, its source and where the copy lies."""

    def __init__(self) -> None:
        self._copies: dict[str, Copies] = {}
        self._files: dict[str, SourceFile] = {}
        self._paths: dict[str, Path] = {}
        self._modules: dict[Path, str] = {}

    def add(self, copies: Copies, folder: Path) -> None:
        """Know of some copies, which lie in a folder."""
        if self not in sys.meta_path:
            sys.meta_path.append(self)
        prefix = copies.prefix
        self._copies[prefix] = copies
        for each in copies.files:
            name = f"{prefix}.{each.module}"
            self._files[name] = each
            self._paths[name] = folder.absolute() / each.file
            self._modules[self._paths[name].resolve()] = name

    def module_of(self, path: Path) -> str | None:
        """Give the name of the module that was copied to a path."""
        return self._modules.get(path.absolute().resolve())

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        prefix = fullname.partition(".")[0]
        if prefix not in self._copies:
            return None
        if fullname in self._files:
            is_package = self._files[fullname].is_package
        elif fullname == prefix or any(name.startswith(f"{fullname}.") for name in self._files):
            is_package = True  # the prefix itself, or a package without an __init__.py
        else:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name not in self._files:
            return
        source = self._files[name]
        module.__file__ = source.original
        prefix = name.partition(".")[0]
        own = {each.module.partition(".")[0] for each in self._copies[prefix].files}
        tree = _OwnImports(prefix, own).visit(ast.parse(source.text))
        exec(compile(ast.fix_missing_locations(tree), str(self._paths[name]), "exec", dont_inherit=True), vars(module))


_finder = _Finder()


class _OwnImports(ast.NodeTransformer):
    """Turns absolute imports of copied modules into imports of the copies."""

    def __init__(self, prefix: str, own: set[str]) -> None:
        self._prefix, self._own = prefix, own

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if not node.level and node.module is not None and node.module.partition(".")[0] in self._own:
            node.module = f"{self._prefix}.{node.module}"
        return node

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for alias in node.names:
            top = alias.name.partition(".")[0]
            inside = ast.alias(f"{self._prefix}.{alias.name}", alias.asname)
            if top not in self._own:
                out.append(ast.Import([alias]))
            elif alias.asname is not None:
                out.append(ast.Import([inside]))
            else:  # ``import a.b`` loads a.b and binds a
                out += [ast.Import([inside]), ast.ImportFrom(self._prefix, [ast.alias(top)], 0)]
        return [ast.copy_location(each, node) for each in out]


def module_of_copy(path: Path) -> str | None:
    """Give the name under which the copy at a path is imported, if it is one that is in use."""
    return _finder.module_of(path)


def as_given(text: str) -> str:
    """Give the name of a copied module as the user wrote it, and that of an object without its digest."""
    return re.sub(rf"\b{_PREFIX}[0-9a-f]{{16}}\.|(?<=\w)@[0-9a-f]{{32}}\b", "", text)
