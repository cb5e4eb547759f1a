# SPDX-License-Identifier: Apache-2.0
"""Build csrc/ into vllm_relay._C, and nothing else: all metadata is in pyproject.toml.

A kernel is one translation unit per instruction set, and the end of its file's name names the set
(`attention_avx512_bf16.cpp`). Objects are kept under build/ and compiled again only when the
source, a header it includes, the command or the compiler has changed.

Environment: CXX, CXXFLAGS, LDFLAGS; MAX_JOBS (compilers at a time); RELAY_WERROR=1 (warnings in
csrc/ are errors).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"

AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
SSE42 = ["-msse4.2", "-mpclmul"]
# of each architecture, in the order in which processors came to have them
INSTRUCTION_SETS = {
    "sse42": SSE42,
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": AVX512,
    "avx512_vnni": [*AVX512, "-mavx512vnni"],
    "avx512_vpclmulqdq": [*AVX512, *SSE42, "-mvpclmulqdq"],
    "avx512_bf16": [*AVX512, "-mavx512bf16"],
    "amx_bf16": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
    "neon": [],
    "neon_bf16": ["-march=armv8.2-a+bf16"],
}


def architecture(instruction_set: str) -> str:
    return "aarch64" if instruction_set.startswith("neon") else "x86_64"


INTRINSICS = {
    "x86_64": "#include <immintrin.h>\n",
    "aarch64": "#include <arm_neon.h>\n",
}
# torch's wheels bring the OpenMP runtime, which machines without a compiler may lack
TORCH_LIBRARIES = "-Wl,-rpath,$ORIGIN/../torch/lib"
# gcc's schedulers move tile loads away from their products, and the tiles are spilled
TUNING = {"amx_bf16": ["-fno-schedule-insns", "-fno-schedule-insns2"]}


def instruction_set(source: Path) -> str | None:
    """The instruction set that the file's name asks for; None: the compiler's baseline."""
    return next((name for name in INSTRUCTION_SETS if source.stem.endswith(f"_{name}")), None)


class Toolchain:
    """The C++ compiler: which one, what it knows, and the flags that follow from that."""

    def __init__(self) -> None:
        configured = os.environ.get("CXX")
        usual = shlex.split(sysconfig.get_config_var("CXX") or "")
        candidates = [shlex.split(configured)] if configured else [usual, ["g++"], ["clang++"]]
        candidates = [candidate for candidate in candidates if candidate]
        self.compiler = next((c for c in candidates if shutil.which(c[0])), [])
        if not self.compiler:
            tried = ", ".join(candidate[0] for candidate in candidates)
            raise SystemExit(
                f"vllm-relay: no C++ compiler found (tried {tried}). "
                "Install one (Debian, Ubuntu: apt install g++) or name one in CXX."
            )
        self.version = self._run(["--version"]).stdout.splitlines()[0]
        if not self.accepts(["-std=c++20"]):
            raise SystemExit(
                f"vllm-relay: {self.version} does not know -std=c++20. "
                "Install g++ >= 12 or clang >= 14, or name another compiler in CXX."
            )
        self.openmp_compile, self.openmp_link = self._openmp()
        machine = self._run(["-dumpmachine"]).stdout.partition("-")[0]
        self.architecture = "aarch64" if machine == "arm64" else machine
        self.known = {
            name: self.accepts(flags, INTRINSICS[architecture(name)])
            for name, flags in INSTRUCTION_SETS.items()
        }

    def accepts(self, flags: list[str], code: str = "") -> bool:
        return (
            self._run(["-Werror", *flags, "-x", "c++", "-fsyntax-only", "-"], code).returncode == 0
        )

    def kernel_flags(self, source: Path) -> list[str]:
        name = instruction_set(source)
        if name is None:
            return []
        return INSTRUCTION_SETS[name] + [f for f in TUNING.get(name, []) if self.accepts([f])]

    def defines(self, sources: list[Path]) -> list[str]:
        """RELAY_HAVE_<SET>=1 for each instruction set that this build holds kernels of, else 0."""
        present = {instruction_set(source) for source in sources}
        return [
            f"-DRELAY_HAVE_{name.upper()}={int(known and name in present)}"
            for name, known in self.known.items()
        ]

    def _openmp(self) -> tuple[list[str], list[str]]:
        for flags, link in (
            (["-fopenmp"], ["-fopenmp"]),
            (["-Xpreprocessor", "-fopenmp"], ["-lomp"]),  # Apple's clang with libomp beside it
        ):
            if self.accepts([*flags, *shlex.split(os.environ.get("CXXFLAGS", ""))], OPENMP_PROBE):
                return flags, link
        raise SystemExit(
            f"vllm-relay: {self.version} cannot compile OpenMP. Install its OpenMP library "
            "(clang on Debian, Ubuntu: apt install libomp-dev; macOS: brew install libomp)."
        )

    def _run(self, arguments: list[str], code: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.compiler, *arguments], input=code, capture_output=True, text=True
        )


OPENMP_PROBE = "#include <omp.h>\nint main() { return omp_get_max_threads(); }\n"


@dataclass(frozen=True)
class Unit:
    """One translation unit: its source, its object and the command that makes one of the other."""

    source: Path
    object: Path
    command: list[str]
    signature: str

    def is_current(self) -> bool:
        """Whether the object was made by this command from what the files hold now."""
        record, depfile = self.object.with_suffix(".sha256"), self.object.with_suffix(".d")
        if not (self.object.exists() and record.exists() and depfile.exists()):
            return False
        if record.read_text() != self.signature:
            return False
        names = depfile.read_text().partition(":")[2].replace("\\\n", " ")
        dependencies = [Path(ROOT, name) for name in shlex.split(names)]
        made_ns = self.object.stat().st_mtime_ns
        return all(d.exists() and d.stat().st_mtime_ns < made_ns for d in dependencies)

    def compile(self) -> float:
        """Compile and return the seconds it took."""
        self.object.parent.mkdir(parents=True, exist_ok=True)
        started_ns = time.time_ns()
        done = subprocess.run(self.command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{shlex.join(self.command)}\n{done.stdout}{done.stderr}")
        sys.stderr.write(done.stderr)
        # an edit made while the compiler ran must count as newer than the object
        os.utime(self.object, ns=(started_ns, started_ns))
        self.object.with_suffix(".sha256").write_text(self.signature)
        return (time.time_ns() - started_ns) / 1e9


def plan_units(sources: list[Path], toolchain: Toolchain, folder: Path) -> list[Unit]:
    """The translation units of `sources` this compiler knows, and nanobind's own sources.

    They are linked in this order, those for every CPU first: what several instantiate of the
    standard library's templates, linkers take from the first one, so that no code of an
    instruction set is merged into what runs without it.
    """
    import nanobind

    nanobind_root = Path(nanobind.source_dir()).parent
    system_headers = [
        sysconfig.get_path("include"),
        sysconfig.get_path("platinclude"),
        str(nanobind_root / "include"),
        str(nanobind_root / "ext" / "robin_map" / "include"),
    ]
    # fmt: off
    common = [
        "-std=c++20", "-O3", "-fPIC", "-DNDEBUG", "-DNB_COMPACT_ASSERTIONS",
        "-fvisibility=hidden", "-ffunction-sections", "-fdata-sections", "-fno-math-errno",
        "-ffp-contract=off",
        *(flag for header in dict.fromkeys(system_headers) for flag in ("-isystem", header)),
    ]
    # fmt: on
    # -Wno-psabi: portable vectors never cross a call; the other two misread gcc's own intrinsics
    warnings = ["-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
    ours = [*common, *toolchain.openmp_compile, "-Icsrc", *toolchain.defines(sources), *warnings]
    if os.environ.get("RELAY_WERROR") == "1":
        ours.append("-Werror")
    extra = shlex.split(os.environ.get("CXXFLAGS", ""))

    def unit(source: Path, name: str, flags: list[str]) -> Unit:
        target = folder / f"{name}.o"
        # fmt: off
        command = [
            *toolchain.compiler, *flags, *extra,
            "-MMD", "-MF", str(target.with_suffix(".d")), "-c", str(source), "-o", str(target),
        ]
        # fmt: on
        # an isolated build has nanobind in a new folder each time: its version identifies it
        identity = shlex.join(command).replace(str(nanobind_root), nanobind.__version__)
        signature = hashlib.sha256(f"{toolchain.version}\n{identity}".encode()).hexdigest()
        return Unit(source, target, command, signature)

    units = []
    for source in sources:
        name = instruction_set(source)
        if name is not None and architecture(name) != toolchain.architecture:
            continue
        if name is not None and not toolchain.known[name]:
            print(f"  left out  {source}: {toolchain.version} does not know {name}", flush=True)
            continue
        flags = [*ours, *toolchain.kernel_flags(source)]
        units.append(unit(source, str(source.relative_to("csrc").with_suffix("")), flags))
    binding_library = nanobind_root / "src" / "nb_combined.cpp"
    units.append(unit(binding_library, "nanobind", [*common, "-fno-strict-aliasing"]))
    ranks = {None: -1, **{name: rank for rank, name in enumerate(INSTRUCTION_SETS)}}
    return sorted(units, key=lambda unit: ranks[instruction_set(unit.source)])


def compile_units(units: list[Unit]) -> bool:
    """Compile the units that need it, several at a time; return whether there were any."""
    stale = [unit for unit in units if not unit.is_current()]
    stale.sort(key=lambda unit: (instruction_set(unit.source) is None, -unit.source.stat().st_size))
    if stale:
        print(f"csrc: compiling {len(stale)} of {len(units)} files", flush=True)
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(unit.compile): unit for unit in stale}
        for count, future in enumerate(as_completed(running), 1):
            if future.exception():
                pool.shutdown(cancel_futures=True)
            name = running[future].source.name
            print(f"  [{count}/{len(stale)}] {name}  {future.result():.1f} s", flush=True)
    return bool(stale)


def link_command(units: list[Unit], toolchain: Toolchain, target: Path) -> list[str]:
    system = ["-Wl,--gc-sections", TORCH_LIBRARIES]
    if sys.platform == "darwin":
        system = ["-undefined", "dynamic_lookup", "-Wl,-dead_strip"]
    # fmt: off
    return [
        *toolchain.compiler, "-shared", *(str(unit.object) for unit in units),
        "-o", str(target), *toolchain.openmp_link, *system,
        *shlex.split(os.environ.get("LDFLAGS", "")),
    ]
    # fmt: on


def link(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


def write_compile_commands(units: list[Unit]) -> None:
    """Tell editors, clang-tidy and the sanitizers' build how each source is compiled."""
    entries = [
        {"directory": str(ROOT), "file": str(unit.source), "arguments": unit.command}
        for unit in units
    ]
    Path(ROOT, "build", "compile_commands.json").write_text(json.dumps(entries, indent=1))


class BuildPython(build_py):
    def run(self) -> None:
        # what an earlier build of a checkout left there would be installed too
        shutil.rmtree(Path(self.build_lib, "vllm_relay"), ignore_errors=True)
        super().run()


class BuildExtension(build_ext):
    def build_extension(self, ext: Extension) -> None:
        toolchain = Toolchain()
        folder = Path("build", f"csrc-{sysconfig.get_config_var('SOABI')}-{toolchain.architecture}")
        units = plan_units([Path(source) for source in ext.sources], toolchain, folder)
        library = folder / "_C.so"
        command = link_command(units, toolchain, library)
        linked = library.with_suffix(".command")  # names the objects, so that none too many is kept
        if (
            compile_units(units)
            or not library.exists()
            or not linked.exists()
            or linked.read_text() != shlex.join(command)
        ):
            link(command)
            linked.write_text(shlex.join(command))
        if toolchain.architecture == platform.machine():  # for this machine's tools
            write_compile_commands(units)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target)


def sources() -> list[str]:
    found = sorted(path.relative_to(ROOT).as_posix() for path in CSRC.rglob("*.cpp"))
    if "csrc/bindings.cpp" not in found:
        raise SystemExit(f"vllm-relay: {CSRC / 'bindings.cpp'} is missing: incomplete source tree")
    return found


setup(
    ext_modules=[Extension("vllm_relay._C", sources())],
    cmdclass={"build_py": BuildPython, "build_ext": BuildExtension},
)
