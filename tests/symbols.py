#!/usr/bin/env python3
"""What the built library shows to the loader: its exported symbols are the version map's and the headers' functions, and it
needs no CUDA, NCCL or C++ library. Prints one line a check in cmocka's style."""
import argparse
import ctypes
import os
import re
import subprocess
import sys

# Part of glibc, on every system that runs the library.
LIBC = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def run(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, universal_newlines=True).stdout


def exported(library):
    names = set()
    for line in run("nm", "-D", "--defined-only", library).splitlines():
        name, kind = line.split()[-1], line.split()[-2]
        if kind != "A":  # a version node
            names.add(name.split("@")[0])
    return names


def mapped(path):
    """Names in the global parts of the version map."""
    text = re.sub(r"/\*.*?\*/|#[^\n]*", "", open(path).read(), flags=re.S)
    names = set()
    for body in re.findall(r"\{(.*?)\}", text, re.S):
        part = body.split("local:")[0].replace("global:", "")
        names.update(n.strip() for n in part.split(";") if n.strip())
    return names


def declared(headers):
    """Functions that the public headers declare."""
    names = set()
    for path in headers:
        text = re.sub(r"/\*.*?\*/", "", open(path).read(), flags=re.S)
        names.update(re.findall(r"^(?:ncclResult_t|const char \*)\s*(ncclEp\w+)\(", text, re.M))
    return names


def needed(library):
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", library)))


def banner(library):
    """The line that Python loaders look for in the file."""
    return re.search(rb"NCCL EP version \d+\.\d+\.\d+\+cuda\d+\.\d+", open(library, "rb").read())


# What the loader of nccl4py and nccl-extensions binds, in a library that it opens by the link's name.
BOUND = ("GetVersion TensorAlloc TensorDestroy CreateGroup GroupDestroy HandleMemSize InitHandle UpdateHandle CreateHandle "
         "HandleDestroy Dispatch Combine Complete").split()


def loaded(library):
    """What is wrong with `libnccl_ep.so` beside the library, opened as that loader does, and with its banner's version."""
    version, link = ctypes.c_int(), os.path.join(os.path.dirname(library), "libnccl_ep.so")
    so = ctypes.CDLL(link, mode=os.RTLD_NOW)
    wrong = {"ncclEp" + n for n in BOUND if not hasattr(so, "ncclEp" + n)}
    if wrong or so.ncclEpGetVersion(ctypes.byref(version)) != 0:
        return wrong | {"ncclEpGetVersion failed"}
    v = version.value
    text = b"NCCL EP version %d.%d.%d+" % (v // 10000, v // 100 % 100, v % 100)
    return set() if banner(link).group().startswith(text) else {"the banner does not say " + text.decode()}


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--library", required=True)
    args.add_argument("--map", required=True)
    args.add_argument("headers", nargs="+")
    a = args.parse_args()
    symbols, listed, functions = exported(a.library), mapped(a.map), declared(a.headers)
    checks = [
        ("exported symbols equal the map", symbols ^ listed),
        ("exported symbols are ncclEp* only", {s for s in symbols if not s.startswith("ncclEp")}),
        ("declared functions are exported", functions - symbols),
        ("exported functions are declared", symbols - functions),
        ("only libc is needed", needed(a.library) - LIBC),
        ("the soname is libnccl_ep.so.0", set() if "[libnccl_ep.so.0]" in run("readelf", "-d", a.library) else {"it is not"}),
        ("the version banner is there", set() if banner(a.library) else {"it is not"}),
        ("Python loads it by its link and finds its functions", loaded(a.library)),
    ]
    wrong = [c for c in checks if c[1]]
    for name, bad in checks:
        print("[%s ] %s%s" % ("  FAILED " if bad else "       OK", name, ": " + ", ".join(sorted(bad)) if bad else ""))
    print("[  PASSED  ] %d test(s)." % (len(checks) - len(wrong)))
    if wrong:
        print("[  FAILED  ] %d test(s)." % len(wrong))
    return 1 if wrong else 0


sys.exit(main())
