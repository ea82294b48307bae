#!/usr/bin/env python3
"""Prints the licences of everything that is compiled into the library and the command, for a release archive.

licences.py TARGET [NAME=FILE]... asks cargo which crates those are and takes the texts from their sources; equal texts are
printed once. Each FILE is the licence of something else that is linked in. Fails if a crate has neither a text nor the name of a licence.
"""

import json
import pathlib
import subprocess
import sys

NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE")


def compiled_in(metadata):
    """The packages that the root uses when it runs: neither for its build nor for its tests, and no macros."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    packages = {package["id"]: package for package in metadata["packages"]}
    root = metadata["resolve"]["root"]
    seen, open_ = set(), [root]
    while open_:
        package = open_.pop()
        if package in seen or any("proc-macro" in t["kind"] for t in packages[package]["targets"]):
            continue
        seen.add(package)
        for dependency in nodes[package]["deps"]:
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                open_.append(dependency["pkg"])
    return sorted((packages[package] for package in seen - {root}), key=lambda p: (p["name"], p["version"]))


def texts(package):
    folder = pathlib.Path(package["manifest_path"]).parent
    files = sorted(f for f in folder.iterdir() if f.is_file() and f.name.upper().startswith(NAMES))
    if package.get("license_file"):
        files.append(folder / package["license_file"])
    return [f.read_text(encoding="utf-8", errors="replace").strip() for f in files]


def main():
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", sys.argv[1]]
    metadata = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    print("dsv4 contains the following, each under its own licence.\n")
    print("the Rust standard library: MIT OR Apache-2.0")
    by_text = {}
    for name in ("LICENSE-MIT", "LICENSE-APACHE"):
        for file in sorted(pathlib.Path(sysroot).glob(f"share/doc/**/{name}")):
            by_text.setdefault(file.read_text(encoding="utf-8").strip(), []).append("the Rust standard library")
    for other in sys.argv[2:]:
        title, file = other.split("=", 1)
        print(f"{title}: see below")
        by_text.setdefault(pathlib.Path(file).read_text(encoding="utf-8").strip(), []).append(title)
    for package in compiled_in(metadata):
        title = f"{package['name']} {package['version']}"
        found = texts(package)
        if not found and not package.get("license"):
            sys.exit(f"licences.py: {title} says nothing about its licence")
        print(f"{title}: {package.get('license') or 'see below'}" + ("" if found else " (its sources have no text)"))
        for text in dict.fromkeys(found):
            by_text.setdefault(text, []).append(title)
    for text, titles in by_text.items():
        print("\n" + "=" * 100 + "\n" + ", ".join(dict.fromkeys(titles)) + "\n" + "-" * 100 + "\n\n" + text)


if __name__ == "__main__":
    main()
