"""Whether the committed gRPC stubs are what the .proto files generate, and the command that makes them so.

uv run tools/protogen.py            # regenerate into packages/skyrl-rollout/src
uv run tools/protogen.py --check    # write nothing; exit code 1 and the names of stubs that differ
"""

import argparse
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
PROTO_ROOT = ROOT / "protos"
STUB_ROOT = ROOT / "packages/skyrl-rollout/src"
STUB_ENDINGS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def proto_files() -> list[str]:
    """Paths of all .proto files below the proto root, as protoc wants them: relative to that root."""
    return sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.rglob("*.proto"))


def generate(target: Path) -> None:
    """Write messages, type stubs and services of every .proto file below `target`."""
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    outputs = [f"--python_out={target}", f"--pyi_out={target}", f"--grpc_python_out={target}"]
    code = protoc.main(["protoc", f"-I{PROTO_ROOT}", f"-I{well_known}", *outputs, *proto_files()])
    if code != 0:
        raise SystemExit(f"protogen: protoc ended with {code}; its message is above")


def stubs(below: Path) -> dict[str, bytes]:
    """Every stub file below a folder, by its relative path."""
    found = (path for path in below.rglob("*") if path.name.endswith(STUB_ENDINGS))
    return {str(path.relative_to(below)): path.read_bytes() for path in found}


def differences() -> list[str]:
    """Names of stubs that are missing, stale or left over from a .proto file that is gone."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = stubs(Path(folder))
    committed = stubs(STUB_ROOT)
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main() -> int:
    """Generate, or compare and name what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    if not parser.parse_args().check:
        generate(STUB_ROOT)
        print(f"wrote {len(stubs(STUB_ROOT))} files below {STUB_ROOT.relative_to(ROOT)}")
        return 0
    stale = differences()
    if stale:
        print("stubs that regenerating would change: run `uv run tools/protogen.py` and commit", *stale, sep="\n  ")
        return 1
    print(f"{len(stubs(STUB_ROOT))} stubs are what {len(proto_files())} .proto files generate")
    return 0


if __name__ == "__main__":
    sys.exit(main())
