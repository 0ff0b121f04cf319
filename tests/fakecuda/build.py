"""Builds the fake CUDA for the PyTorch of the running interpreter: ``build.py FOLDER``.

FOLDER gets one library under the names of the runtime (libcudart) and the driver (libcuda). What is
not written in the sources here is filled in: a function that notes its name, succeeds and does
nothing for each other name that the real runtime has, cuda.h declares, or PyTorch wants of cuBLAS.
"""

import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SITE = Path(sysconfig.get_paths()["purelib"])
CUDA = SITE / "nvidia" / "cu13"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-w", f"-I{CUDA / 'include'}")


def said(*command: str | Path, given: str | None = None) -> str:
    words = [str(word) for word in command]
    return subprocess.run(words, input=given, text=True, check=True, stdout=subprocess.PIPE).stdout


def symbols(*asked: str | Path) -> set[str]:
    """What nm, asked so, names; without versions."""
    lines = said("nm", *asked).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if len(line.split()) > 1}


def wanted() -> set[str]:
    """All names that must be there."""
    runtime = symbols("-D", "--defined-only", CUDA / "lib" / "libcudart.so.13")
    torch = symbols(
        "-D", "--undefined-only", *sorted((SITE / "torch" / "lib").glob("libtorch_cuda*.so"))
    )
    header = said("g++", "-E", "-x", "c++", *FLAGS, "-", given="#include <cuda.h>\n")
    driver = set(re.findall(r"\bCUresult\s+(cu[A-Z]\w*)\s*\(", header))
    return (
        {name for name in runtime if name.startswith(("cuda", "__cuda"))}
        | {name for name in torch if name.startswith("cublas")}
        | driver
    )


def build(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        objects = []
        for source in sorted(HERE.glob("*.cpp")):
            objects.append(work / f"{source.stem}.o")
            said("g++", *FLAGS, "-c", source, "-o", objects[-1])
        rest = sorted(wanted() - symbols("--defined-only", *objects))
        lines = ["int fakecuda_not_written(const char *);"]
        lines += [f'int {name}(void) {{ return fakecuda_not_written("{name}"); }}' for name in rest]
        (work / "rest.c").write_text("\n".join(lines) + "\n")
        library = folder / "libcudart.so.13"
        said("gcc", "-w", "-fPIC", "-c", work / "rest.c", "-o", work / "rest.o")
        said(
            *("g++", "-shared", "-Wl,-soname,libcudart.so.13", *objects, work / "rest.o"),
            *("-o", library, "-ldl"),
        )
    for other in ("libcuda.so.1", "libcuda.so"):
        (folder / other).unlink(missing_ok=True)
        (folder / other).symlink_to(library.name)
    print(f"fake CUDA: {library}, {len(rest)} functions that do nothing")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
